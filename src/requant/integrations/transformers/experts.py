"""The experts of a transformers model with their weights in a format.

Legend: E experts, H hidden size, I inner size of one expert, T tokens, k experts a token.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from requant.formats import Format, QuantizedStack
from requant.integrations.transformers.module import QuantizedModule
from requant.integrations.transformers.weight import Weight
from requant.kernels import lookup
from requant.kernels.experts import ExpertWeights

_PLAIN_GATE = "transformers.integrations.moe"
_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class QuantizedExperts(QuantizedModule):
    """E expert MLPs, in the place of what transformers decorates with ``use_experts_implementation``.

    Those with a plain gate, down(act(gate(x)) · up(x)), run in the kernel table's ``experts``; those with a gate of
    their own (gpt-oss, DeepSeek-V4) call it between two of the table's ``linear`` for each expert that is chosen.

    Args:
        experts: The module, on no device; its biases and its gate are taken over.
        format: How the weights are stored.
        weights: Its two weights: into the inner features, and out of them.

    Attributes:
        num_experts: E.
        weights: The two weights: their names, shapes and parts.
    """

    def __init__(self, experts: Any, format: Format, weights: tuple[Weight, Weight]) -> None:
        super().__init__(format)
        self.weights = tuple(replace(weight, feeds=()) for weight in weights)
        self.num_experts = weights[0].shape[0]
        for weight in weights:
            data, scale = weight.stored_shapes(format)
            self.add_weight(weight.name, data, scale)
            self.register_parameter(f"{weight.name}_bias", getattr(experts, f"{weight.name}_bias", None))
        self._gated: bool = experts.has_gate
        self._activation = _activation(experts)
        # The old module keeps what its gate reads (limits, the activation), and loses all weights.
        gate = partial(type(experts)._apply_gate, experts) if experts.has_gate else experts.act_fn
        self._gate: tuple[Callable[[Tensor], Tensor]] = (gate,)  # in a tuple, where it is no submodule
        for name in list(experts._parameters):
            experts.register_parameter(name, None)

    def stack(self, index: int) -> QuantizedStack:
        """The weights into (0) or out of (1) the inner features, of all experts."""
        weight = self.weights[index]
        data, scale = getattr(self, weight.name).data, getattr(self, f"{weight.name}_scale").data
        return QuantizedStack(data, scale, self.format, weight.shape[1:], weight.parts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs.

        Args:
            hidden_states: [T, H].
            top_k_index: Chosen experts, int64 [T, k].
            top_k_weights: Theirs, [T, k].

        Returns:
            [T, H] in the dtype of ``hidden_states``.
        """
        with torch.cuda.device_of(hidden_states):  # kernels run on the current device, which may be another
            forward: Forward = self.made(hidden_states.dtype, self._make)
            return forward(hidden_states, top_k_index.long(), top_k_weights.float())

    def extra_repr(self) -> str:
        """Sizes and format."""
        return f"{self.num_experts} experts, {self.weights[0].shape[1:]}, {self.format.name}"

    def _bias(self, index: int) -> Tensor | None:
        bias = getattr(self, f"{self.weights[index].name}_bias")
        return None if bias is None else bias.data

    def _make(self, dtype: torch.dtype) -> Forward:
        first, second = self.stack(0), self.stack(1)
        device = first.data.device.type
        if self._activation is not None:
            biases = self._bias(0), self._bias(1)
            weights = ExpertWeights(first, second, *biases, self._activation, self._gated)
            return lookup("experts", self.format.name, device)(weights, dtype)
        make = lookup("linear", self.format.name, device)
        products = [(make(first[e], dtype), make(second[e], dtype)) for e in range(self.num_experts)]
        return partial(self._one_by_one, products)

    def _one_by_one(self, products: list[Any], x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        bias, out_bias = self._bias(0), self._bias(1)
        chosen = torch.zeros((*experts.shape, x.shape[1]), dtype=torch.float32, device=x.device)
        for expert in experts.unique().tolist():
            token, choice = (experts == expert).nonzero(as_tuple=True)
            into, out_of = products[expert]
            inner = into(x[token])
            inner = self._gate[0](inner if bias is None else inner + bias[expert])
            y = out_of(inner)
            chosen[token, choice] = (y if out_bias is None else y + out_bias[expert]).float()
        return (chosen * weights[..., None]).sum(1).to(x.dtype)


def _activation(experts: Any) -> str | None:
    """The name of the activation of experts with a plain gate; None: they have another gate, or it has no name."""
    if experts.has_gate and type(experts)._apply_gate.__module__ != _PLAIN_GATE:
        return None
    if not experts.is_concatenated:
        return None
    for field in _ACTIVATION_FIELDS:
        name = getattr(experts.config, field, None)
        if name in ACT2FN and repr(ACT2FN[name]) == repr(experts.act_fn):
            return name
    return None
