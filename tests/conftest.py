"""What a machine lacks is skipped, and the summary says why."""

import logging
from collections.abc import Iterator

import pytest
import torch

# Tiny matrices gain nothing from a second thread, and lose much where the cores are shared.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models-dir", help="a folder with trained models, for the tests of quality")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A test that runs a program in this process leaves the program's logging configuration behind."""
    loggers = (logging.getLogger(), logging.getLogger("requant"))
    before = [(log.level, log.handlers[:]) for log in loggers]
    yield
    for log, (level, handlers) in zip(loggers, before, strict=True):
        log.setLevel(level)
        log.handlers[:] = handlers
