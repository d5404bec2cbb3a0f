"""mxfp4 against an oracle in float64, where every quantity of the format is exact."""

import numpy as np
import pytest
import torch

from requant.formats import FORMATS

MXFP4 = FORMATS["mxfp4"]
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDPOINTS = (VALUES[1:] + VALUES[:-1]) / 2


def oracle_exponent(amax: float) -> int:
    """The even rule on a number: 1.75 · 2^p and above counts as the next power of two; E2M1 takes 2 of it."""
    if amax == 0:
        return 0
    fraction, exponent = np.frexp(np.float64(amax))
    power = int(exponent) - 1 + (fraction >= 0.875)
    return min(max(power - 2 + 127, 0), 254)


def oracle_codes(x: np.ndarray, exponent: int) -> np.ndarray:
    """Nearest value, ties to the even code, sign kept; exact in float64."""
    v = np.abs(x.astype(np.float64)) * np.exp2(127.0 - exponent)
    code = np.searchsorted(MIDPOINTS, v, side="left")  # a tie goes to the lower code …
    tie = np.isin(v, MIDPOINTS)
    code = code + (tie & (code % 2 == 1))  # … unless that is odd
    return code + 8 * np.signbit(x)


def oracle(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    w = weight.float().numpy()
    n, k = w.shape
    groups = -(-k // 32)
    codes = np.zeros((n, groups * 32), np.int64)
    scale = np.zeros((n, groups), np.uint8)
    for i in range(n):
        for g in range(groups):
            x = w[i, g * 32 : g * 32 + 32]
            scale[i, g] = oracle_exponent(np.abs(x).max())
            codes[i, g * 32 : g * 32 + len(x)] = oracle_codes(x, int(scale[i, g]))
    return codes, scale


def unpack(data: torch.Tensor) -> np.ndarray:
    packed = data.numpy()
    return np.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)


def finite_bf16() -> torch.Tensor:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite()]


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 64, 126, 127, 128, 200, 252, 253])
def test_every_bf16_in_a_group_of_each_exponent(exponent: int) -> None:
    """Every bf16 that leaves the group's exponent alone, beside an anchor that sets it."""
    limit = np.exp2(np.float64(exponent - 125)) * 1.75
    values = finite_bf16()
    values = values[values.double().abs() < limit]
    # At exponent 0 the rule would go lower: there a group needs no anchor, and has none.
    anchor = torch.zeros(1) if exponent == 0 else torch.exp2(torch.tensor([exponent - 125.0]))
    rows = torch.zeros(-(-values.numel() // 31) * 31)
    rows[: values.numel()] = values.float()
    weight = torch.cat((anchor.expand(rows.numel() // 31, 1), rows.view(-1, 31)), 1).to(torch.bfloat16)
    data, scale = MXFP4.quantize(weight)
    assert (scale == exponent).all()
    np.testing.assert_array_equal(unpack(data), oracle_codes(weight.float().numpy(), exponent))
    assert values.numel() > 200


def test_every_positive_bf16_sets_its_groups_exponent() -> None:
    values = finite_bf16()
    _, scale = MXFP4.quantize(values[:, None])
    assert scale.flatten().tolist() == [oracle_exponent(abs(float(v))) for v in values]
    assert int(scale.max()) == 253  # no finite weight reaches the clamp at 254
    _, scale = MXFP4.quantize(torch.tensor([[torch.finfo(torch.float32).max]]))
    assert scale.item() == 253


def test_every_code_and_exponent_round_trips() -> None:
    """All 256 bytes in a group of every exponent that a weight can have."""
    for start in range(0, 256, 16):
        data = torch.arange(start, start + 16, dtype=torch.uint8).expand(252, 16).contiguous()
        data[:, 0] = 0x77  # 6 keeps the exponent where it is; 1 is the smallest that holds it above the clamp
        scale = torch.arange(1, 253, dtype=torch.uint8)[:, None]
        back = MXFP4.dequantize(data, scale, (252, 32))
        again, scale_again = MXFP4.quantize(back)
        assert torch.equal(scale_again, scale)
        assert torch.equal(again, data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (3, 32), (5, 33), (2, 95)], ids=str)
def test_random_weights_of_every_magnitude(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    low, high = (-24, 14) if dtype == torch.float16 else (-149, 126)
    for exponent in range(low, high, 5):
        weight = torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0**exponent
        weight[:, 1::6] = -0.0
        largest = torch.finfo(dtype).max
        weight = weight.clamp(-largest, largest).to(dtype)
        data, scale = MXFP4.quantize(weight)
        codes, exponents = oracle(weight)
        np.testing.assert_array_equal(scale.numpy(), exponents)
        np.testing.assert_array_equal(unpack(data), codes)


def test_float32_just_beside_a_half_way_case() -> None:
    """Rounding sees all 24 bits: the neighbours of a tie go to their own side."""
    ties = torch.tensor(MIDPOINTS, dtype=torch.float32)
    row = torch.cat((ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(9.0)), torch.tensor([4.0])))
    data, scale = MXFP4.quantize(row[None])
    assert scale.item() == 127
    codes = unpack(data)[0]
    assert codes[:7].tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert codes[7:14].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert codes[14:21].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_values_above_six_saturate() -> None:
    """6.99 keeps exponent 127 by the even rule, and has no code of its own."""
    data, scale = MXFP4.quantize(torch.tensor([[6.99, -6.5]]))
    assert scale.item() == 127
    assert unpack(data)[0, :2].tolist() == [7, 15]


def test_low_nibble_is_the_even_column_and_padding_is_code_zero() -> None:
    data, scale = MXFP4.quantize(torch.tensor([[1.0, -6.0, -0.0]]))
    assert data.tolist() == [[0xF2, 0x08] + [0] * 14]
    assert scale.tolist() == [[127]]
    assert MXFP4.dequantize(data, scale, (1, 3)).tolist() == [[1.0, -6.0, 0.0]]


def test_group_of_zeros_has_exponent_zero_and_keeps_signs() -> None:
    data, scale = MXFP4.quantize(torch.tensor([[0.0, -0.0]]))
    assert scale.tolist() == [[0]]
    assert data[0, 0].item() == 0x80


def test_dequantized_scales_cover_all_of_e8m0() -> None:
    """2^-127 is a subnormal float32, 255 is NaN."""
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    data = torch.full((256, 16), 0x22, dtype=torch.uint8)
    back = MXFP4.dequantize(data, scale, (256, 32))[:, 0].double()
    assert torch.equal(back[:255], torch.exp2(torch.arange(255).double() - 127))
    assert back[255].isnan()
