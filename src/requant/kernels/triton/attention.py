"""Paged attention on a GPU: what the kernel table names."""

from math import e, log2

import torch
from torch import Tensor

from requant.kernels.attention_batch import AttentionBatch
from requant.kernels.triton.attention_decode import decode
from requant.kernels.triton.attention_prefill import prefill


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, sliding_window: int | None
) -> Tensor:
    """Causal attention of this step's tokens over the paged cache, which already holds their keys and values.

    Never waits for the device. A decode batch (``batch.max_query == 1``) can be captured in a CUDA graph: its
    lengths, pages and starts are read on the device, at most ``batch.max_context`` of the capture.

    Args:
        q: [T, Hq, D]; heads of one token are contiguous.
        k_cache: [pages, block_size, Hk, D]; Hk divides Hq, block_size is a power of two.
        v_cache: Likewise, with the same strides and any D up to 256; or the first Dv features of ``k_cache``.
        batch: See :class:`~requant.kernels.attention_batch.AttentionBatch`. A token of a sequence with
            ``context_lens`` 0 (padding) gives zeros and reads nothing; a token of no sequence is left undefined.
        scale: Factor on the scores.
        sliding_window: A query sees this many tokens, its own included; None: all before it.

    Returns:
        [T, Hq, Dv] in q's dtype.

    Raises:
        ValueError: A defect of the caller: values of another size than keys that are not their first features.
    """
    latent = v_cache.data_ptr() == k_cache.data_ptr()
    if not latent and v_cache.shape != k_cache.shape:
        raise ValueError(
            f"values {list(v_cache.shape)} are neither of the keys' shape {list(k_cache.shape)} nor in them"
        )
    if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
        q = q.contiguous()
    out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device=q.device)
    run = decode if batch.max_query == 1 else prefill
    run(q, k_cache, v_cache, batch, out, scale * log2(e), sliding_window, latent)
    return out
