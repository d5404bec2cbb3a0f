"""Which parameter of the model each weight of the checkpoint feeds, as transformers itself would load it.

transformers renames the tensors of a checkpoint, and merges the matrices of experts into stacks. Its own rules are
asked, so that every architecture whose checkpoints it loads is followed.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from requant.integrations.transformers.sources import Source


@dataclass(frozen=True)
class Feed:
    """A weight of the checkpoint on its way into a parameter.

    Attributes:
        source: The weight.
        target: The parameter; the first one, where a conversion makes several.
        converter: The conversion that takes it; None: it is a parameter as it is.
        pattern: The conversion's pattern that its name matches.
    """

    source: Source
    target: str
    converter: WeightConverter | None
    pattern: str | None


@dataclass(frozen=True)
class Routes:
    """The way of every weight.

    Attributes:
        feeds: Parameter → what feeds it, in the order in which transformers stacks it.
        unused: The weights that the model has no parameter for.
    """

    feeds: dict[str, list[Feed]]
    unused: list[Source]


class Renamer:
    """transformers' rules for the names of one model.

    Args:
        model: The model, on no device.
        conversions: Its renamings and converters, of ``get_model_conversion_mapping``.
    """

    def __init__(self, model: PreTrainedModel, conversions: Sequence[Any]) -> None:
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._prefix = model.base_model_prefix
        self.parameters: dict[str, Any] = model.state_dict()

    def target(self, name: str) -> tuple[str, str | None]:
        """The parameter that a tensor feeds, and the converter's pattern that takes it there."""
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.parameters)
        if renamed not in self.parameters and name in self.parameters:
            return name, None
        return renamed, pattern

    def route(self, name: str) -> str:
        """A tensor's name after all renamings, before a converter sees it."""
        return rename_source_key(name, self._renamings, [])[0]

    def converter(self, pattern: str | None) -> WeightConverter | None:
        """The converter that a pattern belongs to."""
        return self._by_pattern[pattern] if pattern is not None else None


def find_routes(sources: Iterable[Source], renamer: Renamer) -> Routes:
    """Follow every weight to its parameter."""
    feeds: dict[str, list[Feed]] = defaultdict(list)
    unused: list[Source] = []
    for source in sorted(sources, key=lambda source: dot_natural_key(source.name)):
        target, pattern = renamer.target(source.name)
        if target not in renamer.parameters:
            unused.append(source)
            continue
        converter = renamer.converter(pattern)
        feed = Feed(source, target, converter, pattern)
        for result in converter.target_patterns if converter else (target,):
            feeds[target.replace(converter.target_patterns[0], result) if converter else target].append(feed)
    return Routes(dict(feeds), unused)


def is_stacking(feeds: Sequence[Feed]) -> bool:
    """Whether a parameter is the matrices of its experts, one after the other, and nothing else."""
    converter = feeds[0].converter
    if converter is None or any(feed.converter is not converter for feed in feeds):
        return False
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    merged, joined = (MergeModulelist, 0), (Concatenate, 1)
    return kinds == [merged, joined] or (kinds == [merged] and len(converter.source_patterns) == 1)
