"""Rotation of queries and keys in plain torch (https://arxiv.org/abs/2104.09864), and what stands around it.

Legend: T tokens, Hq and Hk query and key/value heads, D head size, R rotated features.
"""

import torch
from torch import Tensor

from requant.kernels.attention_reference import kv_write
from requant.kernels.norm_reference import rms_norm


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of x [T, heads, R], whose features 2i and 2i + 1 belong together.

    The result has all first features before all second ones, which a score does not see as long as queries and keys
    both come from here.

    Args:
        x: Queries or keys.
        cos: [T, 1, R/2] in x's dtype.
        sin: Likewise.
    """
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R features of every head of x [T, heads, D]; the others pass.

    Args:
        x: Queries or keys.
        cos: [T, 1, R/2] in x's dtype.
        sin: Likewise.
    """
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def heads(
    qkv: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rope: tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Between the projection and attention: normalize and rotate queries and keys, and store keys and values.

    Args:
        qkv: [T, Hq + 2 Hk, D].
        num_heads: Hq.
        norms: Weights [D] of the norms of queries and of keys; None: they are not normalized.
        eps: Of the norms.
        rope: (cos, sin), each [T, 1, R/2] in the dtype of ``qkv``.
        k_cache: [pages, block_size, Hk, D].
        v_cache: [pages, block_size, Hk, D].
        slots: int64 [T]; see :func:`kv_write`.

    Returns:
        Queries [T, Hq, D].
    """
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps)[0], rms_norm(k, norms[1], eps)[0]
    kv_write(rotate(k, *rope), v, k_cache, v_cache, slots)
    return rotate(q, *rope)
