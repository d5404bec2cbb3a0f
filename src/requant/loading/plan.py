"""The plan: what loading will do, decided before a weight is read. Made by :func:`requant.loading.make_plan`."""

from dataclasses import dataclass
from typing import Any

import torch

from requant.errors import ConfigError
from requant.formats.base import Format
from requant.loading.headers import TensorInfo
from requant.loading.units import show_bytes
from requant.parallel import Placement
from requant.recipe.layer import Decision

BUDGET = 1024**3
"""Most bytes that loading takes on the device beside the finished weights."""

# A chunk that is quantized and the float32 temporaries of the reference: no checkpoint takes more than this for
# each of its bytes, so small ones need less than BUDGET.
_TEMPORARIES = 8

SOURCE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The dtypes of the checkpoint that can be loaded, as safetensors spells them."""


@dataclass(frozen=True)
class Step:
    """One tensor of the checkpoint on its way into one parameter.

    Attributes:
        tensor: What is read.
        module: Name of the module that owns the parameter.
        placement: Which of its rows the tensor fills.
        format: What the tensor is quantized to; None: cast to the parameter's dtype.
        scale_offset: Row of the module's ``weight_scale`` where the tensor's scales begin.
    """

    tensor: TensorInfo
    module: str
    placement: Placement
    format: Format | None = None
    scale_offset: int = 0


@dataclass(frozen=True)
class LayerPlan:
    """One layer that the recipe could reach.

    Attributes:
        decision: What the recipe says, and which pattern said it.
        format: The target; None: the layer is kept.
        parts: Checkpoint names of the matrices it is made of.
        source: Their dtype in the checkpoint, as safetensors spells it (several joined by ``+``).
        activation: How its input is quantized (``"fp8_per_token"``), or the model's dtype (``"bfloat16"``).
        bytes_before: Bytes of its matrices in the checkpoint.
        bytes_after: Bytes of its matrices on the device, scales included; 0 for a tied head without a copy.
        layout_bytes: Bytes that the layout step adds to them.
    """

    decision: Decision
    format: Format | None
    parts: tuple[str, ...]
    source: str
    activation: str
    bytes_before: int
    bytes_after: int
    layout_bytes: int

    @property
    def name(self) -> str:
        """The module's name."""
        return self.decision.layer


@dataclass(frozen=True)
class Plan:
    """Every tensor of a checkpoint accounted for, and what the model will take.

    Attributes:
        model: The model as the user named it.
        recipe: The recipe as a JSON object, formats by their canonical names.
        dtype: The model's dtype.
        device: Where it will run.
        layers: Every layer that a recipe could reach, in the model's order.
        steps: What is read, in the order of files and offsets.
        plain_bytes: Bytes on the device of all parameters that no recipe reaches (norms, embeddings, biases).
        unmatched_patterns: Excludes that match nothing.
        warnings: One line each, for the log.
    """

    model: str
    recipe: dict[str, Any]
    dtype: torch.dtype
    device: torch.device
    layers: tuple[LayerPlan, ...]
    steps: tuple[Step, ...]
    plain_bytes: int
    unmatched_patterns: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[LayerPlan, ...]:
        """The layers that become quantized."""
        return tuple(layer for layer in self.layers if layer.format)

    @property
    def kept(self) -> tuple[LayerPlan, ...]:
        """The layers that keep the source's precision."""
        return tuple(layer for layer in self.layers if not layer.format)

    @property
    def bytes_to_read(self) -> int:
        """Bytes that are read from the checkpoint."""
        return sum(step.tensor.nbytes for step in self.steps)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all finished parameters on the device, without what the layout step adds."""
        return self.plain_bytes + sum(layer.bytes_after for layer in self.layers)

    @property
    def layout_bytes(self) -> int:
        """Bytes that the layout step adds: on the CPU, a float copy of the quantized layers."""
        return sum(layer.layout_bytes for layer in self.layers)

    @property
    def loading_bytes(self) -> int:
        """Bound of what loading takes beside the finished weights, until it is done."""
        return min(BUDGET, _TEMPORARIES * self.bytes_to_read)

    def device_bytes(self, cache_bytes: int = 0) -> int:
        """Bytes needed on the device: finished weights, and loading's share or, after it, the KV cache's."""
        return self.weight_bytes + self.layout_bytes + max(self.loading_bytes, cache_bytes)

    def to_report(self) -> dict[str, Any]:
        """The report as a JSON object, without the times and the peak, which only a load can tell."""
        return {
            "model": self.model,
            "online_quant_config": self.recipe,
            "num_layers": len(self.quantized),
            "layers": [_row(layer, layer.format) for layer in self.quantized if layer.format],
            "kept": [{"layer": layer.name, "reason": layer.decision.reason} for layer in self.kept],
            "unmatched_patterns": list(self.unmatched_patterns),
        }


def check_memory(plan: Plan, available_bytes: int, cache_bytes: int = 0) -> None:
    """Refuse a model that does not fit, before anything is read.

    Args:
        plan: The plan.
        available_bytes: What the device can give.
        cache_bytes: What the KV cache will take at the least, once loading is done.

    Raises:
        ConfigError: It does not fit; the message has the needed and the available bytes.
    """
    needed = plan.device_bytes(cache_bytes)
    if needed <= available_bytes:
        return
    held = f"{show_bytes(plan.weight_bytes + plan.layout_bytes)} of weights"
    while_loading = plan.loading_bytes >= cache_bytes
    more = (
        f"{show_bytes(plan.loading_bytes)} to load them" if while_loading else f"{show_bytes(cache_bytes)} of KV cache"
    )
    raise ConfigError(
        f"not enough memory on {plan.device} for {plan.model}: {show_bytes(needed)} needed ({held}, {more}), "
        f"{show_bytes(available_bytes)} available"
    )


def _row(layer: LayerPlan, format: Format) -> dict[str, Any]:
    return {
        "layer": layer.name,
        "quant_type": format.quant_type,
        "quant_dtype": format.quant_dtype,
        "source": layer.source,
        "pattern": layer.decision.pattern,
        "activation": layer.activation,
        "bytes_before": layer.bytes_before,
        "bytes_after": layer.bytes_after,
    }
