"""``mxfp4`` weight quantization on a GPU, bit for bit the torch reference.

A program takes GROUPS groups of 32 columns. Each group is held as 16 pairs (even column, odd column), the two
codes of one stored byte, so that packing needs no exchange between lanes.

Shape legend: N rows, K columns of the weight; P = 16 pairs of a group.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.formats.base import Format
from requant.kernels.triton.addresses import TRITON_TYPES, address_table, count_bad, matrix_of
from requant.kernels.triton.buffers import check_buffers
from requant.kernels.triton.e4m3 import INFINITY_BITS, casts_in_hardware

PAIRS = tl.constexpr(16)
# 2^22, the float32 whose last place is 0.5: the low bits of a sum with it count half steps.
HALF_STEPS = tl.constexpr(float(2**22))


@triton.jit
def _code_bits(magnitude, reciprocal):
    """Codes of float32 magnitudes, in the low 4 bits of an int32; ``reciprocal`` is 1 / 2^(e-127).

    Over v = magnitude · reciprocal, the code of E2M1 grows by 1 every 0.5 up to 2, every 1 up to 4 and every 2 up
    to 6: it is the minimum of 2v, v + 2 and v/2 + 4, rounded to nearest even. Each line is computed in half
    steps on top of 2^22, where the addition does that rounding. Products with a power of two are exact, or so
    small that the sum does not see them. The even rule keeps v below 7, so the code never exceeds 7.
    """
    upto_2 = tl.fma(magnitude, reciprocal, HALF_STEPS)
    upto_4 = tl.fma(magnitude, reciprocal * 0.5, HALF_STEPS + 1.0)
    upto_6 = tl.fma(magnitude, reciprocal * 0.25, HALF_STEPS + 2.0)
    return tl.minimum(tl.minimum(upto_2, upto_4), upto_6).to(tl.int32, bitcast=True)


@triton.jit
def _exponent(amax):
    """Scale bytes of groups, of the float32 bits of their largest magnitudes."""
    return tl.maximum(((amax + 0x00200000) >> 23) - 2, 0)


@triton.jit
def _pair_code_bits(magnitude, reciprocal):
    """Codes of pairs of bfloat16 magnitudes in int32 words, in the low 4 bits of each half.

    :func:`_code_bits` with three packed multiply-adds of bfloat16, on top of 64, whose last place is 0.5. For devices
    that cast to E4M3, which have them.
    """
    whole = reciprocal.to(tl.int32, bitcast=True) >> 16
    half = (reciprocal * 0.5).to(tl.int32, bitcast=True) >> 16
    quarter = (reciprocal * 0.25).to(tl.int32, bitcast=True) >> 16
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 upto_2, upto_4, upto_6;
            mov.b32 upto_2, 0x42804280;
            mov.b32 upto_4, 0x42824282;
            mov.b32 upto_6, 0x42844284;
            fma.rn.bf16x2 upto_2, $1, $2, upto_2;
            fma.rn.bf16x2 upto_4, $1, $3, upto_4;
            fma.rn.bf16x2 upto_6, $1, $4, upto_6;
            min.bf16x2 upto_2, upto_2, upto_4;
            min.bf16x2 $0, upto_2, upto_6;
        }
        """,
        "=r,r,r,r,r",
        [magnitude, whole | (whole << 16), half | (half << 16), quarter | (quarter << 16)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def store_pairs(word, group, in_range, data, scale, bad, COUNT: tl.constexpr):
    """:func:`store_groups` of groups given as pairs of bfloat16 values, int32 [GROUPS, P], the even one below."""
    magnitude = word & 0x7FFF7FFF
    amax = tl.max(tl.maximum(magnitude, magnitude << 16), 1) & 0x7FFF0000
    if COUNT:
        if tl.max(amax, 0) >= INFINITY_BITS:
            even = ((magnitude << 16) >= INFINITY_BITS).to(tl.int32)
            odd = (magnitude >= INFINITY_BITS).to(tl.int32)
            count_bad(bad, tl.sum(tl.sum(even + odd, 1), 0))
    exponent = _exponent(amax)
    reciprocal = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    codes = (_pair_code_bits(magnitude, reciprocal) & 0x00070007) | ((word >> 12) & 0x00080008)
    pair = tl.arange(0, PAIRS)
    byte = (codes | (codes >> 12)).to(tl.uint8)
    tl.store(data + group[:, None] * PAIRS + pair[None, :], byte, mask=in_range[:, None])
    tl.store(scale + group, exponent.to(tl.uint8), mask=in_range)


@triton.jit
def store_groups(even, odd, group, in_range, data, scale, bad, COUNT: tl.constexpr):
    """Quantize and store groups given as float32 bits (int32 [GROUPS, P]) of their even and odd columns.

    COUNT: add how many values are not finite to ``bad``.
    """
    even_magnitude = even & 0x7FFFFFFF
    odd_magnitude = odd & 0x7FFFFFFF
    amax = tl.max(tl.maximum(even_magnitude, odd_magnitude), 1)
    if COUNT:
        if tl.max(amax, 0) >= INFINITY_BITS:
            wrong = (even_magnitude >= INFINITY_BITS).to(tl.int32) + (odd_magnitude >= INFINITY_BITS).to(tl.int32)
            count_bad(bad, tl.sum(tl.sum(wrong, 1), 0))
    exponent = _exponent(amax)
    reciprocal = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    low = _code_bits(even_magnitude.to(tl.float32, bitcast=True), reciprocal)
    high = _code_bits(odd_magnitude.to(tl.float32, bitcast=True), reciprocal)
    # The bits of 2^22 end in zeros: the sum's low byte is the two codes.
    byte = (low + (high << 4)) | ((even >> 28) & 0x08) | ((odd >> 24) & 0x80)
    pair = tl.arange(0, PAIRS)
    tl.store(data + group[:, None] * PAIRS + pair[None, :], byte.to(tl.uint8), mask=in_range[:, None])
    tl.store(scale + group, exponent.to(tl.uint8), mask=in_range)


@triton.jit
def _words_kernel(words, data, scale, total, dtype: tl.constexpr, GROUPS: tl.constexpr, HARDWARE: tl.constexpr):
    """Whole groups of values of ``dtype``, read as integers [total, P] of twice their width: one is a pair."""
    _words(tl.program_id(0), words, data, scale, scale, total, dtype, GROUPS, HARDWARE, False)


@triton.jit(do_not_specialize=["many"])
def _words_many_kernel(
    table, many, total, programs, dtype: tl.constexpr, WORD: tl.constexpr, GROUPS: tl.constexpr, HARDWARE: tl.constexpr
):
    """The same for many matrices of ``total`` groups, each the work of ``programs`` programs."""
    matrix = tl.program_id(0) // programs
    words, data, scale, bad = matrix_of(table, many, matrix, WORD, tl.uint8)
    _words(tl.program_id(0) % programs, words, data, scale, bad, total, dtype, GROUPS, HARDWARE, True)


@triton.jit
def _words(
    program,
    words,
    data,
    scale,
    bad,
    total,
    dtype: tl.constexpr,
    GROUPS: tl.constexpr,
    HARDWARE: tl.constexpr,
    COUNT: tl.constexpr,
):
    group = program.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    pair = tl.arange(0, PAIRS)
    in_range = group < total
    word = tl.load(words + group[:, None] * PAIRS + pair[None, :], mask=in_range[:, None], other=0)
    if HARDWARE and dtype == tl.bfloat16:
        store_pairs(word, group, in_range, data, scale, bad, COUNT)
    else:
        if dtype == tl.float32:
            even = word.to(tl.int32)
            odd = (word >> 32).to(tl.int32)
        elif dtype == tl.bfloat16:
            even = word << 16
            odd = word & -65536
        else:
            even = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
            odd = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        store_groups(even, odd, group, in_range, data, scale, bad, COUNT)


@triton.jit
def _any_kernel(weight, data, scale, total, k, groups_k, GROUPS: tl.constexpr):
    """Groups of any dtype, alignment and K; the last group of a row may be ragged."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    pair = tl.arange(0, PAIRS)
    in_range = group < total
    row = group // groups_k
    col = ((group - row * groups_k) * (2 * PAIRS))[:, None] + 2 * pair[None, :]
    source = weight + row[:, None] * k + col
    even = tl.load(source, mask=in_range[:, None] & (col < k), other=0.0).to(tl.float32)
    odd = tl.load(source + 1, mask=in_range[:, None] & (col + 1 < k), other=0.0).to(tl.float32)
    store_groups(
        even.to(tl.int32, bitcast=True), odd.to(tl.int32, bitcast=True), group, in_range, data, scale, scale, False
    )


_GROUPS = 128
_WARPS = 2
_PAIR_TYPES = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}
_WORD_TYPES = {torch.int32: tl.int32, torch.int64: tl.int64}


def quantize_mxfp4(format: Format, weight: Tensor, data: Tensor, scale: Tensor) -> None:
    """Table row ``quantize`` of ``mxfp4``: weight [N, K] → data [N, 16·⌈K/32⌉], scale [N, ⌈K/32⌉]."""
    check_buffers(format, weight, data, scale)
    if weight.numel() == 0:
        return
    k = weight.shape[1]
    groups_k, total = scale.shape[1], scale.numel()
    grid = (triton.cdiv(total, _GROUPS),)
    pairs = _PAIR_TYPES[weight.dtype]
    aligned = weight.data_ptr() % pairs.itemsize == 0 and weight.storage_offset() % 2 == 0
    with torch.cuda.device_of(weight):
        if aligned and k % format.group[1] == 0:
            words, dtype = weight.view(pairs), TRITON_TYPES[weight.dtype]
            _words_kernel[grid](
                words,
                data,
                scale,
                total,
                dtype=dtype,
                GROUPS=_GROUPS,
                HARDWARE=casts_in_hardware(weight.device),
                num_warps=_WARPS,
            )
        else:
            _any_kernel[grid](weight, data, scale, total, k, groups_k, GROUPS=_GROUPS, num_warps=_WARPS)


def quantize_mxfp4_many(
    format: Format, weights: Sequence[Tensor], data: Sequence[Tensor], scale: Sequence[Tensor], bad: Sequence[Tensor]
) -> None:
    """Table row ``quantize_many`` of ``mxfp4``."""
    total = scale[0].numel()
    programs = triton.cdiv(total, _GROUPS)
    with torch.cuda.device_of(weights[0]):
        _words_many_kernel[(len(weights) * programs,)](
            address_table(weights, data, scale, bad),
            len(weights),
            total,
            programs,
            dtype=TRITON_TYPES[weights[0].dtype],
            WORD=_WORD_TYPES[_PAIR_TYPES[weights[0].dtype]],
            GROUPS=_GROUPS,
            HARDWARE=casts_in_hardware(weights[0].device),
            num_warps=_WARPS,
        )
