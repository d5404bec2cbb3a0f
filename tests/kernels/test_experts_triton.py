"""The fused MoE in Triton against the torch reference.

On a GPU every case runs; without one, the small cases run under Triton's interpreter, in a process of its own
(``TRITON_INTERPRET`` must be set before Triton is imported): this file is that process's program.
"""

from typing import NamedTuple
from unittest import mock

import pytest
import torch
from requant_tensors import quantize_stack
from requant_triton import check_small_cases, nan_empty
from torch import Tensor

from requant.formats import FORMATS
from requant.kernels import lookup
from requant.kernels.experts import UNQUANTIZED, ExpertWeights
from requant.kernels.experts_reference import experts as reference

gpu = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Between the products the reference and the kernels round values that differ in their last bits: with quantized
# activations some land on the next code, a sixteenth away.
TOLERANCE = {BF16: 8e-3, FP16: 3e-3, FP32: 1e-5}
TOLERANCE_FP8 = {BF16: 1.5e-2, FP16: 1e-2, FP32: 3e-3}
NAMES = [UNQUANTIZED, *FORMATS]


class Case(NamedTuple):
    """T tokens, k choices of E experts; hidden and inner size; ``only``: all tokens go to the first k experts."""

    format: str
    dtype: torch.dtype
    tokens: int
    choices: int
    experts: int
    hidden: int
    inner: int
    gated: bool = True
    bias: bool = False
    activation: str = "silu"
    only: bool = False


SMALL = [
    Case(name, dtype, *rest)
    for name in NAMES
    for dtype, *rest in [
        (FP32, 1, 1, 5, 64, 32),
        (FP32, 7, 3, 5, 100, 72, True, True),
        (FP32, 40, 2, 3, 96, 40, False, True, "gelu"),
        (FP16, 19, 4, 8, 160, 130),
        (FP32, 9, 2, 6, 64, 48, True, False, "relu", True),
        (FP32, 1, 8, 8, 40, 24),
    ]
]
LARGE = [
    Case(name, dtype, *rest)
    for name in NAMES
    for dtype, *rest in [
        (BF16, 1, 8, 128, 2048, 768),
        (BF16, 3, 1, 5, 200, 96),
        (BF16, 64, 8, 128, 2048, 768),
        (BF16, 1000, 4, 16, 256, 128),
        (BF16, 1000, 6, 64, 1000, 192, True, True),
        (BF16, 4096, 8, 32, 512, 192, True, False, "silu", True),
        (BF16, 16384, 8, 128, 512, 192),
        (BF16, 16384, 1, 5, 200, 96),
        (BF16, 1, 8, 256, 512, 256, True, True),
        (BF16, 700, 2, 9, 384, 256, False, True, "gelu"),
        (FP32, 65, 4, 16, 256, 128, True, True),
        (FP16, 300, 2, 7, 328, 136),
    ]
]


def make_stack(e: int, parts: tuple[int, ...], k: int, name: str, dtype: torch.dtype, device: str):
    """Random matrices, quantized part by part; on ``device``."""
    n = sum(parts)
    weights = (torch.randn(e, n, k) * torch.randn(e, n, 1).exp() / k**0.5).to(device)
    return weights.to(dtype) if name == UNQUANTIZED else quantize_stack(weights, parts, name)


def make(case: Case, device: str) -> tuple[ExpertWeights, Tensor, Tensor, Tensor]:
    """Weights, x, chosen experts and their weights."""
    torch.manual_seed(0)
    inputs = (case.inner, case.inner) if case.gated else (case.inner,)
    w13 = make_stack(case.experts, inputs, case.hidden, case.format, case.dtype, device)
    w2 = make_stack(case.experts, (case.hidden,), case.inner, case.format, case.dtype, device)
    biases = (None, None)
    if case.bias:
        sizes = sum(inputs), case.hidden
        biases = tuple(torch.randn(case.experts, n).to(device, case.dtype) for n in sizes)
    x = torch.randn(case.tokens, case.hidden) * torch.randn(case.tokens, 1).exp()
    ids = torch.rand(case.tokens, case.experts).topk(case.choices).indices
    if case.only:
        ids = torch.arange(case.choices).expand(case.tokens, -1).clone()
    scores = torch.rand(case.tokens, case.choices)
    weights = ExpertWeights(w13, w2, *biases, case.activation, case.gated)
    return weights, x.to(device, case.dtype), ids.to(device), scores.to(device)


