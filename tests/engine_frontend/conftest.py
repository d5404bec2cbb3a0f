from pathlib import Path

import pytest
import requant_fakes

from requant.engine.config import ModelConfig
from requant.engine.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return requant_fakes.make_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(ModelConfig(model=str(tiny_model)))
