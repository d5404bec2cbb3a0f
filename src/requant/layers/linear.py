"""The linear layer: one class, made of parts, whatever the format; of each part all rows, or those of one rank.

Legend: N output features, K input features; the parts of a layer are checkpoint matrices [n, K] that stack
along N (``q_proj``, ``k_proj``, ``v_proj`` of ``qkv_proj``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from requant.formats.base import Format, QuantizedTensor
from requant.formats.shard import Shard
from requant.kernels.table import RowMax, layout_bytes, lookup
from requant.layers.base import QuantizableLayer, empty_parameter, not_finished
from requant.parallel import ALONE, Placement, Ranks
from requant.parallel.split import spread
from requant.recipe.layer import LayerNames


@dataclass(frozen=True)
class Part:
    """One checkpoint matrix of a linear layer.

    Attributes:
        name: Checkpoint name, without ``.weight``.
        rows: Its output features.
        bias: Whether ``<name>.bias`` [rows] lies beside it.
        own: Those of its output features that this rank has; None: all.
    """

    name: str
    rows: int
    bias: bool = False
    own: range | None = None

    @property
    def own_rows(self) -> range:
        """The output features that this rank has."""
        return range(self.rows) if self.own is None else self.own


class Linear(QuantizableLayer):
    """y = x · Wᵀ + b, with W [N, K] stored in the format that ``build`` is given.

    Args:
        name: The module's name, as a recipe spells it.
        in_features: K of the checkpoint's matrices.
        parts: The checkpoint matrices, in the order in which they stack.
        protected: See :class:`requant.recipe.layer.LayerNames`.
        columns: The input features that this rank has; None: all. Its output is then a part of a sum.

    Attributes:
        weight: Codes (``Shard.data_shape``) or values [N, K]; None before ``build``.
        weight_scale: Scales, each part's on new rows (see ``QuantizedTensor.parts``); None if unquantized.
        bias: [N] in the model's dtype, zero for parts without one; None if no part has one.
    """

    weight: nn.Parameter | None
    weight_scale: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        name: str,
        in_features: int,
        parts: Sequence[Part],
        protected: str | None = None,
        columns: range | None = None,
    ) -> None:
        super().__init__()
        self.columns = range(in_features) if columns is None else columns
        self.in_features = len(self.columns)
        self.parts = tuple(parts)
        self.out_features = sum(len(part.own_rows) for part in parts)
        self.names = LayerNames(name, tuple(part.name for part in parts), protected=protected)
        self.placements = _placements(self.parts, in_features, columns)
        for parameter in ("weight", "weight_scale", "bias"):
            self.register_parameter(parameter, None)
        self._whole_features = in_features
        self._padding = (0, 0)
        self._format: Format | None = None
        self._dtype = self._sum_dtype = torch.float32
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
        self._sum_dtype = self._choose_sum_dtype(dtype)
        if format is None:
            self.weight, self.weight_scale = empty_parameter((n, k), dtype, device), None
        else:
            shards = self._shards(format)
            scale_shape = (sum(len(shard.scale_rows) for shard in shards), shards[0].scale_shape[1])
            self.weight = empty_parameter((n, shards[0].data_shape[1]), format.data_dtype, device)
            self.weight_scale = empty_parameter(scale_shape, format.scale_dtype, device)
        self.bias = None
        if any(part.bias for part in self.parts):
            self.bias = nn.Parameter(torch.zeros(n, dtype=dtype, device=device), requires_grad=False)

    def layout_bytes(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> int:
        """See :meth:`QuantizableLayer.layout_bytes`."""
        n, k = self.out_features, len(self._shards(format)[0].window) if format else self.in_features
        if self._choose_sum_dtype(dtype) != dtype:
            return n * k * self._choose_sum_dtype(dtype).itemsize
        return layout_bytes(device, n, k) if format else 0

    def finish(self) -> None:
        """Ask the kernel table for the forward of this format, which lays the weight out."""
        assert self.weight is not None, "build() comes first"
        self._padding = (0, 0)
        # Sums in another dtype than the model's are the plain reference's business, on every device.
        plain = self._sum_dtype != self._dtype
        device = self.weight.device.type
        if self._format is None:
            weight, dense = self.weight.data.to(self._sum_dtype), lookup("dense", "*", "*" if plain else device)
            self._forward = lambda x: dense(x.to(weight.dtype), weight)
            return
        quantized = self._quantized(self._format)
        window = self._shards(self._format)[0].window
        self._padding = (self.columns.start - window.start, window.stop - self.columns.stop)
        make = lookup("linear", *(("*", "*") if plain else (self._format.name, device)))
        self._forward = make(quantized, self._sum_dtype, self._row_max(self._format))

    def forward(self, x: Tensor) -> Tensor:
        """X [..., K] → [..., N], both in the model's dtype."""
        y = self._multiply(x.reshape(-1, self.in_features))
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def _multiply(self, x: Tensor) -> Tensor:
        """X [M, K] → [M, N], without the bias."""
        return self._forward(F.pad(x, self._padding) if any(self._padding) else x)

    def _choose_sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of what :meth:`_multiply` returns."""
        return dtype

    def _row_max(self, format: Format) -> RowMax | None:
        """What makes the largest magnitudes of this rank's input those of the whole; None: they are, or need not be."""
        return None

    def _shards(self, format: Format) -> list[Shard]:
        """Each part's share."""
        k = self._whole_features
        return [Shard(format, (part.rows, k), part.own_rows, self.columns) for part in self.parts]

    def _quantized(self, format: Format) -> QuantizedTensor:
        assert self.weight is not None
        assert self.weight_scale is not None
        shards = self._shards(format)
        return QuantizedTensor(
            self.weight.data,
            self.weight_scale.data,
            format,
            (self.out_features, len(shards[0].window)),
            tuple(len(shard.rows) for shard in shards),
            tuple(shard.skipped for shard in shards) if any(shard.skipped for shard in shards) else (),
        )


