"""What each of several ranks takes, and how the model is cut: the part of ``requant plan`` for ``-tp``."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from rich.console import Console

from requant.engine.build import Planned
from requant.loading.plan import Step
from requant.loading.units import show_bytes
from requant.tools.tables import add_row, new_table, ranges

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass
class _Cut:
    """How tensors that differ in their indices only are cut within a block.

    Attributes:
        columns: (own, stored) columns of a rank, where they differ.
        rows: (own rows, rows of scale blocks touched) of a rank, where blocks are shared with other ranks.
    """

    columns: set[tuple[int, int]] = field(default_factory=set)
    rows: set[tuple[int, int]] = field(default_factory=set)


@dataclass
class _Elements:
    """Of tensors that differ in their indices only: the elements that a rank has, and those of all."""

    own: int = 0
    whole: int = 0


@dataclass(frozen=True)
class RankPlan:
    """One rank's plan in numbers.

    Attributes:
        rank: Which one.
        quantized: Bytes of quantized layers.
        kept: Bytes of layers that keep the source's precision.
        plain: Bytes of everything else.
        layout: Bytes that the layout step adds.
        wanted: Bytes of the checkpoint that it has.
        read: Bytes that it reads.
        sent: Bytes that it gives to the others while loading.
        device: Most bytes that it takes on its device while loading.
        aligned: Whether nothing is read or stored beside what the rank has, but for short rows that are read whole.
        cuts: The tensors that are cut within a block, by name and format.
        elements: How much of each tensor it has, by name.
    """

    rank: int
    quantized: int
    kept: int
    plain: int
    layout: int
    wanted: int
    read: int
    sent: int
    device: int
    aligned: bool
    cuts: dict[tuple[str, str], _Cut]
    elements: dict[str, _Elements]

    @property
    def weights(self) -> int:
        """Bytes of all finished weights."""
        return self.quantized + self.kept + self.plain

    @property
    def numbers(self) -> tuple[int, ...]:
        """What the table shows."""
        taken = self.weights + self.layout
        return self.quantized, self.kept, self.plain, taken, self.device, self.wanted, self.read, self.sent

    def to_dict(self) -> dict[str, int]:
        """For ``--json``."""
        return {
            "rank": self.rank,
            "weight_bytes": self.weights,
            "layout_bytes": self.layout,
            "bytes_wanted": self.wanted,
            "bytes_read": self.read,
            "bytes_sent": self.sent,
        }


def survey_all(size: int, plan_of: Callable[[int], Planned]) -> list[RankPlan]:
    """All ranks in numbers, from as few plans as tell them.

    Args:
        size: How many ranks.
        plan_of: Makes the plan of one.
    """
    first = survey(plan_of(0))
    if size == 1:
        return [first]
    last = survey(plan_of(size - 1))
    # Shares differ by one at most, the larger ones first: where the first is as large as the last and ends with a
    # block, so do all of them.
    if first.aligned and first.numbers == last.numbers:
        return [replace(first, rank=rank) for rank in range(size)]
    return [first, *(survey(plan_of(rank)) for rank in range(1, size - 1)), last]


def survey(planned: Planned) -> RankPlan:
    """A rank in numbers; its plan, which has an object for every tensor, need not be kept."""
    plan = planned.plan
    cuts: dict[tuple[str, str], _Cut] = defaultdict(_Cut)
    for step in plan.steps:
        _note(cuts[_pattern(step.tensor.name), step.format.name if step.format else ""], step)
    elements: dict[str, _Elements] = defaultdict(_Elements)
    # Those of other ranks' experts as well, of which there is no step.
    placements = [placement for layer in planned.model.quantizable() for placement in layer.placements]
    placements += [placement for layer in planned.model.plain() for placement in layer.placements]
    for placement in placements:
        count = elements[_pattern(placement.tensor)]
        count.own += prod(placement.own_shape)
        count.whole += prod(placement.shape)
    return RankPlan(
        rank=plan.ranks.rank,
        quantized=sum(layer.bytes_after for layer in plan.quantized),
        kept=sum(layer.bytes_after for layer in plan.kept),
        plain=plan.plain_bytes,
        layout=plan.layout_bytes,
        wanted=plan.bytes_wanted,
        read=plan.bytes_to_read,
        sent=sum(4 * len(step.rows) for step in plan.steps if step.together),
        device=plan.device_bytes(),
        aligned=not any(cut.columns or cut.rows for cut in cuts.values()) and all(map(_aligned, plan.steps)),
        cuts={key: cut for key, cut in cuts.items() if cut.columns or cut.rows},
        elements=dict(elements),
    )


def _pattern(tensor: str) -> str:
    return _INDEX.sub("*", tensor.removesuffix(".weight"))


def _aligned(step: Step) -> bool:
    columns = step.placement.columns
    whole_rows = columns is None or not step.cut
    return step.rows == step.placement.own_rows and (whole_rows or step.columns == columns)


def _note(cut: _Cut, step: Step) -> None:
    shard = step.shard
    if shard is None:
        return
    if len(shard.window) != len(shard.columns):
        cut.columns.add((len(shard.columns), len(shard.window)))
    group, rows = shard.format.group[0], shard.rows
    if rows.start % group or (rows.stop % group and rows.stop != shard.shape[0]):
        cut.rows.add((len(rows), len(shard.scale_rows)))


def replicated(ranks: Sequence[RankPlan]) -> list[tuple[str, float]]:
    """Tensors that more than one rank has, with the number of ranks that have each element, from most to least."""
    found = []
    for name, elements in ranks[0].elements.items():
        copies = sum(rank.elements[name].own for rank in ranks) / max(elements.whole, 1)
        if copies > 1:
            found.append((name, copies))
    return sorted(found, key=lambda item: -item[1])


def windows(ranks: Sequence[RankPlan]) -> list[dict[str, Any]]:
    """Tensors whose shards begin or end within a group or block of their format."""
    joined: dict[tuple[str, str], _Cut] = defaultdict(_Cut)
    for rank in ranks:
        for key, cut in rank.cuts.items():
            joined[key].columns |= cut.columns
            joined[key].rows |= cut.rows
    return [
        {"tensors": name, "format": format, "columns": sorted(cut.columns), "rows": sorted(cut.rows)}
        for (name, format), cut in joined.items()
    ]


def render_ranks(ranks: Sequence[RankPlan], expert_parallel: bool, console: Console) -> None:
    """Print what each rank takes, where shards and blocks do not meet, and what several ranks have."""
    console.print(_ranks_table(ranks, expert_parallel))
    found = windows(ranks)
    if found:
        table = new_table("Within a block", "Tensors", "Format", "Columns, own → stored", "Rows, own in blocks")
        for row in found:
            columns = ", ".join(f"{own} → {stored}" for own, stored in row["columns"])
            rows = ", ".join(f"{own} in {blocks}" for own, blocks in row["rows"])
            add_row(table, row["tensors"], row["format"], columns or "-", rows or "-")
        console.print(table)
    table = new_table("On several ranks", "Tensors", "Ranks >")
    several = replicated(ranks)
    for name, copies in several:
        add_row(table, name, "all" if copies == len(ranks) else f"{copies:.3g}")
    if several:
        console.print(table)


def _ranks_table(ranks: Sequence[RankPlan], expert_parallel: bool) -> Any:
    title = f"{len(ranks)} ranks, {'whole experts on each' if expert_parallel else 'a share of each layer on each'}"
    names = ("Quantized >", "Kept >", "Other >", "Weights >", "Device >", "Wanted >", "Read >", "Sent >")
    table = new_table(title, "Ranks", *names)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in ranks:
        groups[rank.numbers].append(rank.rank)
    for numbers, members in groups.items():
        add_row(table, ranges(members), *(show_bytes(number) for number in numbers))
    return table
