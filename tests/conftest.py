"""What a machine lacks is skipped, and the summary says why."""

from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--models-dir", type=Path, metavar="PATH", help="folder of trained checkpoints, for `models` tests"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device"
    if config.getoption("--models-dir") is None:
        missing["models"] = "needs trained checkpoints: --models-dir PATH"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def models_dir(pytestconfig: pytest.Config) -> Path:
    """The folder given by ``--models-dir``; for tests marked ``models``."""
    path = pytestconfig.getoption("--models-dir")
    assert path.is_dir(), f"--models-dir {path} is not a folder"
    return path
