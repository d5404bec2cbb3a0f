"""How far a benchmark is: a bar on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from requant.benchmarks.metrics import Record


@contextmanager
def progress(total: int, hidden: bool) -> Iterator[Callable[[Record], None]]:
    """A bar with requests done, those that failed, and time; it wants to be told of each record.

    Nothing is shown where standard error is no terminal.
    """
    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield lambda record: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task, failed = bar.add_task("", total=total, failed=""), 0

        def done(record: Record) -> None:
            nonlocal failed
            failed += record.error is not None
            bar.update(task, advance=1, failed=f"{failed} failed" if failed else "")

        yield done
