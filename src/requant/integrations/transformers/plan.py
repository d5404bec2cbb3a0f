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
from requant.integrations.transformers.routes import Feed, Renamer, Routes, find_routes, is_stacking
from requant.integrations.transformers.sources import BLOCK, Source, find_sources
from requant.recipe import Decision, resolve


@dataclass(frozen=True)
class Weight:
    """One parameter of the model that is loaded here, not by transformers.

    Attributes:
        module: The module that has it.
        name: Its name there.
        shape: (E, N, K) of its values.
        parts: Rows of each part of its matrices, which are quantized by themselves (gate and up).
        format: What it is stored as; None: it stays the parameter that it is, and its source is dequantized.
        feeds: What it is made of.
        transposed: Whether model and checkpoint have [K, N] for each matrix.
    """

    module: str
    name: str
    shape: tuple[int, int, int]
    parts: tuple[int, ...]
    format: Format | None
    feeds: tuple[Feed, ...]
    transposed: bool = False

    @property
    def full_name(self) -> str:
        """Its name in the model."""
        return f"{self.module}.{self.name}"

    @property
    def is_reordered(self) -> bool:
        """Whether transformers does more than to stack matrices: cuts tensors, or moves their elements."""
        return self.feeds[0].converter is not None and not is_stacking(self.feeds)

    def stored_shapes(self, format: Format) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of its codes and scales in a format: E of those of one matrix, whose parts begin new scales."""
        experts, n, k = self.shape
        rows = sum(format.scale_shape(part, k)[0] for part in self.parts)
        return (experts, *format.data_shape(n, k)), (experts, rows, format.scale_shape(n, k)[1])

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in its format."""
        experts, _, k = self.shape
        return experts * sum(self.format.nbytes(n, k) for n in self.parts) if self.format else 0


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
        unmatched_patterns: Excludes that match nothing.
        warnings: Lines for the log.
        untied: Where a tied head becomes a copy of its own: its weight, and the embedding's that it was tied to.
        shared: Whether these two are one tensor of the checkpoint.
    """

    layers: tuple[PlannedLayer, ...]
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
    _check_others(routes, planned)
    untied = tied if tied and any(weight.full_name == tied[0] for row in planned for weight in row.weights) else None
    return LoadPlan(
        tuple(planned),
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
        yield f"{len(names)} layers: {note} ({names[0]} first)" if len(names) > 1 else f"{names[0]}: {note}"


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
    _check_shapes(weight, shape)
    return weight


def _check_shapes(weight: Weight, shape: tuple[int, ...]) -> None:
    """Refuse tensors that do not make up the parameter."""
    feeds = weight.feeds
    experts, n, k = weight.shape
    if weight.is_reordered:
        quantized = next((feed.source for feed in feeds if feed.source.format), None)
        if quantized is not None:
            raise CheckpointError(
                f"{quantized.weight} is {quantized.weight.dtype}, and transformers cuts or reorders it for "
                f"{weight.full_name}; accepted: BF16, F16, F32"
            )
        return
    if feeds[0].converter is None:
        wanted = [shape if weight.transposed else (experts, n, k)[3 - len(shape) :]]
    else:
        each = (n,) if len({feed.pattern for feed in feeds}) == 1 else weight.parts
        wanted = [(rows, k) for rows in each for _ in range(experts)]
    if len(feeds) != len(wanted):
        raise CheckpointError(
            f"{weight.full_name} is made of {len(feeds)} tensors of the checkpoint ({feeds[0].source.name} first); "
            f"the model's configuration needs {len(wanted)}"
        )
    for feed, values in zip(feeds, wanted, strict=True):
        format = feed.source.format
        # Codes that share a byte fill whole groups, so K may be less than what is stored.
        columns = format.data_shape(1, values[-1])[1] * format.codes_per_byte if format else values[-1]
        expected = (*values[:-1], columns)
        if feed.source.shape != expected:
            raise CheckpointError(
                f"{feed.source.weight} has shape {list(feed.source.shape)}; the model's configuration needs "
                f"{list(expected)}"
            )
        rows, cut = BLOCK.group[0], feed.source.format is BLOCK and expected[-2] != weight.parts[0]
        if cut and weight.parts[0] % rows:
            raise CheckpointError(
                f"{feed.source.weight}: its scale blocks of {rows} rows cross the border between matrices of "
                f"{weight.parts[0]} rows; accepted: matrices in tensors of their own, or of a multiple of {rows} rows"
            )


def _check_others(routes: Routes, layers: Sequence[PlannedLayer]) -> None:
    """Refuse quantized tensors that feed anything but a layer: transformers would take the codes for values."""
    known = {id(source) for layer in layers for source in layer.sources}
    for target, feeds in routes.feeds.items():
        for feed in feeds:
            source = feed.source
            if id(source) not in known and source.format is not None and not source.flaw:
                raise CheckpointError(
                    f"{source.weight} is {source.weight.dtype} and feeds {target}, which is neither a Linear nor "
                    "experts; accepted: BF16, F16, F32"
                )
