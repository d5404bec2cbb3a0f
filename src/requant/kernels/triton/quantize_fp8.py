"""FP8 E4M3 weight quantization on a GPU: ``ptpc_fp8`` and ``per_block_fp8``, bit for bit the torch reference.

Shape legend: N rows, K columns of the weight; a program works on one tile (rows or a block), in steps: one pass for
the scales, one for the codes, whose reads come from the cache.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.formats.base import Format
from requant.kernels.triton.addresses import TRITON_TYPES, address_table, count_bad, matrix_of
from requant.kernels.triton.buffers import check_buffers
from requant.kernels.triton.e4m3 import EASY, INFINITY_BITS, casts_in_hardware, e4m3_quotient, larger, scale_of


@triton.jit
def _larger(largest, x, COUNT: tl.constexpr):
    """Magnitudes so far; where values that are not finite are counted, a NaN is the largest of all."""
    if COUNT:
        return larger(largest, tl.abs(x))
    return tl.maximum(largest, tl.abs(x))


@triton.jit
def _nonfinite(x):
    """How many float32 values are NaN or infinite."""
    wrong = ((x.to(tl.int32, bitcast=True) & INFINITY_BITS) == INFINITY_BITS).to(tl.int32)
    return tl.sum(tl.sum(wrong, 1), 0)


@triton.jit
def _largest_bits(largest):
    """float32 bits of the largest magnitude of each row: those of a NaN are larger than those of an infinity."""
    return tl.max(largest.to(tl.int32, bitcast=True), 1)


@triton.jit
def _load_tile(source, row, col, n, k, POLICY: tl.constexpr):
    """float32 [ROWS, COLS] of a matrix [n, k]; zeros outside."""
    mask = (row[:, None] < n) & (col[None, :] < k)
    return tl.load(source + row[:, None] * k + col[None, :], mask=mask, other=0.0, eviction_policy=POLICY).to(
        tl.float32
    )


@triton.jit
def _store_codes(source, target, row, col, n, k, s, NARROW: tl.constexpr, HARDWARE: tl.constexpr):
    """Second pass of a step: codes of [ROWS, COLS] values over scales that broadcast to them."""
    x = _load_tile(source, row, col, n, k, "evict_first")
    mask = (row[:, None] < n) & (col[None, :] < k)
    tl.store(target + row[:, None] * k + col[None, :], e4m3_quotient(x, s, NARROW, HARDWARE), mask=mask)


@triton.jit
def _ptpc_rows(
    part,
    source,
    target,
    scale,
    bad,
    n,
    k,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    COLS: tl.constexpr,
    HARDWARE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """ROWS rows, in steps of COLS columns."""
    row = part.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    largest = tl.zeros([ROWS, COLS], tl.float32)
    for step in tl.static_range(STEPS):
        largest = _larger(largest, _load_tile(source, row, step * COLS + col, n, k, "evict_last"), COUNT)
    amax = _largest_bits(largest)
    if COUNT:
        if tl.max(amax, 0) >= INFINITY_BITS:
            for again in range(STEPS):
                count_bad(bad, _nonfinite(_load_tile(source, row, again * COLS + col, n, k, "")))
    s = scale_of(amax.to(tl.float32, bitcast=True))
    tl.store(scale + row, s, mask=row < n)
    if HARDWARE and source.dtype.element_ty == tl.bfloat16:
        if tl.max(s, 0) < EASY:
            for step in tl.static_range(STEPS):
                _store_codes(source, target, row, step * COLS + col, n, k, s[:, None], True, HARDWARE)
        else:
            for again in range(STEPS):
                _store_codes(source, target, row, again * COLS + col, n, k, s[:, None], False, HARDWARE)
    else:
        for step in tl.static_range(STEPS):
            _store_codes(source, target, row, step * COLS + col, n, k, s[:, None], False, HARDWARE)


@triton.jit
def _ptpc_kernel(
    weight,
    data,
    scale,
    n,
    k,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    COLS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    _ptpc_rows(tl.program_id(0), weight, data, scale, scale, n, k, ROWS, STEPS, COLS, HARDWARE, False)


@triton.jit(do_not_specialize=["many"])
def _ptpc_many_kernel(
    table,
    many,
    parts,
    n,
    k,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    COLS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """The same for one of many matrices [n, k] of ``parts`` times ROWS rows."""
    weight, data, scale, bad = matrix_of(table, many, tl.program_id(0) // parts, TYPE, tl.float32)
    _ptpc_rows(tl.program_id(0) % parts, weight, data, scale, bad, n, k, ROWS, STEPS, COLS, HARDWARE, True)


@triton.jit
def _per_block_tile(
    block,
    source,
    target,
    scale,
    bad,
    n,
    k,
    blocks_k,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HARDWARE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One block of BLOCK × BLOCK, in steps of ROWS rows; consecutive blocks lie along K."""
    STEPS: tl.constexpr = BLOCK // ROWS
    row = (block // blocks_k).to(tl.int64) * BLOCK + tl.arange(0, ROWS)
    col = (block % blocks_k) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        largest = _larger(largest, _load_tile(source, row + step * ROWS, col, n, k, "evict_last"), COUNT)
    amax = tl.max(_largest_bits(largest), 0)
    if COUNT:
        if amax >= INFINITY_BITS:
            for again in range(STEPS):
                count_bad(bad, _nonfinite(_load_tile(source, row + again * ROWS, col, n, k, "")))
    s = scale_of(amax.to(tl.float32, bitcast=True))
    tl.store(scale + block, s)
    if HARDWARE and source.dtype.element_ty == tl.bfloat16:
        if s < EASY:
            for step in tl.static_range(STEPS):
                _store_codes(source, target, row + step * ROWS, col, n, k, s, True, HARDWARE)
        else:
            for again in range(STEPS):
                _store_codes(source, target, row + again * ROWS, col, n, k, s, False, HARDWARE)
    else:
        for step in tl.static_range(STEPS):
            _store_codes(source, target, row + step * ROWS, col, n, k, s, False, HARDWARE)


@triton.jit
def _per_block_kernel(
    weight, data, scale, n, k, blocks_k, BLOCK: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr
):
    _per_block_tile(tl.program_id(0), weight, data, scale, scale, n, k, blocks_k, BLOCK, ROWS, HARDWARE, False)


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
    HARDWARE: tl.constexpr,
):
    """One block of one of many matrices [n, k] of ``blocks`` blocks."""
    weight, data, scale, bad = matrix_of(table, many, tl.program_id(0) // blocks, TYPE, tl.float32)
    _per_block_tile(tl.program_id(0) % blocks, weight, data, scale, bad, n, k, blocks_k, BLOCK, ROWS, HARDWARE, True)


# A row is cut into about five steps, the rows of a block into four. That is faster than to hold the whole tile in
# registers: the second read comes from the cache, and more programs are in flight (H200, bf16, K = 7168: 0.95 of
# the copy bandwidth against 0.81; blocks: 0.85 against 0.79).
_STEPS = 5
_COLS = 256
_VALUES = 1024
_WARP_VALUES = 512
_BLOCK_ROWS, _BLOCK_WARPS = 32, 4


def _ptpc_tile(n: int, k: int, device: torch.device) -> dict[str, int | bool]:
    """How a program goes through rows of K columns."""
    cols = max(triton.next_power_of_2(triton.cdiv(k, _STEPS)), _COLS)
    steps = triton.cdiv(k, cols)
    rows = min(max(triton.next_power_of_2(_VALUES // max(steps * cols, 1) + 1) // 2, 1), triton.next_power_of_2(n))
    return {
        "ROWS": rows,
        "STEPS": steps,
        "COLS": cols,
        "HARDWARE": casts_in_hardware(device),
        "num_warps": min(max(rows * cols // _WARP_VALUES, 1), 16),
    }


def quantize_ptpc(format: Format, weight: Tensor, data: Tensor, scale: Tensor) -> None:
    """Table row ``quantize`` of ``ptpc_fp8``: weight [N, K] → data [N, K], scale [N, 1]."""
    check_buffers(format, weight, data, scale)
    n, k = weight.shape
    if n == 0:
        return
    tile = _ptpc_tile(n, k, weight.device)
    with torch.cuda.device_of(weight):
        _ptpc_kernel[(triton.cdiv(n, tile["ROWS"]),)](weight, data.view(torch.uint8), scale, n, k, **tile)


def quantize_ptpc_many(
    format: Format, weights: Sequence[Tensor], data: Sequence[Tensor], scale: Sequence[Tensor], bad: Sequence[Tensor]
) -> None:
    """Table row ``quantize_many`` of ``ptpc_fp8``."""
    n, k = weights[0].shape
    tile = _ptpc_tile(n, k, weights[0].device)
    parts = triton.cdiv(n, tile["ROWS"])
    table, dtype = address_table(weights, data, scale, bad), TRITON_TYPES[weights[0].dtype]
    with torch.cuda.device_of(weights[0]):
        _ptpc_many_kernel[(len(weights) * parts,)](table, len(weights), parts, n, k, TYPE=dtype, **tile)


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
            HARDWARE=casts_in_hardware(weight.device),
            num_warps=_BLOCK_WARPS,
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
            HARDWARE=casts_in_hardware(weights[0].device),
            num_warps=_BLOCK_WARPS,
        )
