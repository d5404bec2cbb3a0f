"""E4M3 on a GPU: scales, codes, quotients, and values from codes, bit for bit as the contract has them.

Nothing here flushes subnormals: Triton does not by itself either. ``HARDWARE`` says whether the device has the
instructions between float32 and E4M3; everything else has a form in plain integers, which is the same on every device.
"""

from functools import cache

import torch
import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
SCALE_MIN = tl.constexpr(2.0**-126)
INFINITY_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)

# float32 bits of 2^-6, E4M3's smallest normal number, and of 2^14, whose last place is E4M3's smallest step, 2^-9.
_NORMAL_BITS = tl.constexpr(0x3C800000)
_STEPS = tl.constexpr(float(2**14))
_STEPS_BITS = tl.constexpr(0x46800000)

# Up to here the low part of a reciprocal is a normal number (see reciprocal_of).
EASY = tl.constexpr(2.0**60)


@cache
def casts_in_hardware(device: torch.device) -> bool:
    """Whether the device has an instruction from float32 to E4M3 (NVIDIA, from compute capability 8.9)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def larger(a, b):
    """The larger one; a NaN is larger than all others. For :func:`triton.language.reduce`."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(amax):
    """The scale of a tile of float32 values with the largest magnitude ``amax``."""
    scale = tl.maximum(tl.div_rn(amax, E4M3_MAX), SCALE_MIN)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def e4m3_bits(x, HARDWARE: tl.constexpr):
    """Codes (uint8) of float32 values below 464 in magnitude (what rounds to 448), rounded to nearest even.

    A value over its tile's scale needs no clamp: x / s is at most 448 · (1 + 2^-23).
    """
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Keep three fraction bits, half-way cases to even, and move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x0007FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + _STEPS).to(tl.int32, bitcast=True) - _STEPS_BITS
    code = tl.where(magnitude < _NORMAL_BITS, small, normal)
    code = tl.where(magnitude > INFINITY_BITS, 0x7F, code)  # NaN, of an activation
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quotient(x, s):
    """x / s as IEEE rounds it, for float32 values and their scale.

    ``div_rn`` takes a slow branch for every zero, and ten instructions without it: a matrix with zeros would be
    quantized at a third of the memory's speed. This takes five: one reciprocal for a tile, correctly rounded, and two
    Newton steps on the quotient, the first of which makes it faithful and the second correctly rounded (Markstein,
    "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). That holds while the residuals
    are exact, so small tiles are scaled up by 2^64 before. A residual is q·s - x and enters with -1/s: in that order a
    zero keeps its sign.
    """
    up = tl.where(s < 2.0**-60, 2.0**64, 1.0)
    s = s * up
    x = x * up
    reciprocal = tl.div_rn(1.0, s)
    q = x * reciprocal
    q = tl.fma(tl.fma(q, s, -x), -reciprocal, q)
    return tl.fma(tl.fma(q, s, -x), -reciprocal, q)


@triton.jit
def reciprocal_of(s):
    """1 / s as the sum of two float32, the first of which is not above it and the second not negative; s < EASY.

    Of bfloat16 values x over a scale of bfloat16 values, ``fma(x, high, x * low)`` is the quotient as IEEE rounds it:
    there are 128 significands of s, 255 of x, and all of them have been tried (tests/kernels/test_quotient.py). A zero
    keeps its sign, as both parts are of one sign.
    """
    high = tl.div_rn(1.0, s)
    high = tl.where(
        tl.fma(-s, high, 1.0) < 0.0, (high.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True), high
    )
    return high, tl.fma(-s, high, 1.0) * high


@triton.jit
def e4m3_quotient(x, s, NARROW: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes of x / s, the division as IEEE rounds it; NARROW: all values of the tile are bfloat16, and s < EASY."""
    if HARDWARE:
        if NARROW:
            high, low = reciprocal_of(s)
            q = tl.fma(x, high, x * low)
        else:
            q = quotient(x, s)
    else:
        q = tl.div_rn(x, s)
    return e4m3_bits(q, HARDWARE)


@triton.jit
def bf16_bits(code, scale):
    """float32 bits of code · scale, rounded to bfloat16 (nearest even), for e4m3 ``code`` as an integer.

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
    return tl.where((bits & 0x7FFFFFFF) > INFINITY_BITS, _NAN_BITS, rounded)


@triton.jit
def value(code, scale):
    """code · scale in float32, for e4m3 ``code`` as uint8, with the device's own instruction."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale


@triton.jit
def bf16_value(code, scale, HARDWARE: tl.constexpr):
    """float32 values of code · scale, rounded to bfloat16 (nearest even), for e4m3 ``code`` as uint8."""
    if HARDWARE:
        # Two at a time, by the fast unit: Triton's own cast takes one at a time, at a quarter of the rate.
        bits = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 pair;
                cvt.rn.bf16x2.f32 pair, $3, $2;
                shl.b32 $0, pair, 16;
                and.b32 $1, pair, 0xFFFF0000;
            }
            """,
            "=r,=r,f,f",
            [value(code, scale)],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
        )
    else:
        bits = bf16_bits(code, scale)
    return bits.to(tl.float32, bitcast=True)
