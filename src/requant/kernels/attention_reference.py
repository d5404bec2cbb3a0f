"""Paged attention in plain torch: the contract, and what runs on a CPU.

Legend: T tokens, B sequences, Hq query heads, Hk key/value heads, G = Hq / Hk, D and Dv sizes of keys and values, L
cached tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from requant.kernels.attention_batch import AttentionBatch


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Put each token's key and value into its slot of the cache, with 0 for what is not finite.

    Attention reads slots that it masks: of tokens further on in the sequence, or left behind by another one. A mask
    does not hold back a NaN, so one sequence that overflows the dtype would spoil others, and the prefix cache.

    Args:
        k: [T, Hk, D].
        v: [T, Hk, Dv].
        k_cache: [pages, block_size, Hk, D]; the last page is a spare one that holds no sequence's tokens.
        v_cache: [pages, block_size, Hk, Dv].
        slots: int64 [T], page · block_size + offset; -1: nowhere, which is here the spare page's last slot.
    """
    for x, cache in ((k, k_cache), (v, v_cache)):
        # A view, never a copy: both caches are whole in their first two dimensions.
        cache.view(-1, *cache.shape[2:])[slots] = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, sliding_window: int | None
) -> Tensor:
    """Causal attention of this step's tokens over the cache, which already holds their keys and values.

    Args:
        q: [T, Hq, D].
        k_cache: [pages, block_size, Hk, D].
        v_cache: [pages, block_size, Hk, Dv], or in latent attention the first Dv features of ``k_cache``.
        batch: The queries of a sequence are its last tokens.
        scale: Factor on the scores.
        sliding_window: A query sees this many tokens, itself included; None: all before it.

    Returns:
        [T, Hq, Dv] in q's dtype.
    """
    if batch.max_query == 1 and q.shape[0] == batch.context_lens.shape[0]:
        return _decode(
            q, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.max_context, scale, sliding_window
        )
    starts, lens = batch.query_start.tolist(), batch.context_lens.tolist()
    single = [b for b in range(len(lens)) if starts[b + 1] - starts[b] == 1]
    out = q.new_empty((*q.shape[:2], v_cache.shape[3]))
    if single:
        rows, index = [starts[b] for b in single], torch.tensor(single, device=q.device)
        tables, context = batch.block_tables[index], batch.context_lens[index]
        longest = max(lens[b] for b in single)
        out[rows] = _decode(q[rows], k_cache, v_cache, tables, context, longest, scale, sliding_window)
    for b, length in enumerate(lens):
        start, stop = starts[b], starts[b + 1]
        if stop - start > 1:
            table = batch.block_tables[b]
            out[start:stop] = _prefill(q[start:stop], k_cache, v_cache, table, length, scale, sliding_window)
    return out


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lens: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """One query a sequence: one gather and one call for all of them, padded to the longest."""
    (batch, heads, dim), kv_heads = q.shape, k_cache.shape[2]
    pages = tables[:, : -(-longest // k_cache.shape[1])].flatten()
    k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in _keys_values(k_cache, v_cache, pages))
    position = torch.arange(k.shape[2], device=q.device)
    seen = position < lens[:, None]
    if window is not None:
        seen &= position >= lens[:, None] - window
    # The G queries that share a key stand where other callers have tokens: nothing is repeated.
    grouped = _exact(q).reshape(batch, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None], scale=scale)
    return out[..., : v_cache.shape[3]].reshape(batch, heads, -1).to(q.dtype)


def _prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, length: int, scale: float, window: int | None
) -> Tensor:
    """The last n of one sequence's ``length`` tokens: q [n, Hq, D] → [n, Hq, Dv]."""
    n, pages = q.shape[0], table[: -(-length // k_cache.shape[1])]
    k, v = (x[:length].transpose(0, 1)[None] for x in _keys_values(k_cache, v_cache, pages))  # [1, Hk, L, D]
    mask = None
    if n < length or window is not None:
        key = torch.arange(length, device=q.device)
        query = key[length - n :, None]
        mask = key <= query
        if window is not None:
            mask &= key > query - window
    out = F.scaled_dot_product_attention(
        _exact(q).transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0, ..., : v_cache.shape[3]].transpose(0, 1).to(q.dtype)


def _keys_values(k_cache: Tensor, v_cache: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of ``pages``, both [P · block_size, Hk, D]: narrower values get features that nobody asks for.

    For values of another width than the keys the library repeats the keys for every query head and holds the scores
    of all queries: 1.8 GB for 64 queries of 128 heads over 1024 tokens of 576 features, in float64.
    """
    k = _gather(k_cache, pages)
    if v_cache.data_ptr() == k_cache.data_ptr():
        return k, k
    return k, F.pad(_gather(v_cache, pages), (0, max(k.shape[2] - v_cache.shape[3], 0)))


def _gather(cache: Tensor, pages: Tensor) -> Tensor:
    """The slots of ``pages`` [P] behind each other: [P · block_size, Hk, D]."""
    # index_select copies whole pages; indexing copies element by element, about 5 times slower on a CPU.
    return _exact(cache.index_select(0, pages).flatten(0, 1))


def _exact(x: Tensor) -> Tensor:
    """float32 as float64: how the library cuts the work depends on the batch, and must not show in the result."""
    return x.double() if x.dtype == torch.float32 else x