def plain_linear(
    name: str, in_features: int, out_features: int, bias: bool = False, own: range | None = None
) -> Linear:
    """A linear layer that is one checkpoint matrix (``q_b_proj``), or ``own`` of its output features."""
    return Linear(name, in_features, [Part(name, out_features, bias, own)])


def merged_linear(
    name: str,
    in_features: int,
    rows: Mapping[str, int],
    bias: bool = False,
    own: Mapping[str, range] | None = None,
) -> Linear:
    """Several checkpoint matrices beside each other, whole, or ``own`` output features of each.

    ``rows`` maps the last component of each name to its N.
    """
    parent = name.rpartition(".")[0]
    parts = [Part(f"{parent}.{child}", n, bias, own[child] if own else None) for child, n in rows.items()]
    return Linear(name, in_features, parts)


def qkv_linear(
    name: str,
    in_features: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bias: bool = False,
    own: tuple[range, range] | None = None,
) -> Linear:
    """Query, key and value projections of grouped-query attention, in this order.

    ``own``: the key/value heads and the query heads that this rank has.
    """
    query, key_value = num_heads * head_dim, num_kv_heads * head_dim
    rows = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    if own is None:
        return merged_linear(name, in_features, rows, bias)
    keys, queries = (spread(heads, head_dim) for heads in own)
    return merged_linear(name, in_features, rows, bias, {"q_proj": queries, "k_proj": keys, "v_proj": keys})


def column_linear(
    name: str, in_features: int, rows: Mapping[str, int], what: str, bias: bool = False, ranks: Ranks = ALONE
) -> Linear:
    """A :func:`merged_linear` whose matrices are each spread over the ranks; ``what``: see :meth:`Ranks.split`."""
    own = {child: ranks.split(n, what) for child, n in rows.items()}
    return merged_linear(name, in_features, rows, bias, own)


def _placements(parts: Sequence[Part], in_features: int, columns: range | None) -> tuple[Placement, ...]:
    weights, biases, offset = [], [], 0
    for part in parts:
        shape = (part.rows, in_features)
        weights.append(Placement(f"{part.name}.weight", shape, offset=offset, rows=part.own, columns=columns))
        if part.bias:
            biases.append(Placement(f"{part.name}.bias", (part.rows,), "bias", offset, rows=part.own))
        offset += len(part.own_rows)
    return (*weights, *biases)
