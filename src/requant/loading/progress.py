"""How far loading is: a bar on a terminal, a log line every few seconds elsewhere."""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from requant.loading.plan import Plan
from requant.loading.units import show_bytes

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """What loading tells of its progress; a context that lasts as long as the load."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def advance(self, nbytes: int, what: str) -> None:
        """``nbytes`` more are in place; ``what``: the tensor, and what it is quantized to."""


def make_progress(plan: Plan, console: Console | None = None) -> Progress:
    """A bar if the console is a terminal, else log lines.

    Args:
        plan: What will be loaded.
        console: Default: standard error.
    """
    console = console or Console(stderr=True)
    return BarProgress(plan.bytes_to_read, console) if console.is_terminal else LogProgress(plan.bytes_to_read)


class BarProgress:
    """A bar with bytes, bytes per second and what is being quantized; it vanishes when loading is done.

    Args:
        total: Bytes that will be read.
        console: The terminal.
    """

    def __init__(self, total: int, console: Console) -> None:
        # Figures are never cut; the name takes the room that is left.
        self._bar = RichProgress(
            TextColumn("Loading", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=16),
            DownloadColumn(binary_units=False, table_column=Column(no_wrap=True)),
            TransferSpeedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn(
                "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            ),
            console=console,
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, nbytes: int, what: str) -> None:
        """See :class:`Progress`."""
        self._bar.update(self._task, advance=nbytes, description=what)


class LogProgress:
    """Log lines: one every ``interval`` seconds, and one when everything is loaded.

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

    def __enter__(self) -> Self:
        self._begin = self._last = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            now = self._clock()
            logger.info(
                "Loaded %s of weights in %.1f seconds, %s", show_bytes(self._read), now - self._begin, self._speed(now)
            )

    def advance(self, nbytes: int, what: str) -> None:
        """See :class:`Progress`."""
        self._read += nbytes
        now = self._clock()
        if now - self._last >= self._interval:
            self._last = now
            share = 100 * self._read // max(self._total, 1)
            logger.info("Loading weights: %d%% of %s, %s, %s", share, show_bytes(self._total), self._speed(now), what)

    def _speed(self, now: float) -> str:
        return f"{show_bytes(self._read / max(now - self._begin, 1e-9))}/s"
