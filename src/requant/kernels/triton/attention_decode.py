"""Attention of one new token a sequence: the cached tokens are cut into splits, whose results are then merged.

A decode step has too few sequences to fill a GPU with one program each; splitting the context ("Flash-Decoding",
Dao et al., 2023) makes up for it. The number of splits is fixed on the host, so that a CUDA graph can replay the
step; where each split begins follows from the length that the device finds.

Legend: T tokens, B sequences, Hq query heads, Hk key/value heads, G = Hq / Hk, S splits; D and R as in the core.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.kernels.attention_batch import AttentionBatch
from requant.kernels.triton.attention_core import attend

# Two programs for each of the 132 multiprocessors of a Hopper GPU.
_PROGRAMS = 264
_MAX_SPLITS = 64


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q_ptr,
    out_ptr,
    peak_ptr,
    total_ptr,
    acc_ptr,
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
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    seq = tl.program_id(0)
    # A group of many heads is shared out over programs of ROWS heads each.
    TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(1) // TILES
    split = tl.program_id(2)
    token = tl.load(query_start_ptr + seq).to(tl.int64)
    if tl.load(query_start_ptr + seq + 1) <= token:
        return
    context = tl.load(context_ptr + seq)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0)
    # Whole steps of the loop, shared out evenly.
    length = tl.cdiv(tl.cdiv(context - begin, BLOCK_N), SPLITS) * BLOCK_N
    first = begin + split * length
    stop = tl.minimum(first + length, context)

    rows = (tl.program_id(1) % TILES) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    offs_r = tl.arange(0, BLOCK_R)
    head = kv_head * GROUP + rows
    real = rows < GROUP
    mask = real[:, None] & (offs_d[None, :] < D)
    q_ptrs = q_ptr + token * q_stride + (head * (D + R))[:, None]
    q = tl.load(q_ptrs + offs_d[None, :], mask=mask, other=0.0)
    q_rest = tl.load(q_ptrs + D + offs_r[None, :], mask=real[:, None] & (offs_r[None, :] < R), other=0.0)
    acc, peak, total = attend(
        q,
        q_rest,
        tl.zeros([ROWS], tl.int32) + (context - 1),
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
    if SPLITS == 1:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out = out_ptr + token * out_stride + (head * D)[:, None] + offs_d[None, :]
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        part = (seq * HEADS + head) * SPLITS + split
        tl.store(peak_ptr + part, peak, mask=real)
        tl.store(total_ptr + part, total, mask=real)
        if first < stop:
            tl.store(acc_ptr + (part.to(tl.int64) * D)[:, None] + offs_d[None, :], acc, mask=mask)


@triton.jit
def _merge_kernel(
    out_ptr,
    peak_ptr,
    total_ptr,
    acc_ptr,
    query_start_ptr,
    out_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    seq = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_ptr + seq).to(tl.int64)
    if tl.load(query_start_ptr + seq + 1) <= token:
        return
    offs_d = tl.arange(0, BLOCK_D)
    part = (seq * tl.num_programs(1) + head) * SPLITS + tl.arange(0, SPLITS)
    peak = tl.load(peak_ptr + part)
    filled = peak > float("-inf")
    weight = tl.where(filled, tl.exp2(peak - tl.max(tl.where(filled, peak, -1.0e38), 0)), 0.0)
    total = tl.sum(weight * tl.load(total_ptr + part), 0)
    # The accumulator of an empty split was never written.
    mask = filled[:, None] & (offs_d[None, :] < D)
    acc = tl.load(acc_ptr + (part.to(tl.int64) * D)[:, None] + offs_d[None, :], mask=mask, other=0.0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + token * out_stride + head * D + offs_d
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=offs_d < D)


def splits_for(sequences: int, programs: int, max_context: int, block_n: int) -> int:
    """A power of two: enough programs to fill the device, none without at least one step of its own.

    Args:
        sequences: B.
        programs: How many each sequence has without splits.
        max_context: Most tokens that a query sees.
        block_n: Tokens of one step.
    """
    wanted = max(_PROGRAMS // (sequences * programs), 1)
    limit = min(wanted, triton.cdiv(max_context, block_n), _MAX_SPLITS)
    return 1 << (max(limit, 1).bit_length() - 1)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    scale_log2: float,
    sliding_window: int | None,
    latent: bool,
) -> None:
    """Fill ``out`` [T, Hq, Dv]; arguments as for :func:`requant.kernels.triton.attention.attention`."""
    heads, d = out.shape[1:]
    _, page, kv_heads, _ = k_cache.shape
    group, rest = heads // kv_heads, q.shape[2] - d
    block_d = max(triton.next_power_of_2(d), 16)
    # The accumulator of a wide head leaves registers for few rows.
    rows = max(min(triton.next_power_of_2(group), 16 if block_d > 256 else 64), 16)
    wide = q.element_size() == 4 or block_d > 128
    block_n = 16 if q.element_size() == 4 and block_d > 256 else 32 if wide else 64
    sequences, programs = batch.context_lens.shape[0], kv_heads * triton.cdiv(group, rows)
    visible = min(batch.max_context, sliding_window or batch.max_context)
    splits = splits_for(sequences, programs, visible, block_n)
    parts = (sequences, heads, splits) if splits > 1 else (1,)
    peak = torch.empty(parts, dtype=torch.float32, device=q.device)
    total = torch.empty_like(peak)
    acc = torch.empty((*parts, d), dtype=torch.float32, device=q.device)
    _decode_kernel[(sequences, programs, splits)](
        q,
        out,
        peak,
        total,
        acc,
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
        HEADS=heads,
        GROUP=group,
        D=d,
        BLOCK_D=block_d,
        R=rest,
        BLOCK_R=max(triton.next_power_of_2(rest), 16),
        BLOCK_N=block_n,
        PAGE=page,
        WINDOW=sliding_window or 0,
        LATENT=latent,
        SPLITS=splits,
        num_warps=4,
        num_stages=2 if q.element_size() == 4 else 3,
    )
    if splits > 1:
        _merge_kernel[(sequences, heads)](
            out, peak, total, acc, batch.query_start, out.stride(0), D=d, BLOCK_D=block_d, SPLITS=splits, num_warps=4
        )
