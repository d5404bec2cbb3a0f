"""The torch rows of the kernel table: quantize into a caller's buffers, and the CPU's linear layer."""

import pytest
import torch
from torch import Tensor

from requant.formats import FORMATS, QuantizedTensor, quantize
from requant.kernels import layout_bytes, lookup
from requant.kernels.activation import dequantize_activation, quantize_activation


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_quantize_fills_views_of_a_parameter(name: str) -> None:
    """The rows of one part of a fused layer; its neighbours are left alone."""
    format = FORMATS[name]
    weight = random((130, 200), 0, torch.bfloat16)
    expected = quantize(weight, name)
    data = torch.zeros((140, expected.data.shape[1]), dtype=format.data_dtype)
    scale = torch.zeros((expected.scale.shape[0] + 2, expected.scale.shape[1]), dtype=format.scale_dtype)
    lookup("quantize", name, "cpu")(format, weight, data[4:134], scale[1:-1])
    codes = data.view(torch.uint8)
    assert torch.equal(codes[4:134], expected.data.view(torch.uint8))
    assert torch.equal(scale[1:-1], expected.scale)
    assert not codes[:4].any()
    assert not codes[134:].any()
    assert not scale[0].any()
    assert not scale[-1].any()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m", [0, 1, 5])
def test_linear_multiplies_what_was_quantized(name: str, m: int) -> None:
    """Against float64: the product of the dequantized weight and the dequantized activations."""
    weight = quantize(random((70, 200), 1), name)
    x = random((m, 200), 2, torch.bfloat16)
    y = lookup("linear", name, "cpu")(weight, torch.bfloat16)(x)
    kind = weight.format.activation
    seen = x.float() if kind is None else dequantize_activation(*quantize_activation(x, kind), kind)
    expected = seen.double() @ weight.dequantize().double().T
    assert y.dtype == torch.bfloat16
    assert y.shape == (m, 70)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("name", ["ptpc_fp8", "per_block_fp8"])
def test_activations_are_really_quantized(name: str) -> None:
    """An input between two codes comes out as the code: 448 and 1.03 give 448 and 1."""
    weight = quantize(torch.eye(2), name)
    y = lookup("linear", name, "cpu")(weight, torch.float32)(torch.tensor([[448.0, 1.03]]))
    torch.testing.assert_close(y, torch.tensor([[448.0, 1.0]]), rtol=1e-6, atol=0)


def test_mxfp4_leaves_activations_alone() -> None:
    weight = quantize(torch.eye(2), "mxfp4")
    y = lookup("linear", "mxfp4", "cpu")(weight, torch.float32)(torch.tensor([[448.0, 1.03]]))
    assert torch.equal(y, torch.tensor([[448.0, 1.03]]))


@pytest.mark.parametrize("name", FORMATS)
def test_linear_of_a_fused_layer_is_its_parts(name: str) -> None:
    parts = [quantize(random((n, 64), n), name) for n in (130, 6)]
    fused = QuantizedTensor(
        torch.cat([p.data.view(torch.uint8) for p in parts]).view(parts[0].data.dtype),
        torch.cat([p.scale for p in parts]),
        parts[0].format,
        (136, 64),
        (130, 6),
    )
    x = random((3, 64), 3)
    forward = lookup("linear", name, "cpu")
    expected = torch.cat([forward(p, torch.float32)(x) for p in parts], 1)
    torch.testing.assert_close(forward(fused, torch.float32)(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_linear_owns_the_bytes_that_the_plan_counts(name: str) -> None:
    layer = lookup("linear", name, "cpu")(quantize(random((70, 200), 1), name), torch.bfloat16)
    assert layer.nbytes == layout_bytes(torch.device("cpu"), 70, 200)
    assert layer.weight.dtype == torch.float32


def test_the_table_refuses_an_unknown_op() -> None:
    with pytest.raises(KeyError, match=r"no kernel for op 'conv'; the table has .*'linear', 'quantize'"):
        lookup("conv", "ptpc_fp8", "cpu")
