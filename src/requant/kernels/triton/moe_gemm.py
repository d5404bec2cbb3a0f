"""Grouped matrix products: each block of rows is multiplied with its own expert's weight.

Legend: S pairs (token, choice), B blocks of rows, N output features, K input features, E experts. Row r of x belongs
to the pairs r · D to r · D + D − 1: D = k where x has a row a token, D = 1 where it has a row a pair.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.kernels.triton.linear_fp8 import w8a8_tile
from requant.kernels.triton.linear_mxfp4 import mxfp4_tile
from requant.kernels.triton.linear_tile import Tile
from requant.kernels.triton.moe_sort import Blocks


@triton.jit
def _block(pairs_ptr, block_experts_ptr, count, blocks, N, D, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's expert, pairs [BLOCK_M], rows of x, and output features: numbers, and those inside N.

    Rows past the block's last pair repeat its first one, and are never stored.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    offs_m = tl.arange(0, BLOCK_M)
    pair = tl.load(pairs_ptr + block * BLOCK_M + tl.where(offs_m < count, offs_m, 0)).to(tl.int64)
    offs_n = (pid // blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    return expert, pair, pair // D, offs_n, tl.where(offs_n < N, offs_n, 0)


@triton.jit
def _store(acc, y_ptr, bias_ptr, expert, pair, count, offs_n, N, BLOCK_M: tl.constexpr, BIAS: tl.constexpr):
    mask = (tl.arange(0, BLOCK_M) < count)[:, None] & (offs_n < N)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + expert * N + offs_n, mask=offs_n < N, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    tl.store(y_ptr + pair[:, None] * N + offs_n[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["blocks", "x_scale_stride_k"])
def _grouped_fp8_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    x_scale_ptr,
    w_scale_ptr,
    scale_row_ptr,
    bias_ptr,
    pairs_ptr,
    block_experts_ptr,
    block_counts_ptr,
    blocks,
    N,
    K,
    D,
    x_scale_stride_m,
    x_scale_stride_k,
    w_scale_stride,
    w_scales,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    FP8_DOT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
):
    count = tl.load(block_counts_ptr + tl.program_id(0) % blocks)
    if count == 0:
        return
    expert, pair, rows_m, offs_n, rows_n = _block(pairs_ptr, block_experts_ptr, count, blocks, N, D, BLOCK_M, BLOCK_N)
    acc = w8a8_tile(
        x_ptr,
        w_ptr + expert * N * K,
        x_scale_ptr,
        w_scale_ptr + expert * w_scales,
        scale_row_ptr,
        rows_m,
        rows_n,
        K,
        x_scale_stride_m,
        x_scale_stride_k,
        w_scale_stride,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PER_BLOCK,
        FP8_DOT,
        EVEN_K,
    )
    _store(acc, y_ptr, bias_ptr, expert, pair, count, offs_n, N, BLOCK_M, BIAS)


@triton.jit(do_not_specialize=["blocks"])
def _grouped_mxfp4_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    w_scale_ptr,
    bias_ptr,
    pairs_ptr,
    block_experts_ptr,
    block_counts_ptr,
    blocks,
    N,
    K,
    D,
    groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
):
    count = tl.load(block_counts_ptr + tl.program_id(0) % blocks)
    if count == 0:
        return
    expert, pair, rows_m, offs_n, rows_n = _block(pairs_ptr, block_experts_ptr, count, blocks, N, D, BLOCK_M, BLOCK_N)
    acc = mxfp4_tile(
        x_ptr,
        w_ptr + expert * N * groups * 16,
        w_scale_ptr + expert * N * groups,
        rows_m,
        rows_n,
        K,
        groups,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        DOT_DTYPE,
        EVEN_K,
    )
    _store(acc, y_ptr, bias_ptr, expert, pair, count, offs_n, N, BLOCK_M, BIAS)


@triton.jit(do_not_specialize=["blocks"])
def _grouped_dense_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    bias_ptr,
    pairs_ptr,
    block_experts_ptr,
    block_counts_ptr,
    blocks,
    N,
    K,
    D,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
):
    count = tl.load(block_counts_ptr + tl.program_id(0) % blocks)
    if count == 0:
        return
    expert, pair, rows_m, offs_n, rows_n = _block(pairs_ptr, block_experts_ptr, count, blocks, N, D, BLOCK_M, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + expert * N * K + rows_n[:, None] * K + offs_k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            inside = offs_k[None, :] < K - step * BLOCK_K
            x = tl.load(x_ptrs, mask=inside, other=0.0)
            w = tl.load(w_ptrs, mask=inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    _store(acc, y_ptr, bias_ptr, expert, pair, count, offs_n, N, BLOCK_M, BIAS)


def _grid(blocks: Blocks, n: int, tile: Tile) -> tuple[int]:
    """Neighbouring programs have the same features of consecutive blocks, which often share their expert's weight."""
    return (blocks.counts.numel() * triton.cdiv(n, tile.n),)


