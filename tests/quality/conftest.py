"""Where the trained models are."""

from pathlib import Path

import pytest

NAMES = ("tiny-qwen3-moe", "tiny-deepseek-v3-mtp", "tiny-deepseek-v3-mtp-fp8")


@pytest.fixture(scope="session")
def models(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--models-dir")
    if folder is None:
        pytest.skip("needs trained models: --models-dir FOLDER")
    missing = [name for name in NAMES if not (Path(folder) / name / "model.safetensors").exists()]
    if missing:
        pytest.skip(f"--models-dir {folder} lacks {', '.join(missing)}")
    return Path(folder)
