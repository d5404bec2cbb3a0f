"""Tables as ``requant plan`` prints them."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def ranges(values: Sequence[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def new_table(title: str, *columns: str) -> Table:
    """A table; a column whose header ends in ``>`` holds numbers."""
    table = Table(title=title, title_justify="left", highlight=False, box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        if column.endswith(" >"):
            table.add_column(column.removesuffix(" >"), justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text: a pattern's brackets are not markup."""
    table.add_row(*map(Text, cells))
