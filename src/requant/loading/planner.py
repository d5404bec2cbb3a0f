"""Making the plan: the model's modules, the checkpoint's headers and the recipe, brought together.

Every error about names, shapes and formats comes from here, before a weight is read.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from requant.errors import CheckpointError
from requant.formats import FORMATS
from requant.kernels.table import layout_bytes
from requant.loading.headers import Checkpoint, TensorInfo
from requant.loading.leftovers import check_leftovers
from requant.loading.plan import SOURCE_DTYPES, LayerPlan, Plan, Step
from requant.loading.protocols import PlainModule, QuantizableModule
from requant.parallel import Placement
from requant.recipe import Decision, Recipe, resolve, source_quantization


def make_plan(
    model: nn.Module,
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
    name: str,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
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

    Raises:
        CheckpointError: The checkpoint is quantized in a way that is not loaded, a tensor is missing, or has
            another shape or dtype than the model takes, or belongs nowhere.
        RecipeError: The recipe does not fit the model.
    """
    source_quantization(config)
    reachable = {key: module for key, module in model.named_modules() if isinstance(module, QuantizableModule)}
    resolution = resolve(recipe, [module.names for module in reachable.values()])
    planner = _Planner(checkpoint, dtype, device)
    for key, module in model.named_modules():
        if key in reachable:
            planner.add_layer(key, reachable[key], resolution.decisions[reachable[key].names.module])
        elif isinstance(module, PlainModule):
            planner.add_plain(key, module.placements)
    leftover = check_leftovers(checkpoint, planner.used, tied=any(module.tied for module in reachable.values()))
    planner.steps.sort(key=lambda step: (str(step.tensor.file), step.tensor.start))
    return Plan(
        model=name,
        recipe=recipe.to_dict(),
        dtype=dtype,
        device=device,
        layers=tuple(planner.layers),
        steps=tuple(planner.steps),
        plain_bytes=planner.plain_bytes,
        unmatched_patterns=resolution.unmatched_patterns,
        warnings=(*resolution.warnings, *leftover),
    )


class _Planner:
    """Collects steps and layers, and remembers which tensors found a use."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self.layers: list[LayerPlan] = []
        self.steps: list[Step] = []
        self.used: set[str] = set()
        self.plain_bytes = 0

    def add_layer(self, key: str, module: QuantizableModule, decision: Decision) -> None:
        """Plan a layer that a recipe can reach."""
        format = FORMATS[decision.format] if decision.format else None
        weights = [placement for placement in module.placements if placement.parameter == "weight"]
        infos = [self._find(placement) for placement in weights]
        shapes = [(placement.shape[0], placement.shape[1]) for placement in weights]
        shares = module.tied and format is None
        if not shares:
            scale_offset = 0
            for info, placement, (n, k) in zip(infos, weights, shapes, strict=True):
                self.steps.append(Step(info, key, placement, format, scale_offset))
                scale_offset += format.scale_shape(n, k)[0] if format else 0
            self.add_plain(key, tuple(p for p in module.placements if p.parameter != "weight"))
        after = sum(format.nbytes(n, k) if format else n * k * self._dtype.itemsize for n, k in shapes)
        self.layers.append(
            LayerPlan(
                decision=decision,
                format=format,
                parts=module.names.parts,
                source="+".join(sorted({info.dtype for info in infos})),
                activation=(format and format.activation) or str(self._dtype).removeprefix("torch."),
                bytes_before=sum(info.nbytes for info in infos),
                bytes_after=0 if shares else after,
                layout_bytes=sum(layout_bytes(self._device, n, k) for n, k in shapes) if format else 0,
            )
        )

    def add_plain(self, key: str, placements: tuple[Placement, ...]) -> None:
        """Plan tensors that are cast to the model's dtype."""
        for placement in placements:
            self.steps.append(Step(self._find(placement), key, placement))
            self.plain_bytes += prod(placement.shape) * self._dtype.itemsize

    def _find(self, placement: Placement) -> TensorInfo:
        info = self._checkpoint.tensors.get(placement.tensor)
        if info is None:
            raise CheckpointError(f"tensor {placement.tensor} is missing from {self._checkpoint.folder}")
        if info.shape != placement.shape:
            raise CheckpointError(
                f"tensor {info.name} of {info.file} has shape {list(info.shape)}; "
                f"the model's configuration needs {list(placement.shape)}"
            )
        if info.dtype not in SOURCE_DTYPES:
            raise CheckpointError(
                f"tensor {info.name} of {info.file} is {info.dtype}; accepted: {', '.join(SOURCE_DTYPES)}"
            )
        self.used.add(info.name)
        return info
