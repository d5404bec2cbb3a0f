"""Between and behind the products of a fused MoE in Triton: the roundings that the contract fixes, bit for bit.

On a GPU every case runs; without one, the small cases run under Triton's interpreter, in a process of its own
(``TRITON_INTERPRET`` must be set before Triton is imported): this file is that process's program.
"""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from requant_triton import check_small_cases, nan_empty
from torch import Tensor

from requant.kernels.activation import quantize_activation

gpu = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ULPS = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-21}
KINDS = ["fp8_per_token", "fp8_1x128"]
# Rows, inner size: below, at, above and between multiples of 128.
SHAPES = [(1, 96), (3, 128), (5, 192), (2, 768), (4, 1000)]
COMBINES = [(1, 1, 64), (3, 2, 200), (5, 8, 1030)]


def make(rows: int, inner: int, dtype: torch.dtype) -> Tensor:
    """Gate and up of very different size, a row of zeros, and gates that saturate on both sides."""
    torch.manual_seed(0)
    y = torch.randn(rows + 2, 2 * inner) * torch.randn(rows + 2, 1).exp()
    y[rows] = 0
    y[rows + 1, :inner] = torch.linspace(-300, 300, inner)
    return y.to(dtype)


def check_silu(rows: int, inner: int, dtype: torch.dtype, device: str) -> None:
    """In float32, rounded once."""
    from requant.kernels.triton.moe_elementwise import silu_mul

    y = make(rows, inner, dtype)
    with mock.patch.object(torch, "empty", nan_empty):
        got = silu_mul(y.to(device)).cpu()
    gate, up = y.double().chunk(2, dim=-1)
    wanted = F.silu(gate) * up
    assert (got.dtype, got.shape) == (dtype, (rows + 2, inner))
    # Below a gate of -88 its exponential overflows and the result is 0, as torch's own is: off by 1e-36 at most.
    smallest = max(torch.finfo(dtype).smallest_normal, 1e-35)
    # A GPU takes the exponential of a rounded product with log2(e): off in proportion to the gate.
    relative = ULPS[dtype] * 1.01 + gate.abs() * 2.0**-22
    assert ((got.double() - wanted).abs() <= wanted.abs() * relative + smallest).all()


def check_gated(rows: int, inner: int, dtype: torch.dtype, device: str) -> None:
    """Of a dense MLP: the same kernel for silu, torch for anything else."""
    from requant.kernels.triton.moe_elementwise import gated, silu_mul

    y = make(rows, inner, dtype).to(device)
    assert torch.equal(gated(y, "silu"), silu_mul(y))
    wide = torch.cat([y, y], dim=1)[:, : 2 * inner]  # rows of a wider tensor
    assert torch.equal(gated(wide, "swish"), silu_mul(y))
    gate, up = y.cpu().chunk(2, dim=-1)
    assert torch.allclose(gated(y, "gelu").cpu(), F.gelu(gate) * up, rtol=1e-2, atol=1e-3)


def check_quantized_silu(kind: str, rows: int, inner: int, dtype: torch.dtype, device: str) -> None:
    """The codes and scales of what the unquantized kernel stores: the value is rounded before it is quantized."""
    from requant.kernels.triton.moe_elementwise import silu_mul, silu_mul_quantize

    y = make(rows, inner, dtype).to(device)
    with mock.patch.object(torch, "empty", nan_empty):
        codes, scale = silu_mul_quantize(y, kind)
    wanted_codes, wanted_scale = quantize_activation(silu_mul(y).cpu(), kind)
    assert torch.equal(codes.view(torch.uint8).cpu(), wanted_codes.view(torch.uint8))
    assert torch.equal(scale.cpu(), wanted_scale)


def check_combine(tokens: int, choices: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    """In the order of the choices in float32, rounded once; weights are powers of two, so that products are exact."""
    from requant.kernels.triton.moe_elementwise import combine

    torch.manual_seed(0)
    y = (torch.randn(tokens * choices, hidden) * torch.randn(tokens * choices, 1).mul(2).exp()).to(dtype)
    weights = 2.0 ** -torch.randint(0, 5, (tokens, choices)).float()
    with mock.patch.object(torch, "empty", nan_empty):
        got = combine(y.to(device), weights.to(device)).cpu()
    wanted = torch.zeros(tokens, hidden)
    for choice in range(choices):
        wanted += y.view(tokens, choices, hidden)[:, choice].float() * weights[:, choice, None]
    assert torch.equal(got, wanted.to(dtype))


def test_small_cases_under_the_interpreter() -> None:
    check_small_cases(__file__)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("rows", "inner"), [*SHAPES, (5000, 768), (300, 6000)])
def test_silu_is_rounded_once(rows: int, inner: int, dtype: torch.dtype) -> None:
    check_silu(rows, inner, dtype, "cuda")


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("rows", "inner"), SHAPES)
def test_a_dense_mlp_gates_with_the_same_kernel(rows: int, inner: int, dtype: torch.dtype) -> None:
    check_gated(rows, inner, dtype, "cuda")


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("rows", "inner"), [*SHAPES, (5000, 768), (300, 6000)])
def test_quantized_silu_is_that_of_the_rounded_value(rows: int, inner: int, dtype: torch.dtype, kind: str) -> None:
    check_quantized_silu(kind, rows, inner, dtype, "cuda")


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("tokens", "choices", "hidden"), [*COMBINES, (16384, 8, 512), (3000, 4, 7168)])
def test_choices_are_summed_in_order(tokens: int, choices: int, hidden: int, dtype: torch.dtype) -> None:
    check_combine(tokens, choices, hidden, dtype, "cuda")


if __name__ == "__main__":
    # The interpreter computes with the bits of bfloat16, not its values: the other dtypes stand in for it.
    for small_dtype in (FP16, FP32):
        for shape in SHAPES:
            check_silu(*shape, small_dtype, "cpu")
            check_gated(*shape, small_dtype, "cpu")
            for small_kind in KINDS:
                check_quantized_silu(small_kind, *shape, small_dtype, "cpu")
        for sizes in COMBINES:
            check_combine(*sizes, small_dtype, "cpu")
    print("all passed")
