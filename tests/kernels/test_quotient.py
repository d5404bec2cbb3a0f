"""A bfloat16 value over a scale of bfloat16 values in two operations: every pair of significands there is."""

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from requant.formats import FORMATS
from requant.kernels import lookup

MAX = 448
BITS = 24  # of a float32's significand


def exponent(value: Fraction) -> int:
    """e of 2^e ≤ value < 2^(e + 1), value > 0."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if Fraction(2) ** e <= value else e - 1


def nearest(value: Fraction) -> Fraction:
    """The float32 next to a value, of two the even one; without limits of the exponent."""
    if not value:
        return value
    ulp = Fraction(2) ** (exponent(abs(value)) - BITS + 1)
    return round(value / ulp) * ulp  # Python rounds to even


def scales() -> Iterator[Fraction]:
    """Every significand of a scale: a bfloat16 value over 448, as float32."""
    for amax in range(128, 256):
        yield nearest(Fraction(amax, MAX))


def parts(s: Fraction) -> tuple[Fraction, Fraction]:
    """What ``reciprocal_of`` computes."""
    high = nearest(1 / s)
    if 1 - s * high < 0:
        high -= Fraction(2) ** (exponent(high) - BITS + 1)
    rest = nearest(1 - s * high)
    assert rest == 1 - s * high, "the residual is not a float32"
    return high, nearest(rest * high)


def test_nearest_is_float32_rounding() -> None:
    values = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).tolist()
    for value, single in zip(values, torch.tensor(values, dtype=torch.float32).tolist(), strict=True):
        assert nearest(Fraction(value)) == Fraction(single)
    assert nearest(Fraction(2**24 + 1)) == 2**24
    assert nearest(Fraction(2**24 + 3)) == 2**24 + 4


def test_two_operations_give_the_quotient_of_every_pair() -> None:
    for s in scales():
        high, low = parts(s)
        assert low >= 0
        for x in range(1, 256):
            assert nearest(x * high + nearest(x * low)) == nearest(x / s), f"{x} over {s}"


def test_one_operation_does_not() -> None:
    wrong = sum(nearest(x * nearest(1 / s)) != nearest(x / s) for s in scales() for x in range(1, 256))
    assert wrong > 1000


@pytest.mark.gpu
@pytest.mark.parametrize("power", [-126, -118, -52, -51, 0, 67, 68, 69, 127])
def test_a_gpu_divides_every_bfloat16_by_every_scale(power: int) -> None:
    """128 rows whose largest magnitudes have every significand, of all values that are not larger."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    limit = torch.ldexp(torch.arange(128, 256).float(), torch.tensor(power - 7))[:, None]
    weight = torch.where(values.abs() <= limit, values, limit).to(torch.bfloat16)  # NaN too
    format = FORMATS["ptpc_fp8"]
    codes, scales = format.quantize(weight)
    data = torch.full(weight.shape, 0xFF, dtype=torch.uint8, device="cuda").view(format.data_dtype)
    scale = torch.full((128, 1), torch.nan, device="cuda")
    lookup("quantize", "ptpc_fp8", "cuda")(format, weight.cuda(), data, scale)
    assert torch.equal(scale.cpu(), scales)
    assert torch.equal(data.cpu().view(torch.uint8), codes.view(torch.uint8))
