"""The fused MoE in plain torch: the contract for every format, and what runs on a CPU.

Legend: T tokens, k experts a token, E experts, H hidden size, I inner size of one expert.
"""

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from requant.formats.base import QuantizedStack
from requant.kernels.activation import dequantize_activation, quantize_activation
from requant.kernels.experts import ExpertWeights
from requant.kernels.table import RowMax, lookup


class ReferenceExperts:
    """x [T, H], experts [T, k] and their weights → y [T, H], one expert after the other.

    A y in float64 means that the products and the sum are float64 as well.

    Both products round once to the model's dtype; the activation in between and the weighted sum, in the order of
    the choices, are float32 and round once as well. A token's result does not depend on the others. Quantized
    weights are dequantized once, to float32 copies that stand beside them.
    """

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype, row_max: RowMax | None = None) -> None:
        self._sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._w13, self._w2 = (_dense(weight, dtype) for weight in (weights.w13, weights.w2))
        self._weights = weights
        self._activation = weights.w13.format.activation if isinstance(weights.w13, QuantizedStack) else None
        self._act = ACT2FN[weights.activation]
        self._dtype = dtype
        self._row_max = row_max
        self._product = lookup("dense", "*", self._w13.device.type)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """See the table's ``experts``."""
        pairs = self._pairs(experts)
        x = self._input(x)
        inner = x.new_zeros((experts.numel(), self._w2.shape[2]), dtype=self._dtype)
        for expert, at in pairs:
            y = self._activate(
                self._linear(x[at // experts.shape[1]], self._w13[expert], self._weights.w13_bias, expert)
            )
            inner[at, self._weights.lead : self._weights.lead + y.shape[1]] = y
        inner = self._input(inner, self._row_max)  # all at once: what ranks do together does not depend on the choices
        chosen = x.new_zeros((experts.numel(), self._w2.shape[1]), dtype=self._sum_dtype)
        for expert, at in pairs:
            chosen[at] = self._linear(inner[at], self._w2[expert], self._weights.w2_bias, expert).to(self._sum_dtype)
        chosen = chosen.view(*experts.shape, self._w2.shape[1])
        out = torch.zeros_like(chosen[:, 0])
        for choice in range(experts.shape[1]):
            out += chosen[:, choice] * weights[:, choice, None]
        return out.to(self._dtype)

    def _pairs(self, experts: Tensor) -> list[tuple[int, Tensor]]:
        """For each expert here that is chosen, the (token, choice) pairs that chose it, as their numbers t · k + j."""
        local = experts.reshape(-1) - (self._weights.here.start if self._weights.here else 0)
        return [(e, (local == e).nonzero()[:, 0]) for e in local.unique().tolist() if 0 <= e < len(self._w2)]

    def _input(self, x: Tensor, row_max: RowMax | None = None) -> Tensor:
        """What is multiplied: quantized and dequantized as the format says, in the weight's dtype."""
        if self._activation is not None:
            x = dequantize_activation(*quantize_activation(x, self._activation, row_max), self._activation)
        return x.to(self._w13.dtype)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
        y = self._product(x, weight)
        if bias is not None:
            y = y.to(self._sum_dtype) + bias[expert].to(self._sum_dtype)
        return y.to(self._dtype)

    def _activate(self, inner: Tensor) -> Tensor:
        if not self._weights.gated:
            return self._act(inner.to(self._sum_dtype)).to(self._dtype)
        gate, up = inner.to(self._sum_dtype).chunk(2, dim=-1)
        return (self._act(gate) * up).to(self._dtype)


def experts(weights: ExpertWeights, dtype: torch.dtype, row_max: RowMax | None = None) -> ReferenceExperts:
    """The forward of a layer of experts for inputs of ``dtype``."""
    return ReferenceExperts(weights, dtype, row_max)


def _dense(weight: Tensor | QuantizedStack, dtype: torch.dtype) -> Tensor:
    """What is multiplied with: values in float64 for such a result, else in float32, or as they are."""
    if isinstance(weight, QuantizedStack):
        return weight.dequantize(torch.float64 if dtype == torch.float64 else torch.float32)
    return weight.to(torch.float64) if dtype == torch.float64 else weight
