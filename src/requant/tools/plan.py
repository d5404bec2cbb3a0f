"""``requant plan``: what a recipe will do to a model, and what that will take, without reading a weight."""

import re
from collections import defaultdict
from collections.abc import Hashable, Sequence

from rich.console import Console
from rich.table import Table

from requant.loading.plan import LayerPlan, Plan
from requant.loading.units import show_bytes
from requant.tools.tables import add_row, new_table, ranges

WIDE = 160
"""Columns that hold a layer, its target, pattern, activation and sizes in one line: for output to a file or a pipe."""

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def render(plan: Plan, console: Console, every_layer: bool = False) -> None:
    """Print a plan: the quantized layers, the kept ones, warnings, totals and estimated device memory.

    Args:
        plan: The plan.
        console: Where to. Names fold where it is narrow; :data:`WIDE` columns are wide enough for most.
        every_layer: A row for each layer; else layers that differ only in their indices share one.
    """
    if plan.quantized:
        console.print(_quantized_table(plan, every_layer))
    if plan.kept:
        console.print(_kept_table(plan, every_layer))
    for warning in plan.warnings:
        console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for line in _totals(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _quantized_table(plan: Plan, every_layer: bool) -> Table:
    table = new_table(
        "Quantized layers", "Layers", "Count >", "Source", "Target", "Decided by", "Activation", "Before >", "After >"
    )
    for name, layers in _grouped(plan.quantized, every_layer):
        first = layers[0]
        assert first.format is not None
        _add(table, name, layers, first.source, first.format.name, first.decision.pattern, first.activation)
    return table


def _kept_table(plan: Plan, every_layer: bool) -> Table:
    table = new_table("Kept layers", "Layers", "Count >", "Source", "Reason", "Before >", "After >")
    for name, layers in _grouped(plan.kept, every_layer):
        _add(table, name, layers, layers[0].source, layers[0].storage.reason)
    return table


def _grouped(layers: Sequence[LayerPlan], every_layer: bool) -> list[tuple[str, list[LayerPlan]]]:
    """Layers whose rows would be equal but for the indices in their names, under a name that shows the indices."""
    groups: dict[Hashable, list[LayerPlan]] = defaultdict(list)
    for layer in layers:
        name = layer.name if every_layer else _INDEX.sub("*", layer.name)
        decision = layer.decision
        key = (name, layer.source, decision.format, layer.activation, decision.pattern, layer.storage.reason)
        groups[key].append(layer)
    return [(_joint_name([layer.name for layer in group]), group) for group in groups.values()]


def _joint_name(names: Sequence[str]) -> str:
    """``model.layers.{0-3,7}.mlp`` for several that differ in one index; ``*`` where more than one differs."""
    if len(names) == 1:
        return names[0]
    indices = [tuple(map(int, _INDEX.findall(name))) for name in names]
    varying = [i for i, column in enumerate(zip(*indices, strict=True)) if len(set(column)) > 1]
    if len(varying) != 1:
        return _INDEX.sub("*", names[0])
    column = [row[varying[0]] for row in indices]
    cells = ["{" + ranges(column) + "}" if i == varying[0] else text for i, text in enumerate(map(str, indices[0]))]
    return _INDEX.sub(lambda _: cells.pop(0), names[0])


def _add(table: Table, name: str, layers: Sequence[LayerPlan], *cells: str) -> None:
    """Add the row of some layers."""
    before, after = sum(layer.bytes_before for layer in layers), sum(layer.bytes_after for layer in layers)
    add_row(table, name, str(len(layers)), *cells, show_bytes(before), show_bytes(after))


def _totals(plan: Plan) -> list[str]:
    dtype = str(plan.dtype).removeprefix("torch.")
    before = sum(layer.bytes_before for layer in plan.quantized)
    after = sum(layer.bytes_after for layer in plan.quantized)
    of_rank = f" of rank {plan.ranks.rank}" if plan.ranks.size > 1 else ""
    layout = f" + {show_bytes(plan.layout_bytes)} layout" if plan.layout_bytes else ""
    return [
        f"{plan.model}, {dtype} on {plan.device}",
        f"{len(plan.quantized)} layers quantized: {show_bytes(before)} → {show_bytes(after)}; "
        f"{len(plan.kept)} layers kept: {show_bytes(sum(layer.bytes_after for layer in plan.kept))}; "
        f"everything else: {show_bytes(plan.plain_bytes)}",
        f"Estimated device memory{of_rank}: {show_bytes(plan.weight_bytes)} weights{layout}, and up to "
        f"{show_bytes(plan.loading_bytes)} more while loading; {show_bytes(plan.bytes_to_read)} are read",
    ]