def error(actual: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error; NaN if anything is NaN."""
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


def tolerance(case: Case) -> float:
    fp8 = case.format != UNQUANTIZED and FORMATS[case.format].activation
    return (TOLERANCE_FP8 if fp8 else TOLERANCE)[case.dtype]


def check(case: Case, device: str) -> None:
    weights, x, ids, scores = make(case, device)
    forward = lookup("experts", case.format, "cuda")(weights, case.dtype)
    with mock.patch.object(torch, "empty", nan_empty):
        got = forward(x, ids, scores)
    wanted = reference(weights, case.dtype)(x, ids, scores)
    assert (got.dtype, got.shape) == (case.dtype, x.shape)
    found = error(got, wanted)
    assert found <= tolerance(case), f"{case}: relative error {found:.1e}"


def check_overflow(case: Case, device: str) -> None:
    """Tokens of NaN and Inf change no other token's result, though they share its blocks."""
    weights, x, ids, scores = make(case, device)
    tokens, forward = case.tokens, lookup("experts", case.format, "cuda")(weights, case.dtype)
    wanted = forward(x, ids, scores)
    x[1] = float("nan")
    x[tokens - 2] = float("inf")
    got = forward(x, ids, scores)
    others = [t for t in range(tokens) if t not in (1, tokens - 2)]
    assert torch.equal(got[others], wanted[others])
    assert got[1].isnan().all()


def test_small_cases_under_the_interpreter() -> None:
    check_small_cases(__file__)


def test_rows_of_a_block_follow_the_pairs_of_an_expert() -> None:
    pytest.importorskip("triton")
    from requant.kernels.triton.experts import rows_of_blocks

    assert [rows_of_blocks(8 * t, 128) for t in (1, 16, 256, 300, 1024, 2048, 4096)] == [16, 16, 16, 32, 64, 128, 128]
    assert rows_of_blocks(8 * 4096, 128, most=64) == 64
    assert rows_of_blocks(1, 128) == 16


@gpu
@pytest.mark.parametrize("case", SMALL + LARGE, ids=lambda c: "-".join(map(str, c)).replace("torch.", ""))
def test_experts_equal_the_reference(case: Case) -> None:
    check(case, "cuda")


@gpu
@pytest.mark.parametrize("name", ["ptpc_fp8", "per_block_fp8"])
def test_fp8_codes_without_fp8_units(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from requant.kernels.triton import experts

    monkeypatch.setattr(experts, "capability_of", lambda device: (8, 0))
    for tokens in (3, 600):
        check(Case(name, BF16, tokens, 4, 16, 256, 128), "cuda")


@gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 40, 3000])
def test_a_captured_forward_follows_its_routing(name: str, tokens: int) -> None:
    case = Case(name, BF16, tokens, 4, 16, 256, 128)
    weights, x, ids, scores = make(case, "cuda")
    forward = lookup("experts", name, "cuda")(weights, BF16)
    forward(x, ids, scores)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward(x, ids, scores)
    plain = reference(weights, BF16)
    for _ in range(3):
        x.copy_(torch.randn(x.shape))
        ids.copy_(torch.rand(tokens, 16).topk(4).indices)
        scores.copy_(torch.rand(scores.shape))
        y.fill_(float("nan"))
        graph.replay()
        assert error(y, plain(x, ids, scores)) <= tolerance(case)


@gpu
@pytest.mark.parametrize("tokens", [50, 3000])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_token_that_overflowed_changes_no_other(name: str, dtype: torch.dtype, tokens: int) -> None:
    check_overflow(Case(name, dtype, tokens, 4, 16, 256, 128), "cuda")


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_and_strided_tokens(name: str) -> None:
    weights, x, ids, scores = make(Case(name, BF16, 5, 4, 16, 256, 128), "cuda")
    forward = lookup("experts", name, "cuda")(weights, BF16)
    assert forward(x[:0], ids[:0], scores[:0]).shape == (0, 256)
    wide = torch.cat([x, x], 1)
    assert torch.equal(forward(wide[:, :256], ids, scores), forward(x, ids, scores))


if __name__ == "__main__":
    # The interpreter computes with the bits of bfloat16, not its values: the other dtypes stand in for it.
    for small in SMALL:
        check(small, "cpu")
    for format_name in NAMES:
        check_overflow(Case(format_name, FP32, 7, 2, 3, 64, 32), "cpu")
    print("all passed")
