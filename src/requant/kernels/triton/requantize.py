"""Block FP8 to another format on a GPU in one pass: dequantize, round to bfloat16, quantize; bit for bit the reference.

The bfloat16 weight is never in memory: each kernel makes its values from codes and scales in registers, twice where it
needs them twice.

Shape legend: N rows, K columns of the weight; blocks of 128 × 128 share a source scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.formats.base import Format
from requant.kernels.triton.buffers import check_buffers
from requant.kernels.triton.quantize_fp8 import casts_in_hardware, e4m3_quotient, scale_of
from requant.kernels.triton.quantize_mxfp4 import PAIRS, store_groups

_BLOCK = tl.constexpr(128)
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _bf16_bits(code, scale):
    """float32 bits of code · scale, rounded to bfloat16 (nearest even), for e4m3 ``code`` as uint8.

    With integers, which flush nothing and are the same on every device.
    """
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    # The exponent biases, 7 and 127, differ by 2^120; what has no exponent counts in steps of 2^-9.
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    small = (magnitude & 7).to(tl.float32) * 0.001953125
    value = tl.where(magnitude < 8, small, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    bits = (value * scale).to(tl.int32, bitcast=True) ^ ((code & 0x80) << 24)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    # A NaN's payload could carry into the sign: it stays a NaN.
    return tl.where((bits & 0x7FFFFFFF) > _INFINITY, _NAN, rounded)


@triton.jit
def _count(bits, bad):
    """Add the number of values that are not finite to ``bad``."""
    wrong = (bits & _INFINITY) == _INFINITY
    total = tl.sum(wrong.to(tl.int32))
    if total > 0:
        tl.atomic_add(bad, total.to(tl.int64))


@triton.jit
def _ptpc_kernel(
    codes,
    codes_scale,
    data,
    scale,
    bad,
    k,
    blocks_k,
    STEPS: tl.constexpr,
    COLS: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
):
    """One row, in steps of COLS: one pass for the scale, one for the codes."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, COLS)
    source = codes + row * k
    factors = codes_scale + (row // _BLOCK) * blocks_k
    largest = tl.zeros([COLS], tl.int32)
    for step in tl.static_range(STEPS):
        at = step * COLS + col
        code = tl.load(source + at, mask=at < k, other=0, eviction_policy="evict_last")
        bits = _bf16_bits(code, tl.load(factors + at // _BLOCK, mask=at < k, other=1.0))
        _count(bits, bad)
        largest = tl.maximum(largest, bits & 0x7FFFFFFF)
    s = scale_of(tl.max(largest, 0).to(tl.float32, bitcast=True))
    tl.store(scale + row, s)
    for step in tl.static_range(STEPS):
        at = step * COLS + col
        code = tl.load(source + at, mask=at < k, other=0, eviction_policy="evict_first")
        bits = _bf16_bits(code, tl.load(factors + at // _BLOCK, mask=at < k, other=1.0))
        tl.store(data + row * k + at, e4m3_quotient(bits.to(tl.float32, bitcast=True), s, HARDWARE_CAST), mask=at < k)


@triton.jit
def _mxfp4_kernel(codes, codes_scale, data, scale, bad, total, k, groups_k, blocks_k, GROUPS: tl.constexpr):
    """GROUPS groups of 32 columns, which lie in one source block each."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    in_range = group < total
    row = group // groups_k
    first = (group - row * groups_k) * (2 * PAIRS)
    factor = tl.load(codes_scale + (row // _BLOCK) * blocks_k + first // _BLOCK, mask=in_range, other=1.0)[:, None]
    col = first[:, None] + 2 * tl.arange(0, PAIRS)[None, :]
    source = codes + row[:, None] * k + col
    # What lies past a row's end is a positive zero, whatever the sign or the value of the block's scale.
    inside = in_range[:, None] & (col < k)
    even = tl.where(inside, _bf16_bits(tl.load(source, mask=inside, other=0), factor), 0)
    inside = in_range[:, None] & (col + 1 < k)
    odd = tl.where(inside, _bf16_bits(tl.load(source + 1, mask=inside, other=0), factor), 0)
    _count(even, bad)
    _count(odd, bad)
    store_groups(even, odd, group, in_range, data, scale)


# Steps of a row as where the source is BF16 (see quantize_fp8); groups of one program, and its warps.
_STEPS = 5
_GROUPS, _WARPS = 128, 4


def _check(format: Format, codes: Tensor, codes_scale: Tensor, data: Tensor, scale: Tensor, bad: Tensor) -> None:
    """Refuse what a kernel would read or write out of bounds; see :func:`check_buffers`."""
    check_buffers(format, codes, data, scale)
    n, k = codes.shape
    blocks = (triton.cdiv(n, 128), triton.cdiv(k, 128))
    if tuple(codes_scale.shape) != blocks or codes_scale.dtype != torch.float32 or not codes_scale.is_contiguous():
        raise ValueError(
            f"codes_scale is {codes_scale.dtype} {list(codes_scale.shape)}; needed: contiguous float32 {list(blocks)}"
        )
    if codes.dtype != torch.float8_e4m3fn or bad.dtype != torch.int64 or bad.numel() != 1:
        raise ValueError(f"codes are {codes.dtype} and bad is {bad.dtype}; needed: float8_e4m3fn, one int64")


def requantize_ptpc(
    format: Format, codes: Tensor, codes_scale: Tensor, data: Tensor, scale: Tensor, bad: Tensor
) -> None:
    """Table row ``requantize`` of ``ptpc_fp8``: block FP8 [N, K] → data [N, K], scale [N, 1]."""
    _check(format, codes, codes_scale, data, scale, bad)
    n, k = codes.shape
    if not codes.numel():
        return
    cols = max(triton.next_power_of_2(triton.cdiv(k, _STEPS)), 256)
    with torch.cuda.device_of(codes):
        _ptpc_kernel[(n,)](
            codes.view(torch.uint8),
            codes_scale,
            data.view(torch.uint8),
            scale,
            bad,
            k,
            codes_scale.shape[1],
            STEPS=triton.cdiv(k, cols),
            COLS=cols,
            HARDWARE_CAST=casts_in_hardware(codes.device),
            num_warps=min(max(cols // 512, 1), 16),
        )


def requantize_mxfp4(
    format: Format, codes: Tensor, codes_scale: Tensor, data: Tensor, scale: Tensor, bad: Tensor
) -> None:
    """Table row ``requantize`` of ``mxfp4``: block FP8 [N, K] → data [N, 16·⌈K/32⌉], scale [N, ⌈K/32⌉]."""
    _check(format, codes, codes_scale, data, scale, bad)
    if not codes.numel():
        return
    total, groups_k = scale.numel(), scale.shape[1]
    with torch.cuda.device_of(codes):
        _mxfp4_kernel[(triton.cdiv(total, _GROUPS),)](
            codes.view(torch.uint8),
            codes_scale,
            data,
            scale,
            bad,
            total,
            codes.shape[1],
            groups_k,
            codes_scale.shape[1],
            GROUPS=_GROUPS,
            num_warps=_WARPS,
        )
