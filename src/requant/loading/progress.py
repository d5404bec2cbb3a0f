"""How far loading is: a bar on a terminal, a log line every few seconds elsewhere."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from requant.loading.units import show_bytes

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """What loading tells of its progress."""

    def advance(self, nbytes: int, name: str) -> None:
        """``nbytes`` more of the tensor ``name`` are in place."""


@contextmanager
def show_progress(total: int, console: Console | None = None) -> Iterator[Progress]:
    """Show how far loading is, on standard error unless a console is given.

    Args:
        total: Bytes that will be read.
        console: Where to; a bar if it is a terminal, else lines in the log.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        lines = LogProgress(total)
        yield lines
        lines.done()
        return
    columns = (
        TextColumn("Loading weights"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with RichProgress(*columns, console=console, transient=True) as bar:
        yield _BarProgress(bar, total)


class LogProgress:
    """Log lines: one every ``interval`` seconds, and one at the end.

    Args:
        total: Bytes that will be read.
        interval: Seconds between two lines.
        clock: Returns seconds.
    """

    def __init__(self, total: int, interval: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._interval = interval
        self._clock = clock
        self._read = 0
        self._begin = self._last = clock()

    def advance(self, nbytes: int, name: str) -> None:
        """See :class:`Progress`."""
        self._read += nbytes
        now = self._clock()
        if now - self._last >= self._interval:
            self._last = now
            share = 100 * self._read // max(self._total, 1)
            logger.info("Loading weights: %d%% of %s, %s, %s", share, show_bytes(self._total), self._speed(now), name)

    def done(self) -> None:
        """Everything is in place."""
        now = self._clock()
        logger.info(
            "Loaded %s of weights in %.1f seconds, %s", show_bytes(self._read), now - self._begin, self._speed(now)
        )

    def _speed(self, now: float) -> str:
        return f"{show_bytes(self._read / max(now - self._begin, 1e-9))}/s"


class _BarProgress:
    def __init__(self, bar: RichProgress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def advance(self, nbytes: int, name: str) -> None:
        self._bar.update(self._task, advance=nbytes, description=name)
