"""The router of a mixture-of-experts layer: the scores of each token's experts.

Legend: T tokens, E experts, H hidden size.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from requant.formats.base import Format
from requant.layers.base import empty_parameter
from requant.layers.linear import Linear, Part
from requant.parallel import Placement


class Router(Linear):
    """logits = x · Wᵀ, protected: a recipe reaches it by its own name only.

    Args:
        name: The module's name (``model.layers.0.mlp.gate``).
        hidden_size: H.
        num_experts: E.
        float32: Whether an unquantized router computes in float32, whatever the model's dtype.
        correction_bias: Whether ``<name>.e_score_correction_bias`` lies beside it.

    Attributes:
        e_score_correction_bias: float32 [E], added to the scores where experts are chosen; or None.
    """

    e_score_correction_bias: nn.Parameter | None

    def __init__(
        self, name: str, hidden_size: int, num_experts: int, float32: bool = False, correction_bias: bool = False
    ) -> None:
        super().__init__(name, hidden_size, [Part(name, num_experts)], protected="MoE router")
        self._float32 = float32
        if float32:
            self.placements = tuple(replace(placement, dtype=torch.float32) for placement in self.placements)
        self._correction_bias = correction_bias
        if correction_bias:
            bias = "e_score_correction_bias"
            placement = Placement(f"{name}.{bias}", (num_experts,), bias, dtype=torch.float32)
            self.placements = (*self.placements, placement)
        self.register_parameter("e_score_correction_bias", None)

    def build(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> None:
        """As :meth:`Linear.build`, with the weight in float32 where that is asked for and no format is."""
        super().build(format, torch.float32 if self._float32 and format is None else dtype, device)
        if self._correction_bias:
            self.e_score_correction_bias = empty_parameter((self.out_features,), torch.float32, device)

    def forward(self, x: Tensor) -> Tensor:
        """X [T, H] in the model's dtype → logits [T, E] in the dtype that the router computes in."""
        return super().forward(x.to(self._dtype))
