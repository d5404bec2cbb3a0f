"""FP8 × FP8 matrix product with scales, for one row of scales a channel or one scale a 128×128 block.

Legend: M tokens, N output features, K input features; ``x_MK`` and ``w_NK`` are e4m3 codes, both contiguous
along K, so that the product is y[m, n] = Σ_k x[m, k] · w[n, k] with scales.

Hopper's FP8 matrix units keep about 14 bits of a running sum (DeepSeek-V3 technical report, §3.3.2). The sum of
every 128 columns is therefore added to a true float32 accumulator. Where the output is float32 even that is
too coarse, and where the device has no FP8 units there is nothing to use: there the codes are widened to float16,
which holds every e4m3 value exactly, so that the products are exact and the sums are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.kernels.triton.linear_tile import Tile, columns_for, rows_for


def tile_for(m: int, n: int, *, per_block: bool) -> Tile:
    """The tile for M tokens and N features; a block of scales is 128 columns, which bounds ``Tile.k``."""
    if m > 64:
        return Tile(128, 128, 128, warps=8, stages=3)
    columns = columns_for(n)
    return Tile(rows_for(m), columns, 128 if per_block or columns > 32 else 256)


@triton.jit
def _e4m3_to_f16(code, MAY_BE_NAN: tl.constexpr):
    """e4m3 bits (uint8) → float16, exactly: the exponent biases, 7 and 15, differ by 2^8.

    Weights hold no NaN; an input does where its sequence overflowed, and must still be one behind the layer.
    """
    bits = code.to(tl.uint16)
    magnitude = (bits & 0x7F) << 7
    if MAY_BE_NAN:
        magnitude = tl.where(magnitude == (0x7F << 7), 0x7E00, magnitude)
    bits = ((bits & 0x80) << 8) | magnitude.to(tl.uint16)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def w8a8_tile(
    x_ptr,
    w_ptr,
    x_scale_ptr,
    w_scale_ptr,
    scale_row_ptr,
    rows_m,
    rows_n,
    K,
    x_scale_stride_m,
    x_scale_stride_k,
    w_scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    FP8_DOT: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """x[rows_m] · w[rows_n]ᵀ with scales, float32 [BLOCK_M, BLOCK_N]; the rows are int64 and may repeat."""
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + rows_n[:, None] * K + offs_k[None, :]
    m, n = rows_m[:, None], rows_n[None, :]
    x_scale_ptrs = x_scale_ptr + m * x_scale_stride_m
    w_scale_ptrs = w_scale_ptr + (tl.load(scale_row_ptr + n) * w_scale_stride if PER_BLOCK else n)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            inside = offs_k[None, :] < K - step * BLOCK_K
            x = tl.load(x_ptrs, mask=inside, other=0.0)
            w = tl.load(w_ptrs, mask=inside, other=0.0)
        if not FP8_DOT:
            x = _e4m3_to_f16(x, True)
            w = _e4m3_to_f16(w, False)
        if PER_BLOCK:
            scale = tl.load(x_scale_ptrs + step * x_scale_stride_k) * tl.load(w_scale_ptrs + step)
            acc += tl.dot(x, tl.trans(w)) * scale
        else:
            acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=128)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    if not PER_BLOCK:
        acc = acc * tl.load(x_scale_ptrs) * tl.load(w_scale_ptrs)
    return acc


@triton.jit(do_not_specialize=["M", "x_scale_stride_k"])
def _w8a8_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    x_scale_ptr,
    w_scale_ptr,
    scale_row_ptr,
    M,
    N,
    K,
    x_scale_stride_m,
    x_scale_stride_k,
    w_scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    FP8_DOT: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    tiles_m = tl.cdiv(M, BLOCK_M)
    # Neighbouring programs share their weights: those are the larger operand wherever bandwidth is the limit.
    offs_m = (pid % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read row 0 again: cheaper than a mask in the loop, and never stored.
    acc = w8a8_tile(
        x_ptr,
        w_ptr,
        x_scale_ptr,
        w_scale_ptr,
        scale_row_ptr,
        tl.where(offs_m < M, offs_m, 0),
        tl.where(offs_n < N, offs_n, 0),
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
    out_m, out_n = offs_m[:, None], offs_n[None, :]
    tl.store(y_ptr + out_m * N + out_n, acc.to(y_ptr.dtype.element_ty), mask=(out_m < M) & (out_n < N))


def w8a8(
    x_MK: Tensor,
    x_scale: Tensor,
    w_NK: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype,
    *,
    fp8_dot: bool,
    scale_rows: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """y = (x · scale) @ (w · scale)ᵀ of e4m3 codes, accumulated in float32.

    Args:
        x_MK: e4m3 [M, K], contiguous.
        x_scale: float32 [M, 1], or [M, ceil(K / 128)] (any strides) with ``scale_rows``.
        w_NK: e4m3 [N, K], contiguous.
        w_scale: float32 [N, 1]; with ``scale_rows``: [rows, ceil(K / 128)], contiguous.
        dtype: dtype of y.
        fp8_dot: Multiply on FP8 matrix units; else widen the codes to float16 first.
        scale_rows: int32 [N]: the row of ``w_scale`` that feature n belongs to; None: one scale a feature.
        tile: Block sizes; None: :func:`tile_for`.

    Returns:
        y [M, N] in ``dtype``.
    """
    (m, k), n = x_MK.shape, w_NK.shape[0]
    per_block = scale_rows is not None
    tile = tile or tile_for(m, n, per_block=per_block)
    y = torch.empty(m, n, dtype=dtype, device=x_MK.device)
    if not fp8_dot:
        x_MK, w_NK = x_MK.view(torch.uint8), w_NK.view(torch.uint8)
    _w8a8_kernel[(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)](
        x_MK,
        w_NK,
        y,
        x_scale,
        w_scale,
        scale_rows,
        m,
        n,
        k,
        x_scale.stride(0),
        x_scale.stride(1),
        w_scale.stride(0),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        PER_BLOCK=per_block,
        FP8_DOT=fp8_dot,
        EVEN_K=k % tile.k == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y
