from pathlib import Path

import pytest
import requant_fakes


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return requant_fakes.make_tokenizer(tmp_path_factory.mktemp("tiny"))
