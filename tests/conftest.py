"""What a machine lacks is skipped, and the summary says why."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Tiny matrices gain nothing from a second thread, and lose much where the cores are shared.
torch.set_num_threads(1)


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


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A test that runs a program in this process leaves the program's logging configuration behind."""
    loggers = (logging.getLogger(), logging.getLogger("requant"))
    before = [(log.level, log.handlers[:]) for log in loggers]
    yield
    for log, (level, handlers) in zip(loggers, before, strict=True):
        log.setLevel(level)
        log.handlers[:] = handlers
