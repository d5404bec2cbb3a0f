"""The reference of the fused MoE: against experts computed one by one in float64, and independent of the batch."""

import pytest
import torch
import torch.nn.functional as F
from requant_tensors import quantize_stack
from torch import Tensor

from requant.formats import FORMATS, QuantizedStack, quantize
from requant.kernels.activation import dequantize_activation, quantize_activation
from requant.kernels.experts import ExpertWeights
from requant.kernels.experts_reference import experts

NAMES = [None, *FORMATS]


def stack(e: int, parts: tuple[int, ...], k: int, name: str | None):
    """E matrices made of parts, as the layer holds them, and their dequantized values [E, N, K]."""
    weights = torch.randn(e, sum(parts), k) / k**0.5
    if name is None:
        return weights, weights
    pieces = [[quantize(part, name).dequantize() for part in matrix.split(list(parts))] for matrix in weights]
    return quantize_stack(weights, parts, name), torch.stack([torch.cat(matrix) for matrix in pieces])


def make(name: str | None, gated: bool = True, bias: bool = False, activation: str = "silu", sizes=(9, 100, 72)):
    """Weights of a layer, and the dequantized values of w13 and w2."""
    e, hidden, inner = sizes
    w13, values13 = stack(e, (inner, inner) if gated else (inner,), hidden, name)
    w2, values2 = stack(e, (hidden,), inner, name)
    biases = (torch.randn(e, values13.shape[1]), torch.randn(e, hidden)) if bias else (None, None)
    return ExpertWeights(w13, w2, *biases, activation, gated), values13, values2


def route(tokens: int, e: int, k: int) -> tuple[Tensor, Tensor]:
    """Every token's k different experts, and their weights."""
    ids = torch.stack([torch.randperm(e)[:k] for _ in range(tokens)]) if tokens else torch.zeros(0, k).long()
    return ids, torch.rand(tokens, k)


def one_by_one(weights: ExpertWeights, values13: Tensor, values2: Tensor, x: Tensor, ids: Tensor, scores: Tensor):
    """Each choice of each token by itself, in float64 but for the rounding that the contract wants."""
    kind = weights.w13.format.activation if isinstance(weights.w13, QuantizedStack) else None

    def given(row: Tensor) -> Tensor:
        if kind is None:
            return row.double()
        return dequantize_activation(*quantize_activation(row.float()[None], kind), kind)[0].double()

    act = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}[weights.activation]
    out = torch.zeros(len(x), values2.shape[1], dtype=torch.float64)
    for t in range(len(x)):
        for expert, score in zip(ids[t].tolist(), scores[t], strict=True):
            y = values13[expert].double() @ given(x[t])
            if weights.w13_bias is not None:
                y += weights.w13_bias[expert]
            y = act(y[: len(y) // 2]) * y[len(y) // 2 :] if weights.gated else act(y)
            z = values2[expert].double() @ given(y.float())
            if weights.w2_bias is not None:
                z += weights.w2_bias[expert]
            out[t] += score * z
    return out


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize(
    ("gated", "bias", "activation"), [(True, False, "silu"), (True, True, "gelu"), (False, True, "relu")]
)
@pytest.mark.parametrize("name", NAMES)
def test_the_weighted_sum_of_the_chosen_experts(name, gated, bias, activation, k):
    torch.manual_seed(0)
    weights, values13, values2 = make(name, gated, bias, activation)
    x, (ids, scores) = torch.randn(11, 100), route(11, 9, k)
    got = experts(weights, torch.float32)(x, ids, scores)
    wanted = one_by_one(weights, values13, values2, x, ids, scores)
    # A last-bit difference before the second quantization may move a value to the next code.
    assert (got - wanted).norm() / wanted.norm() < (2e-3 if name in ("ptpc_fp8", "per_block_fp8") else 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_tokens_result_does_not_depend_on_the_others(name):
    torch.manual_seed(0)
    weights, _, _ = make(name)
    forward = experts(weights, torch.float32)
    x, (ids, scores) = torch.randn(33, 100), route(33, 9, 3)
    whole = forward(x, ids, scores)
    for some in ([0], [32], [3, 4, 5], list(range(7)), list(range(0, 33, 2))):
        assert torch.equal(forward(x[some], ids[some], scores[some]), whole[some])
    x[5] = torch.nan
    spoilt = forward(x, ids, scores)
    others = torch.arange(33) != 5
    assert torch.equal(spoilt[others], whole[others])
    assert spoilt[5].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_experts_without_tokens_and_no_tokens_at_all(name):
    torch.manual_seed(0)
    weights, values13, values2 = make(name)
    forward = experts(weights, torch.float32)
    x, ids, scores = torch.randn(5, 100), torch.full((5, 1), 4), torch.rand(5, 1)
    wanted = one_by_one(weights, values13, values2, x, ids, scores)
    assert (forward(x, ids, scores) - wanted).norm() / wanted.norm() < 2e-3
    assert forward(x[:0], ids[:0], scores[:0]).shape == (0, 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes_are_as_close_as_their_rounding(name, dtype):
    torch.manual_seed(0)
    weights, values13, values2 = make(name)
    if name is None:
        weights = ExpertWeights(weights.w13.to(dtype), weights.w2.to(dtype), None, None, "silu", True)
        values13, values2 = weights.w13, weights.w2
    x, (ids, scores) = torch.randn(9, 100).to(dtype), route(9, 9, 3)
    got = experts(weights, dtype)(x, ids, scores)
    wanted = one_by_one(weights, values13, values2, x, ids, scores)
    assert got.dtype == dtype
    fp8 = name in ("ptpc_fp8", "per_block_fp8")
    assert (got - wanted).norm() / wanted.norm() < (0.02 if fp8 else 0.01 if dtype == torch.bfloat16 else 0.002)
