"""Making the plan: the model's modules, the checkpoint's headers and the recipe, brought together.

Every error about names, shapes and formats comes from here, before a weight is read.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import torch
from torch import nn

from requant.formats.base import Format
from requant.formats.shard import Shard, touched
from requant.formats.storage import Storage, store
from requant.loading.headers import Checkpoint
from requant.loading.leftovers import block_of, check_leftovers
from requant.loading.plan import Conversion, LayerPlan, Plan, ScaleStep, Step
from requant.loading.protocols import PlainModule, QuantizableModule
from requant.loading.sources import SourcePart, Sources
from requant.parallel import ALONE, Placement, Ranks
from requant.recipe import Decision, LayerNames, Recipe, resolve, source_quantization

RUN_BYTES = 16 * 1024
"""Rows are read piece by piece only where a piece has this many bytes, which take longer than to ask for them."""


class CachedParts(Protocol):
    """Matrices of a checkpoint that have been quantized before."""

    def part(self, placement: Placement, format: Format) -> tuple[SourcePart, Placement] | None:
        """One of them in ``format``, whole, and where it lies now; None: it is not among them."""


def make_plan(
    model: nn.Module,
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
    name: str,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    not_loaded: Sequence[LayerNames] = (),
    copies: Container[str] = (),
    ranks: Ranks = ALONE,
    run_bytes: int = RUN_BYTES,
    cached: CachedParts | None = None,
) -> Plan:
    """Decide every layer, and account for every tensor of the checkpoint and every parameter of the model.

    Args:
        model: The model; its modules own no parameter yet.
        checkpoint: The headers.
        recipe: What to quantize.
        name: The model as the user named it, for report and messages.
        config: The checkpoint's ``config.json``.
        dtype: Of activations and of parameters that are not quantized.
        device: Where the model will run.
        not_loaded: Layers that a recipe could reach and the model does not run, where the checkpoint has them.
        copies: Tensors of the checkpoint that are not read, being copies of others.
        ranks: The one that the model was made for.
        run_bytes: Of a rank's columns, rows with fewer bytes than this in each are read whole and cut on the device.
        cached: Matrices that have been quantized before: those that are there are read instead of the checkpoint's.

    Raises:
        CheckpointError: The checkpoint is quantized in a way that is not loaded, a tensor is missing, or has
            another shape or dtype than the model takes, or belongs nowhere.
        RecipeError: The recipe does not fit the model.
    """
    sources = Sources(checkpoint, source_quantization(config))
    reachable = {key: module for key, module in model.named_modules() if isinstance(module, QuantizableModule)}
    for module in reachable.values():
        module.match_checkpoint(checkpoint.tensors)
    absent = _present(not_loaded, checkpoint)
    resolution = resolve(recipe, [*(module.names for module in reachable.values()), *absent])
    planner = _Planner(sources, dtype, device, ranks.size * run_bytes, cached)
    for key, module in model.named_modules():
        if key in reachable:
            planner.add_layer(key, reachable[key], resolution.decisions[reachable[key].names.module])
        elif isinstance(module, PlainModule):
            planner.add_plain(key, module.placements)
    for names in absent:
        planner.layers.append(_not_loaded(names, resolution.decisions[names.module], checkpoint))
    leftover = check_leftovers(
        checkpoint,
        sources.used,
        tied=any(module.tied for module in reachable.values()),
        not_loaded=[names.module for names in absent],
        copies=copies,
    )
    return Plan(
        model=name,
        recipe=recipe.to_dict(),
        dtype=dtype,
        device=device,
        layers=tuple(planner.layers),
        steps=tuple(sorted(planner.steps, key=lambda step: (str(step.tensor.file), step.tensor.start, step.begin))),
        scales=tuple(planner.scales),
        conversions=tuple(planner.conversions),
        plain_bytes=planner.plain_bytes,
        ranks=ranks,
        unmatched_patterns=resolution.unmatched_patterns,
        warnings=(*resolution.warnings, *_notes(planner.layers), *leftover),
    )


class _Planner:
    """Collects steps and layers."""

    def __init__(
        self,
        sources: Sources,
        dtype: torch.dtype,
        device: torch.device,
        whole_row_bytes: int,
        cached: CachedParts | None,
    ) -> None:
        self._sources = sources
        self._cached = cached
        self._whole_row_bytes = whole_row_bytes
        self._dtype = dtype
        self._device = device
        self.layers: list[LayerPlan] = []
        self.steps: list[Step] = []
        self.scales: list[ScaleStep] = []
        self.conversions: list[Conversion] = []
        self.plain_bytes = 0

    def add_layer(self, key: str, module: QuantizableModule, decision: Decision) -> None:
        """Plan a layer that a recipe can reach."""
        matrices = [placement for placement in module.placements if len(placement.shape) == 2]
        parts = [self._sources.part(placement) for placement in matrices]
        storage = store(decision, [part.format for part in parts])
        format = storage.format
        shares = module.tied and format is None
        after = 0
        if not shares:
            scale_offsets: dict[str, int] = defaultdict(int)
            for part, placement in zip(parts, matrices, strict=True):
                scale_offset = scale_offsets[placement.parameter]
                if format is not None and part.format != format:
                    self.conversions.append(Conversion(key, placement, format, scale_offset))
                if not placement.own_rows:
                    continue
                shard = self._add_part(key, part, placement, storage, scale_offset)
                if shard:
                    scale_offsets[placement.parameter] += len(shard.scale_rows)
                    after += shard.nbytes
                else:
                    after += prod(placement.own_shape) * (placement.dtype or self._dtype).itemsize
            self.add_plain(key, [placement for placement in module.placements if len(placement.shape) != 2])
        self.layers.append(
            LayerPlan(
                decision=decision,
                storage=storage,
                parts=module.names.parts,
                source="+".join(sorted({part.name for part in parts})),
                activation=module.activation(format) or str(self._dtype).removeprefix("torch."),
                bytes_before=sum(_bytes_before(part, p) for part, p in zip(parts, matrices, strict=True) if p.own_rows),
                bytes_after=after,
                layout_bytes=module.layout_bytes(format, self._dtype, self._device),
            )
        )

    def add_plain(self, key: str, placements: Iterable[Placement]) -> None:
        """Plan tensors that are cast to the parameter's dtype."""
        for placement in placements:
            tensor = self._sources.plain(placement)
            if placement.own_rows:
                columns = range(prod(placement.shape[1:]))
                self.steps.append(Step(tensor, key, placement, placement.own_rows, columns))
                self.plain_bytes += prod(placement.own_shape) * (placement.dtype or self._dtype).itemsize

    def _add_part(
        self, key: str, part: SourcePart, placement: Placement, storage: Storage, scale_offset: int
    ) -> Shard | None:
        """Plan the way of one matrix; how it is stored, if that is in a format."""
        format = storage.format
        if self._cached and format is not None and part.format != format:
            part, placement = self._cached.part(placement, format) or (part, placement)
        source = part.format
        rows, columns, whole = self._reading(part, placement, format)
        # Decided by what is the same on all ranks: one whose blocks happen to reach over the whole row takes part.
        together = not whole and placement.columns is not None and format is not None and not format.group[1]
        together = together and source != format
        step = Step(part.tensor, key, placement, rows, columns, source, format, scale_offset, together=together)
        shard = step.shard
        if part.scale is not None:
            assert source is not None
            if shard is not None and not step.converts:
                parameter = f"{placement.parameter}_scale"
                scales = part.scale.cut(shard.scale_rows)
                self.scales.append(ScaleStep(scales, shard.scale_columns, key, parameter, scale_offset))
            else:
                scales = part.scale.cut(touched(rows, source.group[0]))
                step = replace(step, scale=len(self.scales))
                self.scales.append(ScaleStep(scales, touched(columns, source.group[1]), key))
        self.steps.append(step)
        return shard

    def _reading(self, part: SourcePart, placement: Placement, format: Format | None) -> tuple[range, range, bool]:
        """The rows and the columns of a matrix that are read, and whether rows are read whole because they are short.

        Whoever dequantizes or quantizes needs whole blocks. Of a short row, a read for each would cost more than the
        rest of it.
        """
        n, k = placement.shape
        rows, columns = placement.own_rows, placement.own_columns
        converting = [f for f in (part.format, format) if f is not None and part.format != format]
        for one in converting:
            rows = one.row_window(rows, n)
        if Step(part.tensor, "", placement, rows, range(k)).row_bytes < self._whole_row_bytes:
            return rows, range(k), True
        for one in filter(None, (format, *converting)):
            columns = one.column_window(columns, k)
        return rows, columns, False


