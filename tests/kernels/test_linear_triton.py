"""Linear layers and activation quantization in Triton, against the torch reference.

On a GPU every case runs; without one, the small cases run under Triton's interpreter, in a process of its own
(``TRITON_INTERPRET`` must be set before Triton is imported): this file is that process's program.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from requant_triton import check_small_cases, nan_empty
from torch import Tensor

from requant.formats import FORMATS, QuantizedTensor, quantize
from requant.kernels import reference
from requant.kernels.activation import quantize_activation

gpu = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# BF16 and FP16: what rounding the result costs, and the FP8 matrix units' short sums. FP32: exact products.
TOLERANCE = {BF16: 5e-3, FP16: 2e-3, FP32: 1e-5}


class Case(NamedTuple):
    """M tokens, the rows of a fused layer's parts, K."""

    format: str
    dtype: torch.dtype
    m: int
    parts: tuple[int, ...]
    k: int


SMALL = [
    Case(name, dtype, m, parts, k)
    for name in FORMATS
    for dtype, m, parts, k in [
        (FP32, 1, (48,), 576),
        (FP32, 3, (40, 24), 100),
        (FP32, 17, (192, 64, 64), 288),
        (FP16, 5, (130, 1), 130),
        (FP16, 70, (128, 24), 256),
        (FP32, 130, (33,), 96),
    ]
]
LARGE = [
    Case(name, dtype, m, parts, k)
    for name in FORMATS
    for dtype, tokens in [(BF16, (1, 3, 17, 64, 65, 300)), (FP32, (1, 17, 65, 300)), (FP16, (3, 65))]
    for m in tokens
    for parts, k in [
        ((576, 192, 192), 576),
        ((1000,), 1536),
        ((960,), 100),
        ((256, 640), 640),
        ((5120,), 2048),
    ]
]
KINDS = ["fp8_per_token", "fp8_1x128"]
ACTIVATIONS = [(m, k, dtype) for m, k in [(3, 100), (1, 576), (2, 1536)] for dtype in (BF16, FP16, FP32)]


def factory(name: str) -> Callable[[QuantizedTensor, torch.dtype], Callable[[Tensor], Tensor]]:
    from requant.kernels.triton import linear

    return {"ptpc_fp8": linear.linear_ptpc, "per_block_fp8": linear.linear_per_block, "mxfp4": linear.linear_mxfp4}[
        name
    ]


def make_weight(case: Case) -> QuantizedTensor:
    """A fused layer on the CPU, with rows of very different size."""
    n = sum(case.parts)
    weight = torch.randn(n, case.k) * torch.randn(n, 1).exp() / case.k**0.5
    parts = [quantize(part, case.format) for part in weight.split(list(case.parts))]
    data, scale = (torch.cat([getattr(part, field) for part in parts]) for field in ("data", "scale"))
    return QuantizedTensor(data, scale, FORMATS[case.format], (n, case.k), case.parts)


