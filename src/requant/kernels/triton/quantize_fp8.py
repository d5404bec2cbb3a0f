"""FP8 E4M3 weight quantization on a GPU: ``ptpc_fp8`` and ``per_block_fp8``, bit for bit the torch reference.

Nothing here flushes subnormals: Triton does not by itself either.

Shape legend: N rows, K columns of the weight; a program works on one tile (a row or a block), in steps.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.formats.base import Format
from requant.kernels.triton.addresses import TRITON_TYPES, address_table, count_bad, matrix_of
from requant.kernels.triton.buffers import check_buffers

E4M3_MAX = tl.constexpr(448.0)
SCALE_MIN = tl.constexpr(2.0**-126)

# float32 bits of 2^-6, E4M3's smallest normal number, and of 2^14, whose last place is E4M3's smallest step, 2^-9.
E4M3_NORMAL_BITS = tl.constexpr(0x3C800000)
E4M3_STEPS = tl.constexpr(float(2**14))
E4M3_STEPS_BITS = tl.constexpr(0x46800000)


@triton.jit
def scale_of(amax):
    """The scale of a tile of float32 values with the largest magnitude ``amax``."""
    scale = tl.maximum(tl.div_rn(amax, E4M3_MAX), SCALE_MIN)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def e4m3_bits(x, HARDWARE_CAST: tl.constexpr):
    """Codes (uint8) of float32 values below 464 in magnitude (what rounds to 448), rounded to nearest even.

    A value over its tile's scale needs no clamp: x / s is at most 448 · (1 + 2^-23).
    """
    if HARDWARE_CAST:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Keep three fraction bits, half-way cases to even, and move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x0007FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + E4M3_STEPS).to(tl.int32, bitcast=True) - E4M3_STEPS_BITS
    code = tl.where(magnitude < E4M3_NORMAL_BITS, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)  # NaN, of an activation
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_quotient(x, s, HARDWARE_CAST: tl.constexpr):
    """Codes of x / s, the division as IEEE rounds it.

    ``div_rn`` takes a slow branch for every zero, and ten instructions without it: a matrix with zeros would be
    quantized at a third of the memory's speed. The native way takes five: one reciprocal for a tile, correctly
    rounded, and two Newton steps on the quotient, the first of which makes it faithful and the second correctly
    rounded (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). That
    holds while the residuals are exact, so small tiles are scaled up by 2^64 before. A residual is q·s - x and
    enters with -1/s: in that order a zero keeps its sign.
    """
    if HARDWARE_CAST:
        up = tl.where(s < 2.0**-60, 2.0**64, 1.0)
        s = s * up
        x = x * up
        reciprocal = tl.div_rn(1.0, s)
        q = x * reciprocal
        q = tl.fma(tl.fma(q, s, -x), -reciprocal, q)
        q = tl.fma(tl.fma(q, s, -x), -reciprocal, q)
    else:
        q = tl.div_rn(x, s)
    return e4m3_bits(q, HARDWARE_CAST)


@triton.jit
def nonfinite(x):
    """1 where a float32 value is NaN or infinite, else 0."""
    return ((x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000).to(tl.int32)


@triton.jit
def _ptpc_row(
    source,
    target,
    scale,
    bad,
    k,
    STEPS: tl.constexpr,
    COLS: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One row, in steps of COLS: one pass for the scale, one for the codes."""
    col = tl.arange(0, COLS)
    largest = tl.zeros([COLS], tl.float32)
    wrong = tl.zeros([COLS], tl.int32)
    for step in tl.static_range(STEPS):
        at = step * COLS + col
        x = tl.load(source + at, mask=at < k, other=0.0, eviction_policy="evict_last").to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        if COUNT:
            wrong += nonfinite(x)
    if COUNT:
        count_bad(bad, tl.sum(wrong, 0))
    s = scale_of(tl.max(largest, 0))
    tl.store(scale, s)
    for step in tl.static_range(STEPS):
        at = step * COLS + col
        x = tl.load(source + at, mask=at < k, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(target + at, e4m3_quotient(x, s, HARDWARE_CAST), mask=at < k)


@triton.jit
def _ptpc_kernel(weight, data, scale, k, STEPS: tl.constexpr, COLS: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _ptpc_row(weight + row * k, data + row * k, scale + row, scale, k, STEPS, COLS, HARDWARE_CAST, False)


@triton.jit(do_not_specialize=["many"])
def _ptpc_many_kernel(
    table, many, n, k, TYPE: tl.constexpr, STEPS: tl.constexpr, COLS: tl.constexpr, HARDWARE_CAST: tl.constexpr
):
    """One row of one of many matrices [n, k]."""
    matrix = tl.program_id(0) // n
    row = (tl.program_id(0) % n).to(tl.int64)
    weight, data, scale, bad = matrix_of(table, many, matrix, TYPE, tl.float32)
    _ptpc_row(weight + row * k, data + row * k, scale + row, bad, k, STEPS, COLS, HARDWARE_CAST, True)


@triton.jit
def _per_block_tile(
    block,
    weight,
    data,
    scale,
    bad,
    n,
    k,
    blocks_k,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One block of BLOCK × BLOCK, in steps of ROWS rows; consecutive blocks lie along K."""
    first = (block // blocks_k).to(tl.int64) * BLOCK
    col = (block % blocks_k) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.zeros([ROWS, BLOCK], tl.float32)
    wrong = tl.zeros([ROWS, BLOCK], tl.int32)
    for step in tl.static_range(BLOCK // ROWS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * k + col[None, :]
        mask = (row[:, None] < n) & (col[None, :] < k)
        x = tl.load(weight + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        if COUNT:
            wrong += nonfinite(x)
    if COUNT:
        count_bad(bad, tl.sum(tl.sum(wrong, 1), 0))
    s = scale_of(tl.max(tl.max(largest, 1), 0))
    tl.store(scale + block, s)
    for step in tl.static_range(BLOCK // ROWS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * k + col[None, :]
        mask = (row[:, None] < n) & (col[None, :] < k)
        x = tl.load(weight + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(data + at, e4m3_quotient(x, s, HARDWARE_CAST), mask=mask)


@triton.jit
def _per_block_kernel(
    weight, data, scale, n, k, blocks_k, BLOCK: tl.constexpr, ROWS: tl.constexpr, HARDWARE_CAST: tl.constexpr
):
    _per_block_tile(tl.program_id(0), weight, data, scale, scale, n, k, blocks_k, BLOCK, ROWS, HARDWARE_CAST, False)


@triton.jit(do_not_specialize=["many"])
def _per_block_many_kernel(
    table,
    many,
    n,
    k,
    blocks,
    blocks_k,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
):
    """One block of one of many matrices [n, k] of ``blocks`` blocks."""
    matrix = tl.program_id(0) // blocks
    weight, data, scale, bad = matrix_of(table, many, matrix, TYPE, tl.float32)
    _per_block_tile(
        tl.program_id(0) % blocks, weight, data, scale, bad, n, k, blocks_k, BLOCK, ROWS, HARDWARE_CAST, True
    )


@cache
def casts_in_hardware(device: torch.device) -> bool:
    """Whether the device has an instruction from float32 to E4M3 (NVIDIA, from compute capability 8.9)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


# A row is cut into about five steps, the rows of a block into four. That is faster than to hold the whole tile in
# registers: the second read comes from the cache, and more programs are in flight (H200, bf16, K = 7168: 0.95 of
# the copy bandwidth against 0.81; blocks: 0.85 against 0.79).
_STEPS = 5
_BLOCK_ROWS = 32


def quantize_ptpc(format: Format, weight: Tensor, data: Tensor, scale: Tensor) -> None:
    """Table row ``quantize`` of ``ptpc_fp8``: weight [N, K] → data [N, K], scale [N, 1]."""
    check_buffers(format, weight, data, scale)
    n, k = weight.shape
    if n == 0:
        return
    cols = max(triton.next_power_of_2(triton.cdiv(k, _STEPS)), 256)
    with torch.cuda.device_of(weight):
        _ptpc_kernel[(n,)](
            weight,
            data.view(torch.uint8),
            scale,
            k,
            STEPS=triton.cdiv(k, cols),
            COLS=cols,
            HARDWARE_CAST=casts_in_hardware(weight.device),
            num_warps=min(max(cols // 512, 1), 16),
        )


def quantize_ptpc_many(
    format: Format, weights: Sequence[Tensor], data: Sequence[Tensor], scale: Sequence[Tensor], bad: Sequence[Tensor]
) -> None:
    """Table row ``quantize_many`` of ``ptpc_fp8``."""
    n, k = weights[0].shape
    cols = max(triton.next_power_of_2(triton.cdiv(k, _STEPS)), 256)
    with torch.cuda.device_of(weights[0]):
        _ptpc_many_kernel[(len(weights) * n,)](
            address_table(weights, data, scale, bad),
            len(weights),
            n,
            k,
            TYPE=TRITON_TYPES[weights[0].dtype],
            STEPS=triton.cdiv(k, cols),
            COLS=cols,
            HARDWARE_CAST=casts_in_hardware(weights[0].device),
            num_warps=min(max(cols // 512, 1), 16),
        )


def quantize_per_block_many(
    format: Format, weights: Sequence[Tensor], data: Sequence[Tensor], scale: Sequence[Tensor], bad: Sequence[Tensor]
) -> None:
    """Table row ``quantize_many`` of ``per_block_fp8``."""
    n, k = weights[0].shape
    blocks_n, blocks_k = scale[0].shape
    with torch.cuda.device_of(weights[0]):
        _per_block_many_kernel[(len(weights) * blocks_n * blocks_k,)](
            address_table(weights, data, scale, bad),
            len(weights),
            n,
            k,
            blocks_n * blocks_k,
            blocks_k,
            TYPE=TRITON_TYPES[weights[0].dtype],
            BLOCK=format.group[0],
            ROWS=_BLOCK_ROWS,
            HARDWARE_CAST=casts_in_hardware(weights[0].device),
            num_warps=4,
        )


def quantize_per_block(format: Format, weight: Tensor, data: Tensor, scale: Tensor) -> None:
    """Table row ``quantize`` of ``per_block_fp8``: weight [N, K] → data [N, K], scale [⌈N/128⌉, ⌈K/128⌉]."""
    check_buffers(format, weight, data, scale)
    if weight.numel() == 0:
        return
    n, k = weight.shape
    blocks_n, blocks_k = scale.shape
    with torch.cuda.device_of(weight):
        _per_block_kernel[(blocks_n * blocks_k,)](
            weight,
            data.view(torch.uint8),
            scale,
            n,
            k,
            blocks_k,
            BLOCK=format.group[0],
            ROWS=_BLOCK_ROWS,
            HARDWARE_CAST=casts_in_hardware(weight.device),
            num_warps=4,
        )
