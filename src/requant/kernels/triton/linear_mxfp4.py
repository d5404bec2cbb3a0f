"""BF16 (FP16, FP32) activations times MXFP4 weights, dequantized in registers on the way to the matrix units.

Legend: M tokens, N output features, K input features, G = ceil(K / 32) groups of 32 columns. ``w`` is uint8
[N, 16·G], the even column of a pair in the low nibble; its scale is E8M0, uint8 [N, G], 2^(e − 127).
E2M1 and E8M0: OCP Microscaling Formats (MX) Specification v1.0, §5.3.3 and §5.4.1.

Every MXFP4 value has at most two significant bits, so BF16 and FP32 hold it exactly. FP16 has not the range:
a float16 model multiplies in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.kernels.triton.linear_tile import Tile, columns_for, rows_for

# Scratch for the dequantized rows of a large product: small enough to stay in the L2 cache of a Hopper GPU (50 MB).
_SCRATCH_BYTES = 32 << 20


def tile_for(m: int, n: int, dtype: torch.dtype) -> Tile:
    """The tile for M tokens and N features; float32 products run on the vector units, in smaller blocks."""
    if dtype != torch.bfloat16:
        return Tile(min(rows_for(m), 32), 32, 64, stages=2)
    if m > 64:
        return Tile(128, max(columns_for(n), 64), 128, warps=8, stages=3)
    return Tile(rows_for(m), columns_for(n), 128)


@triton.jit
def _e2m1_to_f32(code):
    """E2M1 code (int32, 0 to 15) → float32: as the top bits of a float32 it reads 2^126 too small."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0


