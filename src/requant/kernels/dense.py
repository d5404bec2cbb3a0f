"""x · Wᵀ in floating point on a CPU, with each row's result independent of the rows beside it.

A BLAS computes a row with different instructions, and so in another order, when the number of rows leaves a
remainder in its innermost tile. A last-bit difference matters here: where the next layer quantizes its input, it can
move a value across a rounding boundary, and a request's tokens would depend on what else is in the batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# With MKL (AVX2 and AVX-512, with and without AMX, 1 and 2 threads) float32 rows are equal bit for bit whenever their
# number is a multiple of 4, and on the newer processors, which have a way of their own for few rows, at least 16.
_ROWS = 4
_LEAST_ROWS = 16


def dense(x: Tensor, weight: Tensor) -> Tensor:
    """The product of x [M, K] and ``weight`` [N, K], [M, N] in their dtype."""
    rows = x.shape[0]
    missing = max(-rows % _ROWS, _LEAST_ROWS - rows)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight)[:rows] if missing else F.linear(x, weight)


def dense_heads(x: Tensor, weight: Tensor) -> Tensor:
    """The product of x [H, M, K] and ``weight`` [H, N, K], head by head: [H, M, N]."""
    return torch.stack([dense(rows, matrix) for rows, matrix in zip(x, weight, strict=True)])


def dense_heads_batched(x: Tensor, weight: Tensor) -> Tensor:
    """As :func:`dense_heads`, for devices where one launch for all heads matters more than how rows are grouped."""
    return torch.bmm(x, weight.transpose(1, 2))