def make_x(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Tokens of very different size, with outliers, on the CPU."""
    x = torch.randn(m, k) * torch.randn(m, 1).exp()
    x[:, :: max(k // 3, 1)] *= 20
    return x.to(dtype)


def move(weight: QuantizedTensor, device: str) -> QuantizedTensor:
    return replace(weight, data=weight.data.to(device), scale=weight.scale.to(device))


def error(actual: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error; NaN if anything is NaN."""
    return float((actual.cpu().double() - wanted.double()).norm() / wanted.double().norm())


def check_linear(case: Case, device: str) -> None:
    """The factory's forward against the reference's, both from the same codes."""
    torch.manual_seed(0)
    weight, x = make_weight(case), make_x(case.m, case.k, case.dtype)
    forward = factory(case.format)(move(weight, device), case.dtype)
    with mock.patch.object(torch, "empty", nan_empty):
        y = forward(x.to(device))
    assert y.dtype == case.dtype
    assert y.shape == (case.m, sum(case.parts))
    found = error(y, reference.linear(weight, FP32)(x))
    assert found <= TOLERANCE[case.dtype], f"{case}: relative error {found:.1e}"


def check_activation(kind: str, m: int, k: int, dtype: torch.dtype, device: str) -> None:
    """Bit for bit, with rows of zeros, subnormals and the largest values."""
    from requant.kernels.triton.activation import quantize_groups, quantize_tokens

    torch.manual_seed(0)
    info = torch.finfo(dtype)
    # The interpreter reads a subnormal BF16 as zero.
    smallest = 1.0 if device == "cpu" and dtype == BF16 else info.smallest_normal / 8
    extremes = torch.zeros(4, k)
    extremes[1:] = torch.tensor([[smallest], [info.max], [1.0]]) * torch.rand(3, k)
    x = torch.cat([make_x(m, k, dtype), extremes.to(dtype)])
    run = quantize_tokens if kind == "fp8_per_token" else quantize_groups
    with mock.patch.object(torch, "empty", nan_empty):
        q, scale = run(x.to(device))
    wanted_q, wanted_scale = quantize_activation(x, kind)
    assert torch.equal(q.view(torch.uint8).cpu(), wanted_q.view(torch.uint8))
    assert torch.equal(scale.cpu(), wanted_scale)


def check_overflow(name: str, m: int, dtype: torch.dtype, device: str) -> None:
    """A token of NaN is one behind the layer, and one of Inf too where inputs are quantized; no other token changes."""
    torch.manual_seed(0)
    weight, x = make_weight(Case(name, dtype, m, (64,), 160)), make_x(m, 160, dtype).to(device)
    forward = factory(name)(move(weight, device), dtype)
    wanted = forward(x)
    x[1, 5], x[3] = torch.nan, torch.inf
    got = forward(x)
    others = [row for row in range(m) if row not in (1, 3)]
    assert torch.equal(got[others], wanted[others])
    assert got[1].isnan().all()
    assert not got[3].isfinite().any()


def check_every_mxfp4_value(dtype: torch.dtype, device: str, k: int) -> None:
    """One-hot tokens read the dequantized weight off: exactly, for every code and exponent that is finite.

    BF16 leaves out the smallest exponents, whose products are subnormal: matrix units may round those away.
    """
    exponents = torch.arange(8 if dtype == BF16 else 0, 253, dtype=torch.uint8)
    n, groups = len(exponents), k // 32
    codes = torch.arange(n)[:, None] * 7 + torch.arange(k)[None, :]
    data = ((codes[:, 1::2] % 16) * 16 + codes[:, ::2] % 16).to(torch.uint8)
    scale = exponents[:, None].expand(n, groups).contiguous()
    weight = QuantizedTensor(data, scale, FORMATS["mxfp4"], (n, k))
    y = factory("mxfp4")(move(weight, device), dtype)(torch.eye(k, dtype=dtype, device=device))
    assert torch.equal(y.cpu(), weight.dequantize(dtype).t())


def test_small_cases_under_the_interpreter() -> None:
    check_small_cases(__file__)


def test_scale_rows_begin_anew_with_every_part() -> None:
    pytest.importorskip("triton")
    from requant.kernels.triton.linear import scale_rows

    assert scale_rows((192, 64, 128)).tolist() == [0] * 128 + [1] * 64 + [2] * 64 + [3] * 128


@gpu
@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"{c.format}-{str(c.dtype)[6:]}-{c.m}-{sum(c.parts)}-{c.k}")
def test_linear_equals_the_reference(case: Case) -> None:
    check_linear(case, "cuda")


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "k", "dtype"), [*ACTIVATIONS, (65, 4096, BF16), (2, 16400, BF16), (300, 12288, FP32)])
def test_activations_equal_the_reference_bit_for_bit(kind: str, m: int, k: int, dtype: torch.dtype) -> None:
    check_activation(kind, m, k, dtype, "cuda")


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("m", [5, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_a_token_that_overflowed_changes_no_other(name: str, m: int, dtype: torch.dtype) -> None:
    check_overflow(name, m, dtype, "cuda")


@gpu
@pytest.mark.parametrize("k", [64, 160], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_every_mxfp4_value_is_exact(dtype: torch.dtype, k: int) -> None:
    check_every_mxfp4_value(dtype, "cuda", k)


@gpu
@pytest.mark.parametrize("name", FORMATS)
def test_fp8_codes_without_fp8_units(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from requant.kernels.triton import linear

    monkeypatch.setattr(linear, "capability_of", lambda device: (8, 0))
    for m in (3, 300):
        check_linear(Case(name, BF16, m, (256, 128), 576), "cuda")


@gpu
@pytest.mark.parametrize("m", [1, 64, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_a_captured_forward_follows_its_input(name: str, m: int) -> None:
    torch.manual_seed(0)
    case = Case(name, BF16, m, (256, 128), 640)
    weight = make_weight(case)
    forward = factory(name)(move(weight, "cuda"), BF16)
    x = torch.zeros(m, case.k, dtype=BF16, device="cuda")
    forward(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward(x)
    for _ in range(3):
        fresh = make_x(m, case.k, BF16)
        x.copy_(fresh)
        y.fill_(float("nan"))
        graph.replay()
        assert error(y, reference.linear(weight, FP32)(fresh)) <= TOLERANCE[BF16]


@gpu
@pytest.mark.parametrize("name", FORMATS)
def test_no_tokens_and_strided_tokens(name: str) -> None:
    torch.manual_seed(0)
    weight = move(make_weight(Case(name, BF16, 5, (256,), 576)), "cuda")
    forward = factory(name)(weight, BF16)
    assert forward(torch.empty(0, 576, dtype=BF16, device="cuda")).shape == (0, 256)
    wide = make_x(5, 700, BF16).cuda()
    assert torch.equal(forward(wide[:, :576]), forward(wide[:, :576].contiguous()))


if __name__ == "__main__":
    # The interpreter computes with the bits of bfloat16, not its values: the other dtypes stand in for it.
    for small in SMALL:
        check_linear(small, "cpu")
    for small_kind in KINDS:
        for shape in ACTIVATIONS:
            check_activation(small_kind, *shape, "cpu")
    for small_name in FORMATS:
        check_overflow(small_name, 5, FP32, "cpu")
    for small_k in (64, 160):
        check_every_mxfp4_value(FP32, "cpu", small_k)
    print("all passed")
