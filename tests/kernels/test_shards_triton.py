"""What kernels do for a shard: scales that begin before it, windows of zeros, others' experts, magnitudes compared.

On a GPU every case runs; without one, the small cases run under Triton's interpreter, in a process of its own
(``TRITON_INTERPRET`` must be set before Triton is imported): this file is that process's program.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from requant_tensors import quantize_stack
from requant_triton import check_small_cases, nan_empty
from torch import Tensor

from requant.formats import FORMATS, QuantizedStack, QuantizedTensor
from requant.kernels import lookup, reference
from requant.kernels.activation import quantize_activation
from requant.kernels.experts import UNQUANTIZED, ExpertWeights
from requant.kernels.experts_reference import experts as reference_experts

gpu = pytest.mark.gpu
FP32 = torch.float32
NAMES = [UNQUANTIZED, *FORMATS]
# Inner features of a rank, columns of zeros before them and behind them.
WINDOWS = [(96, 32, 0), (40, 0, 24), (25, 7, 96), (192, 64, 0)]
# Experts, the ones that are here, choices a token.
HERE = [(5, range(2, 4), 2), (8, range(0, 1), 8), (8, range(5, 8), 1), (6, range(0, 6), 3)]


def skipping(n: int, k: int, skipped: int) -> QuantizedTensor:
    """Rows ``skipped`` to ``skipped + n`` of a ``per_block_fp8`` matrix, with the scales of every block they touch."""
    format = FORMATS["per_block_fp8"]
    weight = torch.randn(skipped + n + 40, k) * torch.randn(skipped + n + 40, 1).exp()
    codes, scale = format.quantize(weight)
    first, last = skipped // 128, -(-(skipped + n) // 128)
    return QuantizedTensor(codes[skipped : skipped + n], scale[first:last], format, (n, k), (n,), (skipped % 128,))


def check_skipped(parts: list[tuple[int, int]], k: int, device: str) -> None:
    """Parts (rows, skipped) of a linear layer: the kernel gives what their dequantized values do."""
    torch.manual_seed(0)
    shards = [skipping(n, k, skipped) for n, skipped in parts]
    weight = QuantizedTensor(
        torch.cat([shard.data for shard in shards]).to(device),
        torch.cat([shard.scale for shard in shards]).to(device),
        FORMATS["per_block_fp8"],
        (sum(n for n, _ in parts), k),
        tuple(n for n, _ in parts),
        tuple(skipped for _, skipped in parts),
    )
    x = torch.randn(5, k).to(device)
    got = lookup("linear", "per_block_fp8", "cuda")(weight, FP32)(x)
    values = torch.cat([shard.dequantize() for shard in shards]).to(device)
    codes, scale = quantize_activation(x, "fp8_1x128")
    wanted = codes.float() * scale.repeat_interleave(128, 1)[:, :k] @ values.t()
    assert ((got - wanted).norm() / wanted.norm()) < 1e-5


def check_row_max(name: str, device: str) -> None:
    """A shard of the columns with the magnitudes of the whole row: the codes are those of the whole row."""
    torch.manual_seed(0)
    format, k = FORMATS[name], 256
    weight = torch.randn(48, k)
    x = torch.randn(3, k) * torch.tensor([0.1, 1, 9])[:, None]
    x[:, 200] *= 50
    total = torch.zeros(3, 48)
    for half in (slice(0, 128), slice(128, 256)):
        q = QuantizedTensor(*(t.to(device) for t in format.quantize(weight[:, half].contiguous())), format, (48, 128))
        group = 128 if format.activation == "fp8_1x128" else k

        def whole(amax: Tensor, half: slice = half, group: int = group) -> Tensor:
            rows = x if group == k else x[:, half]
            assert amax.shape == (3, 1)
            assert (amax.cpu() <= rows.abs().amax(1, keepdim=True)).all()
            return rows.abs().amax(1, keepdim=True).to(amax.device)

        make = lookup("linear", name, "cuda")
        part = make(q, FP32, whole)(x[:, half].to(device)).cpu()
        same = make(q, FP32, lambda amax: amax)(x[:, half].to(device)).cpu()
        assert torch.equal(same, make(q, FP32)(x[:, half].to(device)).cpu())
        codes, scale = quantize_activation(x, format.activation or "")
        scale = scale[:, [half.start // 128]] if group == 128 else scale
        wanted = (codes.float()[:, half] * scale) @ q.dequantize().cpu().t()
        assert ((part - wanted).norm() / wanted.norm()) < 1e-5
        total += part
    assert total.isfinite().all()


def make_experts(name: str, e: int, hidden: int, inner: int, width: int, lead: int) -> ExpertWeights:
    w13, w2 = torch.randn(e, 2 * inner, hidden) / hidden**0.5, torch.randn(e, hidden, inner) / inner**0.5
    if name == UNQUANTIZED:
        return ExpertWeights(w13, w2, None, None, "silu", True)
    w2 = F.pad(w2, (lead, width - lead - inner))
    stacks = quantize_stack(w13, (inner, inner), name), quantize_stack(w2, (hidden,), name)
    return ExpertWeights(*stacks, None, None, "silu", True, lead=lead)


def move(weights: ExpertWeights, device: str) -> ExpertWeights:
    def one(w: Tensor | QuantizedStack) -> Tensor | QuantizedStack:
        if isinstance(w, Tensor):
            return w.to(device)
        return replace(w, data=w.data.to(device), scale=w.scale.to(device))

    return replace(weights, w13=one(weights.w13), w2=one(weights.w2))


def check_window(name: str, inner: int, lead: int, behind: int, device: str) -> None:
    """The inner features stand between zeros, and the result is the reference's."""
    torch.manual_seed(0)
    weights = make_experts(name, 4, 64, inner, lead + inner + behind, lead)
    x, ids, scores = torch.randn(9, 64), torch.rand(9, 4).topk(2).indices, torch.rand(9, 2)
    wanted = reference_experts(weights, FP32)(x, ids, scores)
    plain = replace(weights, w2=narrowed(weights, inner), lead=0)
    assert (reference_experts(plain, FP32)(x, ids, scores) - wanted).norm() / wanted.norm() < 3e-2
    for row_max in (None, lambda amax: amax):
        with mock.patch.object(torch, "empty", nan_empty):
            forward = lookup("experts", name, "cuda")(move(weights, device), FP32, row_max)
            got = forward(x.to(device), ids.to(device), scores.to(device)).cpu()
        assert ((got - wanted).norm() / wanted.norm()) < 3e-3