def grouped_fp8(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    blocks: Blocks,
    pairs: int,
    dtype: torch.dtype,
    tile: Tile,
    *,
    fp8_dot: bool,
    scale_rows: Tensor | None = None,
) -> Tensor:
    """y[s] = (x · scale)[s // D] @ (w · scale)[expert of s]ᵀ + bias, of e4m3 codes, accumulated in float32.

    Args:
        x: e4m3 [S / D, K], contiguous.
        x_scale: float32 [S / D, 1], or [S / D, ceil(K / 128)] (any strides) with ``scale_rows``.
        w: e4m3 [E, N, K], contiguous.
        w_scale: float32 [E, N, 1]; with ``scale_rows`` [E, rows, ceil(K / 128)]; contiguous.
        bias: [E, N] or None.
        blocks: The pairs.
        pairs: S.
        dtype: dtype of y.
        tile: Block sizes; ``tile.m`` is the blocks' number of rows.
        fp8_dot: Multiply on FP8 matrix units; else widen the codes to float16 first.
        scale_rows: int32 [N]: the row of an expert's ``w_scale`` that feature n belongs to; None: one scale a feature.

    Returns:
        y [S, N] in ``dtype``.
    """
    n, k = w.shape[1:]
    y = torch.empty(pairs, n, dtype=dtype, device=x.device)
    if not fp8_dot:
        x, w = x.view(torch.uint8), w.view(torch.uint8)
    _grouped_fp8_kernel[_grid(blocks, n, tile)](
        x,
        w,
        y,
        x_scale,
        w_scale,
        scale_rows,
        bias,
        blocks.pairs,
        blocks.experts,
        blocks.counts,
        blocks.counts.numel(),
        n,
        k,
        pairs // x.shape[0],
        x_scale.stride(0),
        x_scale.stride(1),
        w_scale.stride(1),
        w_scale.stride(0),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        PER_BLOCK=scale_rows is not None,
        FP8_DOT=fp8_dot,
        EVEN_K=k % tile.k == 0,
        BIAS=bias is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


def grouped_mxfp4(
    x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, blocks: Blocks, pairs: int, tile: Tile
) -> Tensor:
    """y[s] = x[s // D] @ dequantize(w[expert of s])ᵀ + bias; see :func:`grouped_fp8`.

    ``w`` is uint8 [E, N, 16·ceil(K / 32)], ``w_scale`` E8M0, uint8 [E, N, ceil(K / 32)]; y has x's dtype.
    """
    n, k = w.shape[1], x.shape[1]
    y = torch.empty(pairs, n, dtype=x.dtype, device=x.device)
    _grouped_mxfp4_kernel[_grid(blocks, n, tile)](
        x,
        w,
        y,
        w_scale,
        bias,
        blocks.pairs,
        blocks.experts,
        blocks.counts,
        blocks.counts.numel(),
        n,
        k,
        pairs // x.shape[0],
        w_scale.shape[2],
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        DOT_DTYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float32,
        EVEN_K=k % tile.k == 0,
        BIAS=bias is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


def grouped_dense(x: Tensor, w: Tensor, bias: Tensor | None, blocks: Blocks, pairs: int, tile: Tile) -> Tensor:
    """y[s] = x[s // D] @ w[expert of s]ᵀ + bias, ``w`` [E, N, K] in x's dtype; see :func:`grouped_fp8`."""
    n, k = w.shape[1:]
    y = torch.empty(pairs, n, dtype=x.dtype, device=x.device)
    _grouped_dense_kernel[_grid(blocks, n, tile)](
        x,
        w,
        y,
        bias,
        blocks.pairs,
        blocks.experts,
        blocks.counts,
        blocks.counts.numel(),
        n,
        k,
        pairs // x.shape[0],
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        EVEN_K=k % tile.k == 0,
        BIAS=bias is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y
