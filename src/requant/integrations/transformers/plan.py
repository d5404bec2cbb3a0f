"""What loading will do with each layer, decided from names and headers before a weight is read.

Legend: E experts (1 for a Linear), N output features (rows), K input features.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from requant.errors import CheckpointError
from requant.formats import Format
from requant.formats.storage import Storage, store
from requant.integrations.transformers.config import OnlineQuantConfig
from requant.integrations.transformers.headers import Header
from requant.integrations.transformers.inventory import Layer, find_layers, weights_of
from requant.integrations.transformers.routes import Feed, Renamer, Routes, find_routes
from requant.integrations.transformers.sources import Source, find_sources
from requant.integrations.transformers.weight import Weight, check_others, check_shapes
from requant.recipe import Decision, resolve


@dataclass(frozen=True)
class PlannedLayer:
    """One layer of the recipe, and what becomes of it.

    Attributes:
        layer: The layer.
        decision: What the recipe says.
        storage: What that means for what the checkpoint has.
        sources: The weights of the checkpoint that it is made of.
        weights: Its parameters that are loaded here; none: transformers loads it as it is.
    """

    layer: Layer
    decision: Decision
    storage: Storage
    sources: tuple[Source, ...] = ()
    weights: tuple[Weight, ...] = ()


@dataclass(frozen=True)
class LoadPlan:
    """All layers, in the model's order, and what the user should be told.

    Attributes:
        layers: The layers.
        kept: The parameters and buffers that transformers loads itself, and what they are made of.
        unmatched_patterns: Excludes that match nothing.
        warnings: Lines for the log.
        untied: Where a tied head becomes a copy of its own: its weight, and the embedding's that it was tied to.
        shared: Whether these two are one tensor of the checkpoint.
    """

    layers: tuple[PlannedLayer, ...]
    kept: Mapping[str, Sequence[Feed]]
    unmatched_patterns: tuple[str, ...]
    warnings: tuple[str, ...]
    untied: tuple[str, str] | None = None
    shared: bool = False

    @property
    def weights(self) -> Iterator[Weight]:
        """All parameters that are loaded here."""
        for layer in self.layers:
            yield from layer.weights


def make_plan(
    model: PreTrainedModel, config: OnlineQuantConfig, headers: Mapping[str, Header], renamer: Renamer
) -> LoadPlan:
    """Decide every layer.

    Raises:
        RecipeError: The recipe does not fit the model.
        CheckpointError: The checkpoint has something that cannot be loaded.
    """
    routes = find_routes(find_sources(headers), renamer)
    tied = tied_head(model)
    layers = find_layers(model, routes, tied[1] if tied else None)
    resolution = resolve(config.recipe, [layer.names for layer in layers])
    planned = [_plan(model, layer, resolution.decisions[layer.names.module], routes, tied) for layer in layers]
    check_others(routes, [source for row in planned for source in row.sources])
    loaded = {weight.full_name for row in planned for weight in row.weights}
    untied = tied if tied and tied[0] in loaded else None
    return LoadPlan(
        tuple(planned),
        {target: feeds for target, feeds in routes.feeds.items() if target not in loaded},
        resolution.unmatched_patterns,
        (*resolution.warnings, *_notes(planned)),
        untied,
        untied is not None and not {*untied} <= routes.feeds.keys(),
    )


def _notes(layers: Sequence[PlannedLayer]) -> Iterator[str]:
    """One line for each thing that should be told, however many layers it is about."""
    by_note: dict[str, list[str]] = {}
    for row in layers:
        if row.storage.note:
            by_note.setdefault(row.storage.note, []).append(row.layer.names.module)
    for note, names in by_note.items():
        many = len(names) > 1
        yield f"{len(names)} layer{'s' if many else ''}: {note} ({names[0]}{' first' if many else ''})"


def tied_head(model: PreTrainedModel) -> tuple[str, str] | None:
    """The weight of an output head that is tied, and the parameter that it is tied to; None: it is not."""
    head = model.get_output_embeddings()
    for name, source in model.all_tied_weights_keys.items():
        module, _, last = name.rpartition(".")
        if head is not None and last == "weight" and model.get_submodule(module) is head:
            return name, source
    return None


def _plan(
    model: PreTrainedModel, layer: Layer, decision: Decision, routes: Routes, tied: tuple[str, str] | None
) -> PlannedLayer:
    if layer.names.not_loaded is not None:
        return PlannedLayer(layer, decision, Storage(None, False, decision.reason))
    found = [
        (name, weight, routes.feeds.get(f"{name}.{weight}") or routes.feeds[tied[1] if tied else ""])
        for name in layer.modules
        for weight in weights_of(model.get_submodule(name)) or ("weight",)
    ]
    sources = tuple(feed.source for _, _, feeds in found for feed in feeds)
    for source in sources:
        source.check()
    formats = [source.format for source in sources]
    if layer.names.fixed is not None:
        note = "quantized in the checkpoint; dequantized" if any(formats) else ""
        storage = Storage(None, False, decision.reason, note)
    else:
        storage = store(decision, formats)
    if storage.format is None and not any(formats):
        return PlannedLayer(layer, decision, storage, sources)
    weights = tuple(
        _weight(model.get_submodule(name), name, weight, storage.format, feeds)
        for name, weight, feeds in found
        if storage.format is not None or any(feed.source.format for feed in feeds)
    )
    return PlannedLayer(layer, decision, storage, sources, weights)


def _weight(module: nn.Module, module_name: str, name: str, format: Format | None, feeds: Sequence[Feed]) -> Weight:
    shape = tuple(getattr(module, name).shape)
    transposed = getattr(module, "is_transposed", False) and not feeds[0].source.format
    n, k = shape[:-3:-1] if getattr(module, "is_transposed", False) else shape[-2:]
    experts = shape[0] if len(shape) == 3 else 1
    halves = name.startswith("gate_up") and getattr(module, "is_concatenated", True) and len(shape) == 3
    parts = (n // 2, n // 2) if halves else (n,)
    weight = Weight(module_name, name, (experts, n, k), parts, format, tuple(feeds), transposed)
    if format is None and getattr(module, "is_transposed", False):
        raise CheckpointError(
            f"{feeds[0].source.weight} is {feeds[0].source.weight.dtype}, and {weight.full_name} is kept unquantized "
            "in another order; accepted: a layer that stays quantized"
        )
    check_shapes(weight, shape)
    return weight
