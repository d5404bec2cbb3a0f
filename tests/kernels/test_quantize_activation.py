"""Activations are quantized with the arithmetic of the weights: a token is a row, a group a block of one row."""

import pytest
import torch

from requant.formats import FORMATS
from requant.kernels.activation import dequantize_activation, quantize_activation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (1, 576), (7, 130)], ids=str)
def test_per_token_is_ptpc_of_the_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    data, scale = quantize_activation(x, "fp8_per_token")
    expected, scales = FORMATS["ptpc_fp8"].quantize(x)
    assert scale.shape == (shape[0], 1)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, scales)


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (1, 576), (7, 130), (3, 128)], ids=str)
def test_1x128_is_per_token_of_each_group(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    data, scale = quantize_activation(x, "fp8_1x128")
    groups = [quantize_activation(columns, "fp8_per_token") for columns in x.split(128, 1)]
    assert data.shape == shape
    assert torch.equal(scale, torch.cat([s for _, s in groups], 1))
    assert torch.equal(data.view(torch.uint8), torch.cat([d.view(torch.uint8) for d, _ in groups], 1))


def test_tokens_do_not_see_each_other() -> None:
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(2))
    for kind in ("fp8_per_token", "fp8_1x128"):
        together = quantize_activation(x, kind)
        alone = [quantize_activation(x[i : i + 1], kind) for i in range(5)]
        assert torch.equal(together[0].float(), torch.cat([d.float() for d, _ in alone]))
        assert torch.equal(together[1], torch.cat([s for _, s in alone]))


def test_dequantized_is_code_times_scale() -> None:
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(3))
    data, scale = quantize_activation(x, "fp8_1x128")
    back = dequantize_activation(data, scale, "fp8_1x128")
    for row in range(3):
        for column in (0, 127, 128, 199):
            assert back[row, column] == data[row, column].float() * scale[row, column // 128]
    data, scale = quantize_activation(x, "fp8_per_token")
    assert torch.equal(dequantize_activation(data, scale, "fp8_per_token"), data.float() * scale)
