"""The experts of a mixture-of-experts layer, stored together, in any format.

Legend: E experts, H hidden size, I inner size of one expert, T tokens, k experts a token.
"""

from collections.abc import Callable, Container, Iterator

import torch
from torch import Tensor, nn

from requant.formats.base import Format, QuantizedStack
from requant.kernels.experts import UNQUANTIZED, ExpertWeights
from requant.kernels.table import layout_bytes, lookup
from requant.layers.base import QuantizableLayer, empty_parameter, not_finished
from requant.parallel import Placement
from requant.recipe.layer import LayerNames

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class Experts(QuantizableLayer):
    """E expert MLPs: down(act(gate(x)) · up(x)), or down(act(up(x))) where there is no gate.

    A checkpoint has a tensor for each matrix of each expert (``<name>.7.gate_proj.weight``), or one for all experts:
    ``<name>.gate_up_proj`` [E, 2I, H], gate rows first (without a gate ``<name>.up_proj`` [E, I, H]), and
    ``<name>.down_proj`` [E, H, I], with biases ``<name>.gate_up_proj_bias`` and so on, as transformers names them.

    Args:
        name: The module's name (``model.layers.0.mlp.experts``).
        num_experts: E.
        hidden_size: H.
        inner_size: I.
        activation: Name of act in transformers' ``ACT2FN``.
        gated: Whether experts have a gate.
        bias: Whether every matrix has a bias.

    Attributes:
        w13_weight: [E, 2I, H] (or [E, I, H] without a gate) as values or as codes of the format.
        w2_weight: [E, H, I] likewise.
        w13_weight_scale: [E, …] with the scales of one expert behind, gate's first; None if unquantized.
        w2_weight_scale: Likewise.
        w13_bias: [E, 2I] (or [E, I]) in the model's dtype, or None.
        w2_bias: [E, H] likewise.
    """

    w13_weight: nn.Parameter | None
    w2_weight: nn.Parameter | None
    w13_weight_scale: nn.Parameter | None
    w2_weight_scale: nn.Parameter | None
    w13_bias: nn.Parameter | None
    w2_bias: nn.Parameter | None

    def __init__(
        self,
        name: str,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        activation: str,
        gated: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden_size, self.inner_size = num_experts, hidden_size, inner_size
        self.gated, self.bias, self._activation = gated, bias, activation
        self._inputs = ("gate_proj", "up_proj") if gated else ("up_proj",)
        owners = [f"{name}.{expert}.{part}" for expert in range(num_experts) for part in (*self._inputs, "down_proj")]
        self.names = LayerNames(name, tuple(owners))
        self.placements = tuple(self._separate(name))
        for prefix in ("w13", "w2"):
            for suffix in ("weight", "weight_scale", "bias"):
                self.register_parameter(f"{prefix}_{suffix}", None)
        self._format: Format | None = None
        self._dtype = torch.float32
        self._forward: Forward = not_finished

    def match_checkpoint(self, tensors: Container[str]) -> None:
        """Take the tensors of all experts where the checkpoint has such; the parts are then these tensors."""
        name = self.names.module
        stacked = f"{name}.{'gate_up_proj' if self.gated else 'up_proj'}"
        if stacked in tensors:
            self.names = LayerNames(name, (stacked, f"{name}.down_proj"))
            self.placements = tuple(self._together(stacked, f"{name}.down_proj"))

    def build(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> None:
        """Create the weights, for a format their scales, and the biases if there are any."""
        self._format, self._dtype, self._forward = format, dtype, not_finished
        for prefix, (n, k) in self._shapes().items():
            if format is None:
                weight, scale = empty_parameter((self.num_experts, n, k), dtype, device), None
            else:
                weight = empty_parameter((self.num_experts, *format.data_shape(n, k)), format.data_dtype, device)
                shapes = [format.scale_shape(rows, k) for rows in self._parts(prefix)]
                rows = sum(shape[0] for shape in shapes)
                scale = empty_parameter((self.num_experts, rows, shapes[0][1]), format.scale_dtype, device)
            bias = empty_parameter((self.num_experts, n), dtype, device) if self.bias else None
            setattr(self, f"{prefix}_weight", weight)
            setattr(self, f"{prefix}_weight_scale", scale)
            setattr(self, f"{prefix}_bias", bias)

    def layout_bytes(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> int:
        """See :meth:`QuantizableLayer.layout_bytes`."""
        return sum(self.num_experts * layout_bytes(device, n, k) for n, k in self._shapes().values()) if format else 0

    def finish(self) -> None:
        """Ask the kernel table for the forward of this format, which lays the weights out."""
        assert self.w13_weight is not None, "build() comes first"
        b13, b2 = (bias.data if bias is not None else None for bias in (self.w13_bias, self.w2_bias))
        weights = ExpertWeights(self._stack("w13"), self._stack("w2"), b13, b2, self._activation, self.gated)
        name = self._format.name if self._format else UNQUANTIZED
        self._forward = lookup("experts", name, self.w13_weight.device.type)(weights, self._dtype)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """X [T, H], chosen experts int64 [T, k] and their weights float32 [T, k] → [T, H]."""
        return self._forward(x, experts, weights)

    def _parts(self, prefix: str) -> tuple[int, ...]:
        """Rows of the checkpoint matrices that one expert's w13 or w2 is made of."""
        return (self.inner_size,) * len(self._inputs) if prefix == "w13" else (self.hidden_size,)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """[N, K] of one expert's w13 and w2."""
        return {
            "w13": (sum(self._parts("w13")), self.hidden_size),
            "w2": (self.hidden_size, self.inner_size),
        }

    def _stack(self, prefix: str) -> Tensor | QuantizedStack:
        weight, scale = getattr(self, f"{prefix}_weight"), getattr(self, f"{prefix}_weight_scale")
        if self._format is None:
            return weight.data
        return QuantizedStack(weight.data, scale.data, self._format, self._shapes()[prefix], self._parts(prefix))

    def _separate(self, name: str) -> Iterator[Placement]:
        hidden, inner = self.hidden_size, self.inner_size
        for expert in range(self.num_experts):
            for i, part in enumerate(self._inputs):
                owner, offset = f"{name}.{expert}.{part}", (expert * len(self._inputs) + i) * inner
                yield Placement(f"{owner}.weight", (inner, hidden), "w13_weight", offset)
                if self.bias:
                    yield Placement(f"{owner}.bias", (inner,), "w13_bias", offset)
            owner = f"{name}.{expert}.down_proj"
            yield Placement(f"{owner}.weight", (hidden, inner), "w2_weight", expert * hidden)
            if self.bias:
                yield Placement(f"{owner}.bias", (hidden,), "w2_bias", expert * hidden)

    def _together(self, inputs: str, output: str) -> Iterator[Placement]:
        e, hidden, inner = self.num_experts, self.hidden_size, self.inner_size
        rows = inner * len(self._inputs)
        for start in range(0, e * rows, inner):
            yield Placement(inputs, (inner, hidden), "w13_weight", start, whole=(e, rows, hidden), start=start)
        for start in range(0, e * hidden, hidden):
            yield Placement(output, (hidden, inner), "w2_weight", start, whole=(e, hidden, inner), start=start)
        if self.bias:
            yield Placement(f"{inputs}_bias", (e * rows,), "w13_bias", whole=(e, rows))
            yield Placement(f"{output}_bias", (e * hidden,), "w2_bias", whole=(e, hidden))
