"""The linear layer: one class, made of parts, whatever the format.

Legend: N output features, K input features; the parts of a layer are checkpoint matrices [n, K] that stack
along N (``q_proj``, ``k_proj``, ``v_proj`` of ``qkv_proj``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from requant.formats.base import Format, QuantizedTensor
from requant.kernels.table import layout_bytes, lookup
from requant.layers.base import QuantizableLayer, empty_parameter, not_finished
from requant.parallel import Placement
from requant.recipe.layer import LayerNames


@dataclass(frozen=True)
class Part:
    """One checkpoint matrix of a linear layer.

    Attributes:
        name: Checkpoint name, without ``.weight``.
        rows: Its output features.
        bias: Whether ``<name>.bias`` [rows] lies beside it.
    """

    name: str
    rows: int
    bias: bool = False


class Linear(QuantizableLayer):
    """y = x · Wᵀ + b, with W [N, K] stored in the format that ``build`` is given.

    Args:
        name: The module's name, as a recipe spells it.
        in_features: K.
        parts: The checkpoint matrices, in the order in which they stack.
        protected: See :class:`requant.recipe.layer.LayerNames`.

    Attributes:
        weight: Codes (``format.data_shape``) or values [N, K]; None before ``build``.
        weight_scale: Scales, each part's on new rows (see ``QuantizedTensor.parts``); None if unquantized.
        bias: [N] in the model's dtype, zero for parts without one; None if no part has one.
    """

    weight: nn.Parameter | None
    weight_scale: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, name: str, in_features: int, parts: Sequence[Part], protected: str | None = None) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = tuple(parts)
        self.out_features = sum(part.rows for part in parts)
        self.names = LayerNames(name, tuple(part.name for part in parts), protected=protected)
        self.placements = _placements(self.parts, in_features)
        for parameter in ("weight", "weight_scale", "bias"):
            self.register_parameter(parameter, None)
        self._format: Format | None = None
        self._dtype = torch.float32
        self._forward: Callable[[Tensor], Tensor] = not_finished

    def build(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> None:
        """Create ``weight``, for a format ``weight_scale``, and ``bias`` if a part has one.

        Args:
            format: How W is stored; None: in ``dtype``.
            dtype: The model's dtype, of inputs, outputs and bias.
            device: Where.
        """
        n, k = self.out_features, self.in_features
        self._format, self._dtype, self._forward = format, dtype, not_finished
        if format is None:
            self.weight, self.weight_scale = empty_parameter((n, k), dtype, device), None
        else:
            shapes = [format.scale_shape(part.rows, k) for part in self.parts]
            scale_shape = (sum(rows for rows, _ in shapes), shapes[0][1])
            self.weight = empty_parameter(format.data_shape(n, k), format.data_dtype, device)
            self.weight_scale = empty_parameter(scale_shape, format.scale_dtype, device)
        self.bias = None
        if any(part.bias for part in self.parts):
            self.bias = nn.Parameter(torch.zeros(n, dtype=dtype, device=device), requires_grad=False)

    def layout_bytes(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> int:
        """See :meth:`QuantizableLayer.layout_bytes`."""
        return layout_bytes(device, self.out_features, self.in_features) if format else 0

    def finish(self) -> None:
        """Ask the kernel table for the forward of this format, which lays the weight out."""
        assert self.weight is not None, "build() comes first"
        weight = self.weight.data
        if self._format is None:
            dense = lookup("dense", "*", weight.device.type)
            self._forward = lambda x: dense(x, weight)
            return
        assert self.weight_scale is not None
        rows = tuple(part.rows for part in self.parts)
        shape = (self.out_features, self.in_features)
        quantized = QuantizedTensor(weight, self.weight_scale.data, self._format, shape, rows)
        self._forward = lookup("linear", self._format.name, weight.device.type)(quantized, self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """X [..., K] → [..., N], both in the model's dtype."""
        y = self._forward(x.reshape(-1, self.in_features))
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def plain_linear(name: str, in_features: int, out_features: int, bias: bool = False) -> Linear:
    """A linear layer that is one checkpoint matrix (``o_proj``, ``down_proj``)."""
    return Linear(name, in_features, [Part(name, out_features, bias)])


def merged_linear(name: str, in_features: int, rows: Mapping[str, int], bias: bool = False) -> Linear:
    """Several checkpoint matrices beside each other: ``rows`` maps the last component of each name to its N."""
    parent = name.rpartition(".")[0]
    return Linear(name, in_features, [Part(f"{parent}.{child}", n, bias) for child, n in rows.items()])


def qkv_linear(
    name: str, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = False
) -> Linear:
    """Query, key and value projections of grouped-query attention, in this order."""
    query, key_value = num_heads * head_dim, num_kv_heads * head_dim
    return merged_linear(name, in_features, {"q_proj": query, "k_proj": key_value, "v_proj": key_value}, bias)


def _placements(parts: Sequence[Part], in_features: int) -> tuple[Placement, ...]:
    weights, biases, offset = [], [], 0
    for part in parts:
        weights.append(Placement(f"{part.name}.weight", (part.rows, in_features), "weight", offset))
        if part.bias:
            biases.append(Placement(f"{part.name}.bias", (part.rows,), "bias", offset))
        offset += part.rows
    return (*weights, *biases)
