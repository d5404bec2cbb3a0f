"""Block FP8 to another format on a GPU in one pass: dequantize, round to bfloat16, quantize; bit for bit the reference.

The bfloat16 weight is never in memory: each kernel makes its values from codes and scales in registers. One launch
takes many matrices of one shape.

Shape legend: N rows, K columns of a weight; blocks of 128 × 128 share a source scale.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.formats.base import Format
from requant.kernels.triton.addresses import address_table, aligned, count_bad
from requant.kernels.triton.buffers import check_buffers
from requant.kernels.triton.e4m3 import (
    EASY,
    INFINITY_BITS,
    bf16_bits,
    bf16_value,
    casts_in_hardware,
    e4m3_quotient,
    larger,
    scale_of,
    value,
)
from requant.kernels.triton.quantize_mxfp4 import PAIRS, store_groups, store_pairs

_BLOCK = tl.constexpr(128)
_GROUP = tl.constexpr(32)


@triton.jit
def _matrix(table, many, matrix, SCALE_TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A matrix's codes, its source scales, and where the new codes, their scales and its count go."""
    codes = tl.load(table + matrix).to(tl.pointer_type(tl.uint8))
    factors = tl.load(table + many + matrix).to(tl.pointer_type(tl.float32))
    data = tl.load(table + 2 * many + matrix).to(tl.pointer_type(tl.uint8))
    scale = tl.load(table + 3 * many + matrix).to(tl.pointer_type(SCALE_TYPE))
    bad = tl.load(table + 4 * many + matrix).to(tl.pointer_type(tl.int64))
    if ALIGNED:
        codes = tl.multiple_of(codes, 16)
        data = tl.multiple_of(data, 16)
    return codes, factors, data, scale, bad


