"""Root-mean-square layer norm (https://arxiv.org/abs/1910.07467)."""

from typing import overload

import torch
from torch import Tensor, nn

from requant.kernels.table import lookup
from requant.layers.base import PlainLayer, empty_parameter
from requant.parallel import Placement


class RMSNorm(PlainLayer):
    """y = weight · x / sqrt(mean(x²) + eps): normalized in float32, rounded to x's dtype, then weighted.

    Args:
        name: The module's name, which is its checkpoint name as well.
        size: Size of the last dimension.
        eps: Added to the mean square.
    """

    weight: nn.Parameter

    def __init__(self, name: str, size: int, eps: float) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.placements = (Placement(f"{name}.weight", (size,)),)

    def build(self, dtype: torch.dtype, device: torch.device) -> None:
        """Create ``weight`` [size]."""
        self.weight = empty_parameter((self.size,), dtype, device)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize x [..., size]; with ``residual``, add it first and return the sum as well.

        Returns:
            ``norm(x)``, or ``(norm(x + residual), x + residual)``.
        """
        y, total = lookup("rms_norm", "*", x.device.type)(x, self.weight, self.eps, residual)
        return y if residual is None else (y, total)
