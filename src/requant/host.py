"""The machine and the interpreter that this process runs on."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def without_collections() -> Iterator[None]:
    """Python looks for cycles whenever objects become more, and a plan has dozens for each tensor.

    With 18,867 tensors: 0.5 s of a load of 2.5 s, and 0.8 of 1.9 s for reading headers and planning.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