@triton.jit
def _dequantize(codes, exponents, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Codes [ROWS, 16·GROUPS] and exponents [ROWS, GROUPS], both uint8 → float32 [ROWS, 32·GROUPS]."""
    e = exponents.to(tl.int32)
    # 2^(e − 127); at e = 0 that is the subnormal 2^-127.
    scale = tl.where(e == 0, 0x00400000, e << 23).to(tl.float32, bitcast=True)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], [ROWS, GROUPS, 16]), [ROWS, 16 * GROUPS])
    codes = codes.to(tl.int32)
    return tl.interleave(_e2m1_to_f32(codes & 15) * scale, _e2m1_to_f32(codes >> 4) * scale)


@triton.jit
def mxfp4_tile(
    x_ptr,
    w_ptr,
    scale_ptr,
    rows_m,
    rows_n,
    K,
    groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """x[rows_m] · w[rows_n]ᵀ, float32 [BLOCK_M, BLOCK_N]; the rows are int64 and may repeat."""
    offs_k = tl.arange(0, BLOCK_K)
    offs_byte = tl.arange(0, BLOCK_K // 2)
    offs_group = tl.arange(0, BLOCK_K // 32)
    x_ptrs = x_ptr + rows_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + rows_n[:, None] * (groups * 16) + offs_byte[None, :]
    scale_ptrs = scale_ptr + rows_n[:, None] * groups + offs_group[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        if EVEN_K:
            x = tl.load(x_ptrs)
            codes = tl.load(w_ptrs)
            exponents = tl.load(scale_ptrs)
        else:
            left = groups - step * (BLOCK_K // 32)
            x = tl.load(x_ptrs, mask=offs_k[None, :] < K - step * BLOCK_K, other=0.0)
            codes = tl.load(w_ptrs, mask=offs_byte[None, :] < left * 16, other=0)
            exponents = tl.load(scale_ptrs, mask=offs_group[None, :] < left, other=0)
        w = _dequantize(codes, exponents, BLOCK_N, BLOCK_K // 32).to(DOT_DTYPE)
        acc = tl.dot(x.to(DOT_DTYPE), tl.trans(w), acc, input_precision="ieee")
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K // 2
        scale_ptrs += BLOCK_K // 32
    return acc


@triton.jit(do_not_specialize=["M"])
def _mxfp4_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    M,
    N,
    K,
    groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    tiles_m = tl.cdiv(M, BLOCK_M)
    offs_m = (pid % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read row 0 again: cheaper than a mask in the loop, and never stored.
    acc = mxfp4_tile(
        x_ptr,
        w_ptr,
        scale_ptr,
        tl.where(offs_m < M, offs_m, 0),
        tl.where(offs_n < N, offs_n, 0),
        K,
        groups,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        DOT_DTYPE,
        EVEN_K,
    )
    out_m, out_n = offs_m[:, None], offs_n[None, :]
    tl.store(y_ptr + out_m * N + out_n, acc.to(y_ptr.dtype.element_ty), mask=(out_m < M) & (out_n < N))


@triton.jit
def _dequantize_kernel(w_ptr, scale_ptr, out_ptr, first_row, N, K, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    offs_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_group = tl.program_id(1) * GROUPS
    offs_byte = first_group * 16 + tl.arange(0, 16 * GROUPS)
    offs_group = first_group + tl.arange(0, GROUPS)
    offs_k = first_group * 32 + tl.arange(0, 32 * GROUPS)
    row = (offs_n < N)[:, None]
    source = (offs_n + first_row)[:, None]
    codes = tl.load(
        w_ptr + source * (groups * 16) + offs_byte[None, :], mask=row & (offs_byte[None, :] < groups * 16), other=0
    )
    exponents = tl.load(
        scale_ptr + source * groups + offs_group[None, :], mask=row & (offs_group[None, :] < groups), other=0
    )
    value = _dequantize(codes, exponents, ROWS, GROUPS).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_n[:, None] * K + offs_k[None, :], value, mask=row & (offs_k[None, :] < K))


def matmul(x_MK: Tensor, w: Tensor, scale: Tensor, n: int, tile: Tile | None = None) -> Tensor:
    """y = x @ dequantize(w)ᵀ in one kernel, accumulated in float32: for few tokens.

    Args:
        x_MK: bf16, fp16 or fp32 [M, K], contiguous.
        w: Packed codes, uint8 [N, 16·ceil(K / 32)], contiguous.
        scale: E8M0, uint8 [N, ceil(K / 32)], contiguous.
        n: N.
        tile: Block sizes; None: :func:`tile_for`.

    Returns:
        y [M, N] in the dtype of ``x_MK``.
    """
    m, k = x_MK.shape
    tile = tile or tile_for(m, n, x_MK.dtype)
    y = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device)
    _mxfp4_kernel[(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)](
        x_MK,
        w,
        scale,
        y,
        m,
        n,
        k,
        scale.shape[1],
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        DOT_DTYPE=tl.bfloat16 if x_MK.dtype == torch.bfloat16 else tl.float32,
        EVEN_K=k % tile.k == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


def matmul_by_rows(x_MK: Tensor, w: Tensor, scale: Tensor, n: int) -> Tensor:
    """The same product for many tokens: some rows of the weight are dequantized into scratch, then multiplied.

    Every value is dequantized once, not once for every tile of tokens, and the scratch fits the L2 cache.
    """
    m, k = x_MK.shape
    dtype = torch.bfloat16 if x_MK.dtype == torch.bfloat16 else torch.float32
    x = x_MK.to(dtype)
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    rows = min(max(_SCRATCH_BYTES // (k * dtype.itemsize) // 128, 1) * 128, n)
    scratch = torch.empty(rows, k, dtype=dtype, device=x.device)
    for first in range(0, n, rows):
        count = min(rows, n - first)
        groups = scale.shape[1]
        grid = (triton.cdiv(count, 16), triton.cdiv(groups, 4))
        _dequantize_kernel[grid](w, scale, scratch, first, count, k, groups, ROWS=16, GROUPS=4, num_warps=4)
        torch.mm(x, scratch[:count].t(), out=y[:, first : first + count])
    return y.to(x_MK.dtype)
