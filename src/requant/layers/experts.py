"""The experts of a mixture-of-experts layer, stored together, in any format.

Legend: E experts, H hidden size, I inner size of one expert, T tokens, k experts a token. One rank has all experts, or
I_r of the inner features of each (tensor parallelism), or E_r whole experts (expert parallelism); with one rank E_r is
E and I_r is I.
"""

from collections.abc import Callable, Container, Iterator

import torch
from torch import Tensor, nn

from requant.formats.base import Format, QuantizedStack
from requant.formats.shard import Shard
from requant.kernels.experts import UNQUANTIZED, ExpertWeights
from requant.kernels.table import layout_bytes, lookup
from requant.layers.base import QuantizableLayer, empty_parameter, not_finished
from requant.layers.row_linear import row_max
from requant.parallel import ALONE, Placement, Ranks
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
        ranks: The ranks. With several the output is a part of a sum, whichever way they share the experts.

    Attributes:
        w13_weight: [E_r, 2 I_r, H] (or [E_r, I_r, H] without a gate) as values or as codes of the format.
        w2_weight: [E_r, H, I_r] likewise; of a format that has groups of columns: over whole groups.
        w13_weight_scale: [E_r, …] with the scales of one expert behind, gate's first; None if unquantized.
        w2_weight_scale: Likewise.
        w13_bias: [E_r, 2 I_r] (or [E_r, I_r]) in the model's dtype, or None.
        w2_bias: [E_r, H] likewise; where ranks share experts only the first has it.

    Raises:
        ConfigError: There are more ranks than what they share.
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
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden_size, self.inner_size = num_experts, hidden_size, inner_size
        self.gated, self.bias, self._activation = gated, bias, activation
        self._ranks = ranks
        self.own_experts, self.own_inner = range(num_experts), range(inner_size)
        self._inner_shares: tuple[range, ...] = (self.own_inner,) * ranks.size
        if ranks.expert_parallel:
            self.own_experts = ranks.split(num_experts, "number of experts")
        else:
            self._inner_shares = ranks.shares(inner_size, "moe_intermediate_size")
            self.own_inner = self._inner_shares[ranks.rank]
        self._adds_bias = bias and (ranks.expert_parallel or ranks.rank == 0)
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
        e = len(self.own_experts)
        for prefix, with_bias in (("w13", self.bias), ("w2", self._adds_bias)):
            n, k = self._own_shape(prefix)
            if format is None:
                weight, scale = empty_parameter((e, n, k), dtype, device), None
            else:
                shards = self._shards(prefix, format)
                rows = sum(len(shard.scale_rows) for shard in shards)
                weight = empty_parameter((e, n, shards[0].data_shape[1]), format.data_dtype, device)
                scale = empty_parameter((e, rows, shards[0].scale_shape[1]), format.scale_dtype, device)
            setattr(self, f"{prefix}_weight", weight)
            setattr(self, f"{prefix}_weight_scale", scale)
            setattr(self, f"{prefix}_bias", empty_parameter((e, n), dtype, device) if with_bias else None)

    def layout_bytes(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> int:
        """See :meth:`QuantizableLayer.layout_bytes`."""
        e, sum_dtype, total = len(self.own_experts), self._ranks.sum_dtype(dtype), 0
        for prefix in ("w13", "w2"):
            n, k = self._own_shape(prefix)
            k = len(self._shards(prefix, format)[0].window) if format else k
            if sum_dtype != dtype:
                total += e * n * k * sum_dtype.itemsize
            elif format:
                total += e * layout_bytes(device, n, k)
        return total

    def finish(self) -> None:
        """Ask the kernel table for the forward of this format, which lays the weights out."""
        assert self.w13_weight is not None, "build() comes first"
        b13, b2 = (bias.data if bias is not None else None for bias in (self.w13_bias, self.w2_bias))
        lead = self._shards("w2", self._format)[0].lead if self._format else 0
        sum_dtype = self._ranks.sum_dtype(self._dtype)
        weights = ExpertWeights(
            self._stack("w13"),
            self._stack("w2"),
            b13,
            b2,
            self._activation,
            self.gated,
            here=self.own_experts if len(self.own_experts) < self.num_experts else None,
            lead=lead,
        )
        device = self.w13_weight.device
        name = self._format.name if self._format else UNQUANTIZED
        shared = self._format is not None and not self._ranks.expert_parallel
        reduce = row_max(self._format, self._ranks, self._inner_shares, device) if shared and self._format else None
        make = lookup("experts", *((name, device.type) if sum_dtype == self._dtype else ("*", "*")))
        self._forward = make(weights, sum_dtype, reduce)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """What this rank has of the sum.

        Args:
            x: [T, H].
            experts: Chosen experts, int64 [T, k], counted over all ranks.
            weights: Theirs, float32 [T, k].

        Returns:
            [T, H], in :meth:`Ranks.sum_dtype <requant.parallel.Ranks.sum_dtype>` of the model's dtype.
        """
        return self._forward(x, experts, weights)

    def _parts(self, prefix: str) -> tuple[tuple[int, int], ...]:
        """[n, k] of the checkpoint matrices that one expert's w13 or w2 is made of."""
        if prefix == "w13":
            return ((self.inner_size, self.hidden_size),) * len(self._inputs)
        return ((self.hidden_size, self.inner_size),)

    def _shards(self, prefix: str, format: Format) -> list[Shard]:
        """This rank's share of each of them."""
        hidden, inner = range(self.hidden_size), self.own_inner
        rows, columns = (inner, hidden) if prefix == "w13" else (hidden, inner)
        return [Shard(format, shape, rows, columns) for shape in self._parts(prefix)]

    def _own_shape(self, prefix: str) -> tuple[int, int]:
        """[N, K] of one expert's w13 or w2 on this rank."""
        inner = len(self.own_inner)
        return (inner * len(self._inputs), self.hidden_size) if prefix == "w13" else (self.hidden_size, inner)

    def _stack(self, prefix: str) -> Tensor | QuantizedStack:
        weight, scale = getattr(self, f"{prefix}_weight"), getattr(self, f"{prefix}_weight_scale")
        if self._format is None:
            return weight.data
        shards = self._shards(prefix, self._format)
        return QuantizedStack(
            weight.data,
            scale.data,
            self._format,
            (self._own_shape(prefix)[0], len(shards[0].window)),
            tuple(len(shard.rows) for shard in shards),
            tuple(shard.skipped for shard in shards) if any(shard.skipped for shard in shards) else (),
        )

    def _separate(self, name: str) -> Iterator[Placement]:
        for expert in range(self.num_experts):
            for index, part in enumerate(self._inputs):
                owner = f"{name}.{expert}.{part}"
                yield self._input(f"{owner}.weight", expert, index)
                if self.bias:
                    yield self._input_bias(f"{owner}.bias", expert, index)
            owner = f"{name}.{expert}.down_proj"
            yield self._output(f"{owner}.weight", expert)
            if self.bias:
                yield self._output_bias(f"{owner}.bias", expert)

    def _together(self, inputs: str, output: str) -> Iterator[Placement]:
        e, hidden, inner = self.num_experts, self.hidden_size, self.inner_size
        each = len(self._inputs)
        for expert in range(e):
            for index in range(each):
                start = (expert * each + index) * inner
                yield self._input(inputs, expert, index, (e, inner * each, hidden), start)
                if self.bias:
                    yield self._input_bias(f"{inputs}_bias", expert, index, (e, inner * each), start)
            yield self._output(output, expert, (e, hidden, inner), expert * hidden)
            if self.bias:
                yield self._output_bias(f"{output}_bias", expert, (e, hidden), expert * hidden)

    def _input(self, tensor: str, expert: int, index: int, whole: tuple[int, ...] = (), start: int = 0) -> Placement:
        """The way of one expert's gate or up."""
        offset = self._offset(expert, len(self.own_inner), len(self._inputs), index)
        shape = (self.inner_size, self.hidden_size)
        return Placement(tensor, shape, "w13_weight", offset, None, whole, start, self._rows(expert, self.own_inner))

    def _input_bias(
        self, tensor: str, expert: int, index: int, whole: tuple[int, ...] = (), start: int = 0
    ) -> Placement:
        offset = self._offset(expert, len(self.own_inner), len(self._inputs), index)
        shape = (self.inner_size,)
        return Placement(tensor, shape, "w13_bias", offset, None, whole, start, self._rows(expert, self.own_inner))

    def _output(self, tensor: str, expert: int, whole: tuple[int, ...] = (), start: int = 0) -> Placement:
        """The way of one expert's down."""
        offset, rows = self._offset(expert, self.hidden_size), self._rows(expert, range(self.hidden_size))
        columns = self.own_inner if len(self.own_inner) < self.inner_size else None
        shape = (self.hidden_size, self.inner_size)
        return Placement(tensor, shape, "w2_weight", offset, None, whole, start, rows, columns)

    def _output_bias(self, tensor: str, expert: int, whole: tuple[int, ...] = (), start: int = 0) -> Placement:
        offset = self._offset(expert, self.hidden_size)
        rows = self._rows(expert, range(self.hidden_size)) if self._adds_bias else range(0)
        return Placement(tensor, (self.hidden_size,), "w2_bias", offset, None, whole, start, rows)

    def _offset(self, expert: int, rows: int, each: int = 1, index: int = 0) -> int:
        """Row of the parameter where those of a matrix begin; 0 for another rank's expert, of which no row is had."""
        return ((expert - self.own_experts.start) * each + index) * rows if expert in self.own_experts else 0

    def _rows(self, expert: int, own: range) -> range:
        return own if expert in self.own_experts else range(0)
