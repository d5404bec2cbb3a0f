"""FP8 E4M3 weight quantization on a GPU: ``ptpc_fp8`` and ``per_block_fp8``, bit for bit the torch reference.

Divisions are ``tl.div_rn`` (IEEE); nothing here flushes subnormals, which Triton does not do by itself either.

Shape legend: N rows, K columns of the weight; a program works on a tile of ROWS × COLS.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.formats.base import Format
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
    """Codes (uint8) of float32 values, rounded to nearest even; the values are clamped to ±448 first."""
    x = tl.minimum(tl.maximum(x, -E4M3_MAX), E4M3_MAX)
    if HARDWARE_CAST:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Keep three fraction bits, half-way cases to even, and move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x0007FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + E4M3_STEPS).to(tl.int32, bitcast=True) - E4M3_STEPS_BITS
    code = tl.where(magnitude < E4M3_NORMAL_BITS, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _ptpc_kernel(weight, data, scale, n, k, ROWS: tl.constexpr, COLS: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """ROWS whole rows, K <= COLS: the weight is read once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    offset = row[:, None] * k + col[None, :]
    mask = (row[:, None] < n) & (col[None, :] < k)
    x = tl.load(weight + offset, mask=mask, other=0.0).to(tl.float32)
    s = scale_of(tl.max(tl.abs(x), 1))
    tl.store(scale + row, s, mask=row < n)
    tl.store(data + offset, e4m3_bits(tl.div_rn(x, s[:, None]), HARDWARE_CAST), mask=mask)


@triton.jit
def _ptpc_long_kernel(weight, data, scale, k, COLS: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """One row of any length, in steps of COLS: one pass for the scale, one for the codes."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, COLS)
    source = weight + row * k
    target = data + row * k
    largest = tl.zeros([COLS], tl.float32)
    for start in range(0, k, COLS):
        x = tl.load(source + start + col, mask=start + col < k, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    s = scale_of(tl.max(largest, 0))
    tl.store(scale + row, s)
    for start in range(0, k, COLS):
        x = tl.load(source + start + col, mask=start + col < k, other=0.0).to(tl.float32)
        codes = e4m3_bits(tl.div_rn(x, s), HARDWARE_CAST)
        tl.store(target + start + col, codes, mask=start + col < k)


@triton.jit
def _per_block_kernel(weight, data, scale, n, k, blocks_k, BLOCK: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """One block of BLOCK × BLOCK; consecutive programs lie along K."""
    block = tl.program_id(0)
    row = (block // blocks_k).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = (block % blocks_k) * BLOCK + tl.arange(0, BLOCK)
    offset = row[:, None] * k + col[None, :]
    mask = (row[:, None] < n) & (col[None, :] < k)
    x = tl.load(weight + offset, mask=mask, other=0.0).to(tl.float32)
    s = scale_of(tl.max(tl.max(tl.abs(x), 1), 0))
    tl.store(scale + block, s)
    codes = e4m3_bits(tl.div_rn(x, s), HARDWARE_CAST)
    tl.store(data + offset, codes, mask=mask)


@cache
def casts_in_hardware(device: torch.device) -> bool:
    """Whether the device has an instruction from float32 to E4M3 (NVIDIA, from compute capability 8.9)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


# Columns up to which a program holds whole rows in registers, and the step of the loop beyond.
_WHOLE_ROW = 16384
_LONG_STEP = 8192


def quantize_ptpc(format: Format, weight: Tensor, data: Tensor, scale: Tensor) -> None:
    """Table row ``quantize`` of ``ptpc_fp8``: weight [N, K] → data [N, K], scale [N, 1]."""
    check_buffers(format, weight, data, scale)
    n, k = weight.shape
    if n == 0:
        return
    codes, cast = data.view(torch.uint8), casts_in_hardware(weight.device)
    with torch.cuda.device_of(weight):
        if k > _WHOLE_ROW:
            _ptpc_long_kernel[(n,)](weight, codes, scale, k, COLS=_LONG_STEP, HARDWARE_CAST=cast, num_warps=8)
            return
        cols = triton.next_power_of_2(max(k, 1))
        rows = max(2048 // cols, 1)
        warps = min(max(rows * cols // 1024, 1), 16)
        grid = (triton.cdiv(n, rows),)
        _ptpc_kernel[grid](weight, codes, scale, n, k, ROWS=rows, COLS=cols, HARDWARE_CAST=cast, num_warps=warps)


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
            HARDWARE_CAST=casts_in_hardware(weight.device),
            num_warps=8,
        )
