"""``requant plan``: what a recipe will do to a model, and what that will take, without reading a weight."""

import re
from collections import defaultdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from requant.loading.plan import LayerPlan, Plan
from requant.loading.units import show_bytes

WIDE = 160
"""Columns that hold a layer, its target, pattern, activation and sizes in one line: for output to a file or a pipe."""

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def render(plan: Plan, console: Console) -> None:
    """Print a plan: every quantized layer, the kept ones by reason, warnings, totals and estimated device memory.

    Args:
        plan: The plan.
        console: Where to. Names fold where it is narrow; :data:`WIDE` columns are wide enough for most.
    """
    if plan.quantized:
        console.print(_quantized_table(plan))
    if plan.kept:
        console.print(_kept_table(plan))
    for warning in plan.warnings:
        console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for line in _totals(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _quantized_table(plan: Plan) -> Table:
    table = _table("Quantized layers", "Layer", "Target", "Decided by", "Activation", "Before >", "After >")
    for layer in plan.quantized:
        assert layer.format is not None
        before, after = show_bytes(layer.bytes_before), show_bytes(layer.bytes_after)
        _add(table, layer.name, layer.format.name, layer.decision.pattern, layer.activation, before, after)
    return table


def _kept_table(plan: Plan) -> Table:
    """Layers that differ in their indices only share a row."""
    groups: dict[tuple[str, str, str], list[LayerPlan]] = defaultdict(list)
    for layer in plan.kept:
        groups[_INDEX.sub("*", layer.name), layer.source, layer.decision.reason].append(layer)
    table = _table("Kept layers", "Layers", "Count >", "Source", "Reason", "Before >", "After >")
    for (name, source, reason), layers in groups.items():
        shown = layers[0].name if len(layers) == 1 else name
        before, after = sum(layer.bytes_before for layer in layers), sum(layer.bytes_after for layer in layers)
        _add(table, shown, str(len(layers)), source, reason, show_bytes(before), show_bytes(after))
    return table


def _table(title: str, *columns: str) -> Table:
    """A table; a column whose header ends in ``>`` holds numbers."""
    table = Table(title=title, title_justify="left", highlight=False, box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        if column.endswith(" >"):
            table.add_column(column.removesuffix(" >"), justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """Add a row of plain text: a pattern's brackets are not markup."""
    table.add_row(*map(Text, cells))


def _totals(plan: Plan) -> list[str]:
    dtype = str(plan.dtype).removeprefix("torch.")
    before = sum(layer.bytes_before for layer in plan.quantized)
    after = sum(layer.bytes_after for layer in plan.quantized)
    layout = f" + {show_bytes(plan.layout_bytes)} layout" if plan.layout_bytes else ""
    return [
        f"{plan.model}, {dtype} on {plan.device}",
        f"{len(plan.quantized)} layers quantized: {show_bytes(before)} → {show_bytes(after)}; "
        f"{len(plan.kept)} layers kept: {show_bytes(sum(layer.bytes_after for layer in plan.kept))}; "
        f"everything else: {show_bytes(plan.plain_bytes)}",
        f"Estimated device memory: {show_bytes(plan.weight_bytes)} weights{layout}, and up to "
        f"{show_bytes(plan.loading_bytes)} more while loading; {show_bytes(plan.bytes_to_read)} are read",
    ]
