"""The fused MoE in plain torch: the contract for every format, and what runs on a CPU.

Legend: T tokens, k experts a token, E experts, H hidden size, I inner size of one expert.
"""

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from requant.formats.base import QuantizedStack
from requant.kernels.activation import dequantize_activation, quantize_activation
from requant.kernels.experts import ExpertWeights
from requant.kernels.table import lookup


class ReferenceExperts:
    """x [T, H], experts [T, k] and their weights → y [T, H], one expert after the other.

    Both products round once to the model's dtype; the activation in between and the weighted sum, in the order of
    the choices, are float32 and round once as well. A token's result does not depend on the others. Quantized
    weights are dequantized once, to float32 copies that stand beside them.
    """

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype) -> None:
        self._w13, self._w2 = _dense(weights.w13), _dense(weights.w2)
        self._weights = weights
        self._activation = weights.w13.format.activation if isinstance(weights.w13, QuantizedStack) else None
        self._act = ACT2FN[weights.activation]
        self._dtype = dtype
        self._product = lookup("dense", "*", self._w13.device.type)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """See the table's ``experts``."""
        chosen = x.new_zeros((*experts.shape, x.shape[1]), dtype=torch.float32)
        x = self._input(x)
        for expert in experts.unique().tolist():
            tokens, choices = (experts == expert).nonzero(as_tuple=True)
            inner = self._linear(x[tokens], self._w13[expert], self._weights.w13_bias, expert)
            inner = self._input(self._activate(inner))
            chosen[tokens, choices] = self._linear(inner, self._w2[expert], self._weights.w2_bias, expert).float()
        out = torch.zeros_like(chosen[:, 0])
        for choice in range(experts.shape[1]):
            out += chosen[:, choice] * weights[:, choice, None]
        return out.to(self._dtype)

    def _input(self, x: Tensor) -> Tensor:
        """What is multiplied: quantized and dequantized as the format says, in the weight's dtype."""
        if self._activation is not None:
            x = dequantize_activation(*quantize_activation(x, self._activation), self._activation)
        return x.to(self._w13.dtype)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
        y = self._product(x, weight)
        if bias is not None:
            y = y.float() + bias[expert].float()
        return y.to(self._dtype)

    def _activate(self, inner: Tensor) -> Tensor:
        if not self._weights.gated:
            return self._act(inner.float()).to(self._dtype)
        gate, up = inner.float().chunk(2, dim=-1)
        return (self._act(gate) * up).to(self._dtype)


def experts(weights: ExpertWeights, dtype: torch.dtype) -> ReferenceExperts:
    """The forward of a layer of experts for inputs of ``dtype``."""
    return ReferenceExperts(weights, dtype)


def _dense(weight: Tensor | QuantizedStack) -> Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedStack) else weight
