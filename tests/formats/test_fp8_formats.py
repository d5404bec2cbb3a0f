"""ptpc_fp8 and per_block_fp8 against an oracle that shares nothing with them: a table of codes and exact fractions."""

from bisect import bisect_right
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
import torch

from requant.formats import FORMATS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def decode(code: int) -> Fraction:
    """E4M3 by its definition: bias 7, three fraction bits, subnormals at exponent field 0."""
    exponent, fraction = (code >> 3) & 15, code & 7
    value = (
        Fraction(fraction, 8) * Fraction(2) ** -6
        if exponent == 0
        else (1 + Fraction(fraction, 8)) * Fraction(2) ** (exponent - 7)
    )
    return -value if code & 128 else value


VALUES = [decode(code) for code in range(127)]  # 127 is NaN


def nearest(x: float) -> int:
    """The code nearest to a float, ties to the even code, the sign kept on zero; saturating."""
    magnitude = Fraction(abs(x))
    low = min(bisect_right(VALUES, magnitude) - 1, 126)
    if low < 126:
        below, above = magnitude - VALUES[low], VALUES[low + 1] - magnitude
        low += above < below or (above == below and low % 2 == 1)
    return low | (128 if np.signbit(x) else 0)


def oracle(weight: torch.Tensor, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales, element by element; only IEEE float32 division is taken from numpy."""
    w = weight.float().numpy()
    n, k = w.shape
    scale = np.empty((ceil(n / rows), ceil(k / cols)), np.float32)
    codes = np.empty((n, k), np.uint8)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = np.s_[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols]
            amax = np.abs(w[at]).max()
            s = np.float32(1) if amax == 0 else np.maximum(amax / np.float32(448), np.float32(2.0**-126))
            scale[i, j] = s
            codes[at] = [[nearest(float(x / s)) for x in row] for row in w[at]]
    return codes, scale


def weights(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows over the dtype's whole range: subnormal to largest, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (-149, 127) if dtype != torch.float16 else (-24, 15)
    exponents = torch.linspace(low, high - 2, shape[0]).round()[:, None]
    w = torch.randn(shape, generator=generator, dtype=torch.float64) * torch.exp2(exponents.double())
    w[:, ::7] = 0.0
    w[:, 3::11] = -0.0
    largest = torch.finfo(dtype).max
    return w.clamp_(-largest, largest).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (9, 1), (1, 37), (40, 33)], ids=str)
def test_ptpc_equals_oracle(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = weights(shape, dtype)
    data, scale = FORMATS["ptpc_fp8"].quantize(weight)
    codes, scales = oracle(weight, 1, shape[1])
    np.testing.assert_array_equal(scale.numpy(), scales)
    np.testing.assert_array_equal(data.view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (128, 1), (129, 130), (5, 257)], ids=str)
def test_per_block_equals_oracle(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = weights(shape, dtype)
    data, scale = FORMATS["per_block_fp8"].quantize(weight)
    codes, scales = oracle(weight, 128, 128)
    np.testing.assert_array_equal(scale.numpy(), scales)
    np.testing.assert_array_equal(data.view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("name", ["ptpc_fp8", "per_block_fp8"])
def test_every_code_round_trips(name: str) -> None:
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)
    row = torch.tensor([float(decode(int(c))) for c in codes]) * torch.where(codes == 128, -1.0, 1.0)
    # per block: the 448 that makes the scale 1 must be in each of the two blocks, and so are its 127 codes.
    row = torch.cat((row[:127], row[126:127], row[127:]))
    expected = torch.cat((codes[:127], codes[126:127], codes[127:]))
    data, scale = FORMATS[name].quantize(row[None])
    assert (scale == 1).all()
    assert torch.equal(data.view(torch.uint8)[0], expected)
    back = FORMATS[name].dequantize(data, scale, (1, row.numel()))[0]
    assert torch.equal(back.view(torch.int32), row.view(torch.int32))


def test_every_half_is_rounded_to_the_nearest_code() -> None:
    """float16 has every half-way case between two codes, and the values beside it."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.abs() <= 448]
    data, scale = FORMATS["ptpc_fp8"].quantize(halves[None])
    assert scale.item() == 1
    assert data.view(torch.uint8)[0].tolist() == [nearest(float(x)) for x in halves]


def test_scale_is_never_subnormal_and_zero_rows_have_scale_one() -> None:
    weight = torch.tensor([[2.0**-149, -(2.0**-149)], [0.0, -0.0], [2.0**-126, 2.0**-127]])
    data, scale = FORMATS["ptpc_fp8"].quantize(weight)
    assert scale.flatten().tolist() == [2.0**-126, 1.0, 2.0**-126]
    # 2^-149 / 2^-126 = 2^-23 rounds to zero, with its sign; 2^-126 and 2^-127 become 1 and 0.5.
    assert data.view(torch.uint8).tolist() == [[0x00, 0x80], [0x00, 0x80], [0x38, 0x30]]


def test_largest_float32_saturates_instead_of_turning_into_nan() -> None:
    largest = torch.finfo(torch.float32).max
    weight = torch.tensor([[largest, -largest, largest / 2]])
    for name in ("ptpc_fp8", "per_block_fp8"):
        data, _ = FORMATS[name].quantize(weight)
        assert data.float().tolist() == [[448.0, -448.0, 224.0]]


def test_a_ragged_block_uses_only_the_elements_it_has() -> None:
    weight = torch.ones(130, 130)
    weight[:, 128:] = 4.0
    weight[128:] = 16.0
    weight[128:, 128:] = 64.0
    data, scale = FORMATS["per_block_fp8"].quantize(weight)
    assert torch.equal(scale, torch.tensor([[1.0, 4.0], [16.0, 64.0]]) / 448)
    assert (data.float() == 448).all()


@pytest.mark.parametrize(("name", "rows", "cols"), [("ptpc_fp8", 1, 260), ("per_block_fp8", 128, 128)])
def test_dequantize_is_code_times_scale(name: str, rows: int, cols: int) -> None:
    weight = weights((140, 260), torch.float32)
    data, scale = FORMATS[name].quantize(weight)
    back = FORMATS[name].dequantize(data, scale, (140, 260)).numpy()
    table = np.array([float(decode(code)) for code in range(256)], np.float32)
    tiled = np.repeat(np.repeat(scale.numpy(), rows, 0), cols, 1)[:140, :260]
    np.testing.assert_array_equal(back, table[data.view(torch.uint8).numpy()] * tiled)
