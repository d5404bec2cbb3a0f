"""``mxfp4``: FP4 E2M1 codes in groups of 32 along K that share an E8M0 (power of two) scale.

Element and scale formats are those of the OCP Microscaling Formats (MX) specification v1.0. The scale follows the
"even" rule: the group's largest magnitude is rounded to E2M1's precision before its exponent is taken.

Shape legend: N rows, K columns, G = ⌈K/32⌉ groups a row, 16 bytes a group. A byte holds two codes, the even
column's in its low nibble. A code is a sign bit (8) and an index into the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6.
"""

from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from requant.formats.base import Format
from requant.formats.rows import row_runs

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_MAGNITUDE_BITS = 0x7FFFFFFF
# Half of the last place of one fraction bit: a carry out of it reaches the exponent from 1.75 upwards.
_EVEN_ROUNDING = 0x00200000
_E2M1_EXPONENT_MAX = 2
_ONE = 0x3F800000
# One unit in the last place of 2^22 is 0.5: adding it rounds a magnitude below 1 to a multiple of 0.5.
_HALF_STEPS = float(2**22)
_HALF_STEPS_BITS = 0x4A800000


def _group_exponents(magnitude_bits: Tensor) -> Tensor:
    """Biased scale exponents, int32 [..., 1], of groups of float32 magnitudes [..., 32] given as their bits."""
    amax = magnitude_bits.amax(-1, keepdim=True)  # the order of non-negative floats is that of their bits
    return ((amax + _EVEN_ROUNDING) >> 23).sub_(_E2M1_EXPONENT_MAX).clamp_(0, 254)


def _round_to_codes(scaled: Tensor) -> Tensor:
    """Nearest magnitude's index, ties to the even index, for float32 ``scaled`` >= 0; int32, saturating at 7."""
    bits = scaled.view(torch.int32)
    # From 1 upwards the codes are the exponent and one fraction bit: drop 22 bits, half-way cases to even.
    normal = ((bits + 0x001FFFFF + ((bits >> 22) & 1)) >> 22).sub_((_ONE >> 22) - 2).clamp_(max=7)
    small = (scaled + _HALF_STEPS).view(torch.int32).sub_(_HALF_STEPS_BITS)
    return torch.where(bits < _ONE, small, normal)


def _quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    groups = ceil(k / GROUP)
    padded = F.pad(weight.float(), (0, groups * GROUP - k)).view(n, groups, GROUP)
    bits = padded.view(torch.int32)
    exponent = _group_exponents(bits & _MAGNITUDE_BITS)
    # 1 / 2^(e-127) is a normal float32 for every e that finite weights give (0 to 253): the product is exact,
    # or so small that its code is 0 either way.
    reciprocal = ((254 - exponent) << 23).view(torch.float32)
    codes = _round_to_codes(padded.abs().mul_(reciprocal)) | ((bits >> 28) & 8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.to(torch.uint8).view(n, groups * GROUP // 2), exponent.to(torch.uint8).view(n, groups)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [N, K] → packed codes uint8 [N, 16·⌈K/32⌉] and E8M0 scales uint8 [N, ⌈K/32⌉].

    A last group of fewer than 32 columns uses the elements it has; its storage is filled up with code 0.
    """
    n, k = weight.shape
    data = torch.empty(FORMAT.data_shape(n, k), dtype=torch.uint8, device=weight.device)
    scale = torch.empty(FORMAT.scale_shape(n, k), dtype=torch.uint8, device=weight.device)
    for start, stop in row_runs(n, k):
        data[start:stop], scale[start:stop] = _quantize_rows(weight[start:stop])
    return data, scale


def e8m0_to_float32(scale: Tensor) -> Tensor:
    """E8M0 (its bytes, uint8 of any shape) as float32: 2^(e-127), for 0 the subnormal 2^-127, for 255 NaN."""
    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, 0x00400000, bits)
    return torch.where(scale == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def dequantize(data: Tensor, scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """Magnitude · 2^(e-127) with the code's sign, float32 [N, K]; a scale of 255 gives NaN."""
    n, k = shape
    groups = ceil(k / GROUP)
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=data.device)
    out = torch.empty(shape, dtype=torch.float32, device=data.device)
    for start, stop in row_runs(n, k):
        packed = data[start:stop].to(torch.int32)
        codes = torch.stack((packed & 15, packed >> 4), -1)
        values = table.index_select(0, codes.view(-1)).view(stop - start, groups, GROUP)
        values.mul_(e8m0_to_float32(scale[start:stop])[..., None])
        out[start:stop] = values.view(stop - start, groups * GROUP)[:, :k]
    return out


FORMAT = Format(
    name="mxfp4",
    quant_type="per_1x32",
    quant_dtype="torch.uint8",
    data_dtype=torch.uint8,
    scale_dtype=torch.uint8,
    group=(1, GROUP),
    codes_per_byte=2,
    activation=None,
    quantize=quantize,
    dequantize=dequantize,
)