def narrowed(weights: ExpertWeights, inner: int) -> Tensor | QuantizedStack:
    """w2 without its window: quantized anew, so only about equal."""
    if isinstance(weights.w2, Tensor):
        return weights.w2
    values = weights.w2.dequantize()[:, :, weights.lead : weights.lead + inner].contiguous()
    return quantize_stack(values, (values.shape[1],), weights.w2.format.name)


def check_here(name: str, e: int, here: range, choices: int, device: str) -> None:
    """Pairs of other ranks' experts count as exactly zero, and nothing that was not written is read."""
    torch.manual_seed(0)
    whole = make_experts(name, e, 64, 48, 48, 0)
    cut = slice(here.start, here.stop)

    def some(w: Tensor | QuantizedStack) -> Tensor | QuantizedStack:
        return w[cut] if isinstance(w, Tensor) else replace(w, data=w.data[cut], scale=w.scale[cut])

    weights = replace(whole, w13=some(whole.w13), w2=some(whole.w2), here=here if len(here) < e else None)
    for tokens in (1, 40 if device == "cuda" else 11):
        x, ids = torch.randn(tokens, 64), torch.rand(tokens, e).topk(choices).indices
        scores = torch.rand(tokens, choices)
        local = (ids >= here.start) & (ids < here.stop)
        wanted = reference_experts(whole, FP32)(x, ids, scores * local)
        with mock.patch.object(torch, "empty", nan_empty):
            forward = lookup("experts", name, "cuda")(move(weights, device), FP32)
            got = forward(x.to(device), ids.to(device), scores.to(device)).cpu()
        assert torch.equal(got[~local.any(1)], torch.zeros_like(got[~local.any(1)]))
        assert (got - wanted).norm() <= 3e-3 * wanted.norm()
        assert (reference_experts(weights, FP32)(x, ids, scores) - wanted).norm() <= 1e-6 * wanted.norm()


def check_all(device: str, few: int | None = None) -> None:
    """Every case; or, since the interpreter is slow, the first ``few`` of a kind."""
    check_skipped([(64, 100)], 256, device)
    check_skipped([(130, 1), (30, 127), (128, 0)], 200, device)
    for name in ("ptpc_fp8", "per_block_fp8"):
        check_row_max(name, device)
    for name in NAMES:
        for window in WINDOWS[:few]:
            check_window(name, *window, device)
        for e, here, choices in HERE[:few]:
            check_here(name, e, here, choices, device)


def test_rows_of_scales() -> None:
    pytest.importorskip("triton")
    from requant.kernels.triton.linear import scale_rows

    assert scale_rows((192,), (96,)).tolist() == [0] * 32 + [1] * 128 + [2] * 32
    assert scale_rows((10, 130), (127, 0)).tolist() == [0] + [1] * 9 + [2] * 128 + [3] * 2
    assert scale_rows((192, 64)).tolist() == [0] * 128 + [1] * 64 + [2] * 64


@pytest.mark.parametrize("skipped", [0, 1, 64, 127, 128, 200])
def test_a_shard_within_a_block_is_dequantized_with_its_scales(skipped: int) -> None:
    torch.manual_seed(0)
    shard = skipping(150, 70, skipped)
    forward = reference.linear(shard, FP32)
    first = shard.dequantize()[: 128 - skipped % 128]
    expected = shard.data[: len(first)].float() * shard.scale[0, 0]
    assert torch.equal(first, expected)
    assert torch.equal(forward.weight, shard.dequantize())


def test_small_cases_under_the_interpreter() -> None:
    check_small_cases(__file__)


@gpu
def test_every_case_on_a_gpu() -> None:
    check_all("cuda")


if __name__ == "__main__":
    check_all("cpu", few=1)
    print("all passed")