@triton.jit
def _values(codes, factors, row, block, n, k, WHOLE: tl.constexpr, HARDWARE: tl.constexpr):
    """The values of a matrix [n, k], float32 [ROWS, BLOCKS, 128]; zeros outside. WHOLE: its rows end with a block."""
    col = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = (row < n)[:, None, None] & (col < k)[None, :, :]
    code = tl.load(codes + row[:, None, None] * k + col[None, :, :], mask=mask, other=0)
    blocks_k = tl.cdiv(k, _BLOCK)
    inside = (row < n)[:, None] & (block < blocks_k)[None, :]
    factor = tl.load(factors + (row // _BLOCK)[:, None] * blocks_k + block[None, :], mask=inside, other=1.0)
    x = bf16_value(code, factor[:, :, None], HARDWARE)
    return x if WHOLE else tl.where(mask, x, 0.0)  # a scale may be infinite


@triton.jit
def _largest_bits(x):
    """float32 bits of the largest magnitude of each row of [ROWS, BLOCKS, 128]; those of a NaN are the largest."""
    largest = tl.reduce(tl.reduce(tl.abs(x), 2, larger), 1, larger)
    return largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _nonfinite(x):
    """How many of the values [ROWS, BLOCKS, 128] are NaN or infinite."""
    wrong = ((x.to(tl.int32, bitcast=True) & INFINITY_BITS) == INFINITY_BITS).to(tl.int32)
    return tl.sum(tl.sum(tl.sum(wrong, 2), 1), 0)


@triton.jit
def _store_codes(x, s, data, row, block, n, k, HARDWARE: tl.constexpr):
    """Codes of the values [ROWS, BLOCKS, 128] over their rows' scales."""
    col = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = (row < n)[:, None, None] & (col < k)[None, :, :]
    target = data + row[:, None, None] * k + col[None, :, :]
    factor = s[:, None, None]
    if tl.max(s, 0) < EASY:
        tl.store(target, e4m3_quotient(x, factor, True, HARDWARE), mask=mask)
    else:
        tl.store(target, e4m3_quotient(x, factor, False, HARDWARE), mask=mask)


@triton.jit(do_not_specialize=["many"])
def _ptpc_kernel(
    table,
    many,
    parts,
    n,
    k,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """ROWS rows of one of many matrices of ``parts`` times ROWS rows, in steps of BLOCKS blocks.

    A row of one step stays in registers; of several, each is read and dequantized once for the scale and once for the
    codes.
    """
    codes, factors, data, scale, bad = _matrix(table, many, tl.program_id(0) // parts, tl.float32, ALIGNED)
    row = (tl.program_id(0) % parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.arange(0, BLOCKS)
    x = _values(codes, factors, row, block, n, k, WHOLE, HARDWARE)
    amax = _largest_bits(x)
    for step in tl.static_range(1, STEPS):
        amax = tl.maximum(
            amax, _largest_bits(_values(codes, factors, row, step * BLOCKS + block, n, k, WHOLE, HARDWARE))
        )
    if tl.max(amax, 0) >= INFINITY_BITS:
        for again in range(STEPS):
            count_bad(bad, _nonfinite(_values(codes, factors, row, again * BLOCKS + block, n, k, WHOLE, HARDWARE)))
    s = scale_of(amax.to(tl.float32, bitcast=True))
    tl.store(scale + row, s, mask=row < n)
    if STEPS == 1:
        _store_codes(x, s, data, row, block, n, k, HARDWARE)
    else:
        for step in tl.static_range(STEPS):
            x = _values(codes, factors, row, step * BLOCKS + block, n, k, WHOLE, HARDWARE)
            _store_codes(x, s, data, row, step * BLOCKS + block, n, k, HARDWARE)


@triton.jit
def _bf16_pair(even, odd):
    """float32 values, rounded to bfloat16, in the halves of int32 words."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit(do_not_specialize=["many"])
def _mxfp4_kernel(
    table,
    many,
    programs,
    total,
    k,
    groups_k,
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """GROUPS of one of many matrices of ``total`` groups of 32 columns, which lie in one source block each."""
    codes, factors, data, scale, bad = _matrix(table, many, tl.program_id(0) // programs, tl.uint8, ALIGNED)
    group = (tl.program_id(0) % programs) * GROUPS + tl.arange(0, GROUPS)
    in_range = group < total
    row = group // groups_k  # of 32 bits, whose division is much cheaper
    first = (group - row * groups_k) * _GROUP
    row = row.to(tl.int64)
    group = group.to(tl.int64)
    source = (row // _BLOCK) * tl.cdiv(k, _BLOCK) + first // _BLOCK
    factor = tl.load(factors + source, mask=in_range, other=1.0)
    col = tl.arange(0, _GROUP)
    inside = in_range[:, None]
    if not ALIGNED:
        inside &= first[:, None] + col[None, :] < k
    code = tl.load(codes + (row * k + first)[:, None] + col[None, :], mask=inside, other=0)
    if HARDWARE:
        x = value(code, factor[:, None])
        if not ALIGNED:
            x = tl.where(inside, x, 0.0)
        even, odd = tl.split(tl.reshape(x, [GROUPS, PAIRS, 2]))
        store_pairs(_bf16_pair(even, odd), group, in_range, data, scale, bad, True)
    else:
        # What lies past a row's end is a positive zero, whatever the sign or the value of the block's scale.
        x = tl.where(inside, bf16_bits(code, factor[:, None]), 0)
        even, odd = tl.split(tl.reshape(x, [GROUPS, PAIRS, 2]))
        store_groups(even, odd, group, in_range, data, scale, bad, True)


# Values of a row that a program holds at most, and of all its rows; groups of one program, and its warps.
_COLUMNS, _VALUES, _WARP_VALUES = 8192, 8192, 1024
_GROUPS, _WARPS = 128, 4


def _check(
    format: Format,
    codes: Sequence[Tensor],
    codes_scale: Sequence[Tensor],
    data: Sequence[Tensor],
    scale: Sequence[Tensor],
    bad: Sequence[Tensor],
) -> None:
    """Refuse what a kernel would read or write out of bounds; see :func:`check_buffers`."""
    n, k = codes[0].shape
    blocks = (triton.cdiv(n, 128), triton.cdiv(k, 128))
    for q, s, out, out_scale, count in zip(codes, codes_scale, data, scale, bad, strict=True):
        check_buffers(format, q, out, out_scale)
        if tuple(s.shape) != blocks or s.dtype != torch.float32 or not s.is_contiguous():
            raise ValueError(f"codes_scale is {s.dtype} {list(s.shape)}; needed: contiguous float32 {list(blocks)}")
        if q.dtype != torch.float8_e4m3fn or count.dtype != torch.int64 or count.numel() != 1:
            raise ValueError(f"codes are {q.dtype} and bad is {count.dtype}; needed: float8_e4m3fn, one int64")
        if q.shape != codes[0].shape:
            raise ValueError(f"codes are {list(q.shape)} and {list(codes[0].shape)}; needed: one shape")


def requantize_ptpc(
    format: Format,
    codes: Sequence[Tensor],
    codes_scale: Sequence[Tensor],
    data: Sequence[Tensor],
    scale: Sequence[Tensor],
    bad: Sequence[Tensor],
) -> None:
    """Table row ``requantize`` of ``ptpc_fp8``: block FP8 [N, K] → data [N, K], scale [N, 1]."""
    _check(format, codes, codes_scale, data, scale, bad)
    n, k = codes[0].shape
    if not codes[0].numel():
        return
    columns = min(max(triton.next_power_of_2(k), 128), _COLUMNS)
    rows = min(max(_VALUES // columns, 1), triton.next_power_of_2(n))
    parts = triton.cdiv(n, rows)
    with torch.cuda.device_of(codes[0]):
        _ptpc_kernel[(len(codes) * parts,)](
            address_table(codes, codes_scale, data, scale, bad),
            len(codes),
            parts,
            n,
            k,
            ROWS=rows,
            STEPS=triton.cdiv(k, columns),
            BLOCKS=columns // 128,
            WHOLE=k % 128 == 0,
            ALIGNED=aligned(codes, data),
            HARDWARE=casts_in_hardware(codes[0].device),
            num_warps=min(max(rows * columns // _WARP_VALUES, 1), 16),
        )


def requantize_mxfp4(
    format: Format,
    codes: Sequence[Tensor],
    codes_scale: Sequence[Tensor],
    data: Sequence[Tensor],
    scale: Sequence[Tensor],
    bad: Sequence[Tensor],
) -> None:
    """Table row ``requantize`` of ``mxfp4``: block FP8 [N, K] → data [N, 16·⌈K/32⌉], scale [N, ⌈K/32⌉]."""
    _check(format, codes, codes_scale, data, scale, bad)
    if not codes[0].numel():
        return
    total, groups_k, k = scale[0].numel(), scale[0].shape[1], codes[0].shape[1]
    programs = triton.cdiv(total, _GROUPS)
    with torch.cuda.device_of(codes[0]):
        _mxfp4_kernel[(len(codes) * programs,)](
            address_table(codes, codes_scale, data, scale, bad),
            len(codes),
            programs,
            total,
            k,
            groups_k,
            GROUPS=_GROUPS,
            ALIGNED=k % 32 == 0 and aligned(codes, data),
            HARDWARE=casts_in_hardware(codes[0].device),
            num_warps=_WARPS,
        )
