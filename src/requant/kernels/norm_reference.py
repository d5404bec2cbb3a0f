"""Root-mean-square norm in plain torch (https://arxiv.org/abs/1910.07467)."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight · t / sqrt(mean(t²) + eps) of t = x + residual, and t itself.

    t is rounded to the dtype of x, normalized in float32, rounded again, then weighted.

    Args:
        x: [..., H].
        weight: [H].
        eps: Added to the mean square.
        residual: [..., H]; None: t is x.
    """
    total = x if residual is None else x + residual
    return weight * F.rms_norm(total.float(), weight.shape, eps=eps).to(x.dtype), total
