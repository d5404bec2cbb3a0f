"""What a decoder does between its matrix products, in Triton against plain torch: norms, rotation, cache, routing.

On a GPU every case runs; without one, the small cases run under Triton's interpreter, in a process of its own
(``TRITON_INTERPRET`` must be set before Triton is imported): this file is that process's program.
"""

from unittest import mock

import pytest
import torch
from requant_triton import check_small_cases, nan_empty
from torch import Tensor

from requant.kernels import norm_reference, rotary_reference, routing_reference
from requant.layers.routing import Routing

gpu = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ULPS = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}
# Rows, features: below, at and above powers of two.
NORMS = [(1, 64), (3, 96), (5, 1000), (2, 2048)]
# Tokens, query heads, key/value heads, head size, rotated features.
HEADS = [(1, 4, 2, 32, 32), (5, 3, 1, 48, 48), (3, 8, 8, 64, 32), (4, 2, 2, 20, 10)]
ROUTINGS = [
    Routing(8, 2, renormalize=True),
    Routing(128, 8, renormalize=True),
    Routing(60, 4, scaling=2.5),
    Routing(7, 7),
    Routing(64, 6, groups=8, top_groups=3, group_score=1, scaling=16.0),
    Routing(256, 8, scoring="sigmoid", renormalize=True, scaling=2.5, groups=8, top_groups=4, group_score=2),
    Routing(16, 4, scoring="sigmoid", renormalize=True, groups=4, top_groups=2, group_score=2),
    Routing(15, 3, scoring="sigmoid", groups=5, top_groups=2, group_score=3),
    Routing(12, 3, scoring="sigmoid", groups=4, top_groups=4),
]