def _present(not_loaded: Sequence[LayerNames], checkpoint: Checkpoint) -> list[LayerNames]:
    """Those of the layers that are not loaded whose block (``model.layers.61``) the checkpoint has tensors of."""
    blocks = {block for name in checkpoint.tensors if (block := block_of(name))}
    return [names for names in not_loaded if block_of(names.module) in blocks]


def _bytes_before(part: SourcePart, placement: Placement) -> int:
    """Bytes of what this rank has of a matrix in the checkpoint."""
    own, columns = placement.own_rows, placement.own_columns
    nbytes = Step(part.tensor, "", placement, own, columns, part.format, part.format).wanted_bytes
    if part.format is None or part.scale is None:
        return nbytes
    n, k = placement.shape
    shard = Shard(part.format, (n, k), own, columns)
    scales = ScaleStep(part.scale.cut(shard.scale_rows), shard.scale_columns, "")
    return nbytes + scales.wanted_bytes


def _not_loaded(names: LayerNames, decision: Decision, checkpoint: Checkpoint) -> LayerPlan:
    tensors = [checkpoint.tensors[f"{part}.weight"] for part in names.parts if f"{part}.weight" in checkpoint.tensors]
    return LayerPlan(
        decision=decision,
        storage=Storage(None, False, decision.reason),
        parts=names.parts,
        source="+".join(sorted({info.dtype for info in tensors})),
        activation="",
        bytes_before=sum(info.nbytes for info in tensors),
        bytes_after=0,
        layout_bytes=0,
    )


def _notes(layers: Iterable[LayerPlan]) -> list[str]:
    """One warning for each kind of thing to be told of some layers, however many they are."""
    told: dict[str, list[str]] = defaultdict(list)
    for layer in layers:
        if layer.storage.note:
            told[layer.storage.note].append(layer.name)
    return [
        f"{len(names)} layer{'s' if len(names) > 1 else ''}: {note} ({names[0]}{' first' if len(names) > 1 else ''})"
        for note, names in told.items()
    ]
