"""A quantized linear layer: shapes of its parameters, and numbers that are its parts' own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from requant.formats import FORMATS, quantize
from requant.formats.base import Format
from requant.layers.linear import Linear, Part

CPU = torch.device("cpu")
ROWS = (130, 20, 128)


def _activation(x: Tensor, format: Format) -> Tensor:
    """What the design says of activations, by way of the weights' own quantizer: float32 x as the GEMM sees it."""
    if format.activation is None:
        return x.float()
    if format.activation == "fp8_per_token":
        return quantize(x, "ptpc_fp8").dequantize()
    k = x.shape[1]
    groups = F.pad(x, (0, -k % 128)).reshape(-1, 128)
    return quantize(groups, "ptpc_fp8").dequantize().view(x.shape[0], -1)[:, :k]


def _fill(layer: Linear, matrices: list[Tensor], format: Format) -> None:
    row = scale_row = 0
    for matrix in matrices:
        data, scale = format.quantize(matrix)
        layer.weight.data[row : row + data.shape[0]] = data
        layer.weight_scale.data[scale_row : scale_row + scale.shape[0]] = scale
        row, scale_row = row + data.shape[0], scale_row + scale.shape[0]
    assert (row, scale_row) == (layer.weight.shape[0], layer.weight_scale.shape[0])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [256, 200])
def test_parameters(name, k):
    format = FORMATS[name]
    layer = Linear("qkv_proj", k, [Part(str(i), rows) for i, rows in enumerate(ROWS)])
    layer.build(format, torch.bfloat16, CPU)
    assert (layer.weight.dtype, layer.weight_scale.dtype) == (format.data_dtype, format.scale_dtype)
    assert not layer.weight.requires_grad
    assert sum(p.nbytes for p in layer.parameters()) == sum(format.nbytes(rows, k) for rows in ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [256, 200])
@pytest.mark.parametrize("name", FORMATS)
def test_forward_has_the_numbers_of_each_part(name, k, dtype):
    format = FORMATS[name]
    matrices = [torch.randn(rows, k, dtype=dtype) / 8 for rows in ROWS]
    layer = Linear("qkv_proj", k, [Part(str(i), rows, bias=i == 1) for i, rows in enumerate(ROWS)])
    layer.build(format, dtype, CPU)
    _fill(layer, matrices, format)
    bias = torch.randn(20, dtype=dtype)
    layer.bias.data[130:150] = bias
    layer.finish()
    x = torch.randn(3, 7, k, dtype=dtype)
    flat = _activation(x.flatten(0, 1), format)
    want = [F.linear(flat, quantize(matrix, name).dequantize()).to(dtype) for matrix in matrices]
    want[1] = want[1] + bias
    got = layer(x)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got, torch.cat(want, dim=1).view(3, 7, -1), rtol=1e-5 + torch.finfo(dtype).eps, atol=1e-5
    )


def test_building_again_in_another_format_leaves_nothing_behind():
    layer = Linear("o_proj", 64, [Part("o_proj", 32)])
    layer.build(FORMATS["mxfp4"], torch.float32, CPU)
    layer.build(None, torch.float32, CPU)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert layer.weight.shape == (32, 64)
