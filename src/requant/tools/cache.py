"""What a cache of quantized weights holds, for people and as JSON, and which of it nobody wants."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from requant.loading.cache import USABLE, EntryState
from requant.loading.units import show_bytes
from requant.tools.tables import add_row, new_table

WIDE = 160
"""Columns of the table in a file or a pipe."""


def listing(states: Sequence[EntryState], console: Console) -> None:
    """Print a table of the entries, and their bytes in all."""
    if states:
        table = new_table("Quantized weights", "Entry", "Model", "Recipe", "Size >", "Last used", "State")
        for state in states:
            identity = state.description.get("identity", {})
            model, recipe = identity.get("model", ""), json.dumps(identity.get("recipe", {}))
            size = show_bytes(state.nbytes)
            add_row(table, state.folder.name, model, recipe if identity else "", size, _when(state), state.state)
        console.print(table)
    total = show_bytes(sum(state.nbytes for state in states))
    console.print(f"{len(states)} entries, {total}" if len(states) != 1 else f"1 entry, {total}", highlight=False)


def to_json(state: EntryState) -> dict[str, Any]:
    """One entry as a JSON object."""
    return {
        "entry": str(state.folder),
        "state": state.state,
        "bytes": state.nbytes,
        "last_used": state.last_used,
        **state.description.get("identity", {}),
    }


def describe(state: EntryState) -> str:
    """One entry in a line."""
    model = state.description.get("identity", {}).get("model", "")
    return ", ".join(filter(None, (str(state.folder), model, show_bytes(state.nbytes), state.state)))


def unwanted(states: Sequence[EntryState], every: bool = False, max_gb: float | None = None) -> Iterator[EntryState]:
    """What is to be removed.

    Args:
        states: The entries, most recently used first.
        every: All but those that are being written.
        max_gb: The least recently used, too, until what is left takes at most so many 10^9 bytes.
    """
    kept = 0
    for state in states:
        usable = state.state == USABLE
        if state.useless or (usable and (every or (max_gb is not None and kept + state.nbytes > max_gb * 1e9))):
            yield state
        else:
            kept += state.nbytes


def _when(state: EntryState) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(state.last_used))
