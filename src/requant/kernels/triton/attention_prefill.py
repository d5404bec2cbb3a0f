"""Attention of sequences with any number of new tokens each: prefill, chunks of it, and mixed batches.

Legend: T tokens, B sequences, Hq query heads, Hk key/value heads, G = Hq / Hk; D and R as in the core.
"""

import triton
import triton.language as tl
from torch import Tensor

from requant.kernels.attention_batch import AttentionBatch
from requant.kernels.triton.attention_core import attend


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    query_start_ptr,
    context_ptr,
    table_ptr,
    q_stride,
    out_stride,
    page_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale_log2,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    LATENT: tl.constexpr,
):
    # A program takes HEADS of a group's heads: all of them, unless they are more than its rows.
    QUERIES: tl.constexpr = ROWS // HEADS
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # The last queries see the most: started first, they don't leave the device half idle at the end.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    kv_head = tl.program_id(1) // TILES
    seq = tl.program_id(2)
    token = tl.load(query_start_ptr + seq)
    queries = tl.load(query_start_ptr + seq + 1) - token
    if first_query >= queries:
        return
    context = tl.load(context_ptr + seq)

    # Row r is query r // HEADS of the tile and head r % HEADS of these: one read of a key serves all of them.
    rows = tl.arange(0, ROWS)
    query = first_query + rows // HEADS
    of_group = (tl.program_id(1) % TILES) * HEADS + rows % HEADS
    real = (query < queries) & (rows < QUERIES * HEADS) & (of_group < GROUP)
    q_pos = context - queries + query
    offs_d = tl.arange(0, BLOCK_D)
    offs_r = tl.arange(0, BLOCK_R)
    mask = real[:, None] & (offs_d[None, :] < D)
    head = kv_head * GROUP + of_group
    q_rows = (token + query).to(tl.int64)
    q_ptrs = q_ptr + (q_rows * q_stride + head * (D + R))[:, None]
    q = tl.load(q_ptrs + offs_d[None, :], mask=mask, other=0.0)
    q_rest = tl.load(q_ptrs + D + offs_r[None, :], mask=real[:, None] & (offs_r[None, :] < R), other=0.0)

    stop = tl.minimum(context, context - queries + first_query + QUERIES)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - queries + first_query - WINDOW + 1, 0)
    acc, _, total = attend(
        q,
        q_rest,
        q_pos,
        first,
        stop,
        k_ptr + kv_head * head_stride,
        v_ptr + kv_head * head_stride,
        table_ptr + seq.to(tl.int64) * table_stride,
        page_stride,
        slot_stride,
        scale_log2,
        ROWS,
        D,
        BLOCK_D,
        R,
        BLOCK_R,
        BLOCK_N,
        PAGE,
        WINDOW,
        LATENT,
    )
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out = out_ptr + (q_rows * out_stride + head * D)[:, None] + offs_d[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=mask)


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    scale_log2: float,
    sliding_window: int | None,
    latent: bool,
) -> None:
    """Fill ``out`` [T, Hq, Dv]; arguments as for :func:`requant.kernels.triton.attention.attention`.

    The grid follows from ``batch.max_query``, which the host knows: nothing waits for the device.
    """
    heads, d = out.shape[1:]
    _, page, kv_heads, _ = k_cache.shape
    group, rest, exact = heads // kv_heads, q.shape[2] - d, q.element_size() == 4
    block_d = max(triton.next_power_of_2(d), 16)
    widest = block_d > 256
    wide = exact or block_d > 128
    rows = 16 if exact and widest else 64 if widest or not wide else 32
    if batch.max_query * group <= 16:
        rows = 16
    if not widest:
        rows = max(rows, triton.next_power_of_2(group))
    tile = min(group, rows)
    sequences = batch.context_lens.shape[0]
    _prefill_kernel[(triton.cdiv(batch.max_query, rows // tile), kv_heads * triton.cdiv(group, tile), sequences)](
        q,
        out,
        k_cache,
        v_cache,
        batch.query_start,
        batch.context_lens,
        batch.block_tables,
        q.stride(0),
        out.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        batch.block_tables.stride(0),
        scale_log2,
        ROWS=rows,
        GROUP=group,
        HEADS=tile,
        D=d,
        BLOCK_D=block_d,
        R=rest,
        BLOCK_R=max(triton.next_power_of_2(rest), 16),
        BLOCK_N=16 if exact and widest else 32 if wide else 64,
        PAGE=page,
        WINDOW=sliding_window or 0,
        LATENT=latent,
        num_warps=8 if rows > 32 and widest else 4,
        num_stages=1 if exact else 2,
    )