def close(got: Tensor, wanted: Tensor, ulps: float = 2.0) -> bool:
    """Within some roundings of the dtype, of the larger of the value and a typical one."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    bound = ulps * ULPS[wanted.dtype] * (wanted.double().abs() + wanted.double().abs().mean())
    return bool(((got.cpu().double() - wanted.double()).abs() <= bound).all())


def check_norm(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    from requant.kernels.triton.norm import rms_norm

    torch.manual_seed(0)
    wide = (torch.randn(rows, size + 24) * torch.randn(rows, 1).exp()).to(dtype)
    x, weight = wide[:, 8 : 8 + size], torch.randn(size).to(dtype)  # rows of a wider tensor
    residual = torch.randn(rows, size).to(dtype)
    for other in (None, residual):
        wanted, wanted_total = norm_reference.rms_norm(x, weight, 1e-6, other)
        with mock.patch.object(torch, "empty", nan_empty):
            moved = None if other is None else other.to(device)
            got, total = rms_norm(wide.to(device)[:, 8 : 8 + size], weight.to(device), 1e-6, moved)
        assert torch.equal(total.cpu(), wanted_total), "the sum is rounded once"
        assert close(got, wanted)
    # More than two dimensions, not contiguous: heads of a projection.
    three = wide[:, : size // 4 * 4].unflatten(1, (4, -1))
    got, _ = rms_norm(three.to(device), weight[: size // 4].to(device), 1e-6)
    assert close(got, norm_reference.rms_norm(three, weight[: size // 4], 1e-6)[0])


def check_heads(
    tokens: int, num_heads: int, kv_heads: int, size: int, rotated: int, normed: bool, dtype: torch.dtype, device: str
) -> None:
    from requant.kernels.triton.rotary import heads

    torch.manual_seed(0)
    qkv = (torch.randn(tokens, num_heads + 2 * kv_heads, size) * 3).to(dtype)
    norms = (torch.randn(size).to(dtype), torch.randn(size).to(dtype)) if normed else None
    angles = torch.rand(tokens, 1, rotated // 2) * 6
    rope = angles.cos().to(dtype), angles.sin().to(dtype)
    block, pages = 4, 8
    slots = torch.randperm(block * (pages - 1))[:tokens]
    if tokens > 2:
        slots[1] = -1  # the padding of a CUDA graph
    caches = [torch.zeros(2, pages, block, kv_heads, size, dtype=dtype) for _ in range(2)]
    wanted = rotary_reference.heads(qkv, num_heads, norms, 1e-6, rope, *caches[0].unbind(0), slots)
    cache = caches[1].to(device)
    moved = None if norms is None else tuple(weight.to(device) for weight in norms)
    with mock.patch.object(torch, "empty", nan_empty):
        got = heads(
            qkv.to(device),
            num_heads,
            moved,
            1e-6,
            tuple(t.to(device) for t in rope),
            *cache.unbind(0),
            slots.to(device),
        )
    assert close(got, wanted, 3)
    cache = cache.cpu()
    cache[:, -1] = caches[0][:, -1] = 0  # the spare page, where the reference puts what goes nowhere
    assert close(cache[0], caches[0][0], 3)
    assert torch.equal(cache[1], caches[0][1]), "values are copied"


def check_route(rule: Routing, tokens: int, dtype: torch.dtype, device: str) -> None:
    from requant.kernels.triton.routing import route

    torch.manual_seed(rule.num_experts)
    logits = (torch.randn(tokens, rule.num_experts) * 2).to(dtype)
    if dtype != FP32:  # equal scores are chosen in any order: here there are none
        logits = torch.stack([torch.randperm(rule.num_experts) for _ in range(tokens)])
        logits = ((logits - rule.num_experts // 2) / 32).to(dtype)
    for bias in (None, torch.randn(rule.num_experts) * 0.5 if rule.scoring == "sigmoid" else None):
        wanted, wanted_weights = routing_reference.route(logits, bias, rule)
        moved = None if bias is None else bias.to(device)
        with mock.patch.object(torch, "empty", nan_empty):
            got, weights = route(logits.to(device), moved, rule)
        assert got.dtype == torch.int64
        assert torch.equal(got.cpu(), wanted)
        assert torch.allclose(weights.cpu(), wanted_weights, rtol=1e-5, atol=1e-7)


def check_route_of_what_is_not_finite(rule: Routing, device: str) -> None:
    """Experts that exist, each once, for the sequence that overflowed; nothing changes for the others."""
    from requant.kernels.triton.routing import route

    logits = torch.randn(6, rule.num_experts)
    plain, _ = route(logits.to(device), None, rule)
    logits[1] = float("nan")
    logits[2, 0] = float("nan")
    logits[3] = float("inf")
    logits[4] = -float("inf")
    got, _ = route(logits.to(device), None, rule)
    assert int(got.min()) >= 0
    assert int(got.max()) < rule.num_experts
    assert all(len(set(row)) == rule.top_k for row in got.tolist())
    assert torch.equal(got[[0, 5]], plain[[0, 5]])


def test_small_cases_under_the_interpreter() -> None:
    check_small_cases(__file__)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("rows", "size"), [*NORMS, (9000, 2048), (300, 7168)])
def test_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    check_norm(rows, size, dtype, "cuda")


@gpu
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("sizes", [*HEADS, (27, 32, 4, 128, 128)])
def test_heads(sizes: tuple[int, ...], dtype: torch.dtype, normed: bool) -> None:
    check_heads(*sizes, normed, dtype, "cuda")


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("rule", ROUTINGS, ids=lambda rule: f"{rule.num_experts}-{rule.top_k}-{rule.groups}")
def test_route(rule: Routing, dtype: torch.dtype) -> None:
    for tokens in (1, 300):
        check_route(rule, tokens, dtype, "cuda")
    check_route_of_what_is_not_finite(rule, "cuda")


if __name__ == "__main__":
    # The interpreter computes with the bits of bfloat16, not its values: the other dtypes stand in for it.
    for small_dtype in (FP16, FP32):
        for shape in NORMS:
            check_norm(*shape, small_dtype, "cpu")
        for shape in HEADS:
            for with_norms in (True, False):
                check_heads(*shape, with_norms, small_dtype, "cpu")
    for small_rule in ROUTINGS:
        for small_dtype in (FP16, FP32):
            check_route(small_rule, 5, small_dtype, "cpu")
        check_route_of_what_is_not_finite(small_rule, "cpu")
    print("all passed")
