"""Paged attention and the cache write in Triton, against the torch reference in float32.

On a GPU every case runs; without one, the small cases run under Triton's interpreter, in a process of its own
(``TRITON_INTERPRET`` must be set before Triton is imported): this file is that process's program.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from requant_triton import check_small_cases, nan_empty
from torch import Tensor

from requant.kernels.attention_batch import AttentionBatch
from requant.kernels.attention_reference import attention as reference

gpu = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@dataclass(frozen=True)
class Case:
    """Sequences as (new tokens, context including them), and the shape of the heads.

    ``rest`` features more have only keys and queries; the others of a key are the value (latent attention).
    """

    sequences: Sequence[tuple[int, int]]
    heads: tuple[int, int] = (8, 2)
    dim: int = 64
    page: int = 16
    window: int | None = None
    rest: int = 0

    @property
    def scale(self) -> float:
        return (self.dim + self.rest) ** -0.5


SMALL = {
    "prefill": Case([(5, 5), (1, 33), (20, 70)], heads=(6, 2)),
    "prefill, window, odd head": Case([(5, 5), (1, 33), (20, 70)], heads=(3, 3), dim=80, page=8, window=9),
    "prefill with padding": Case([(7, 7), (1, 0)], dim=32),
    "decode": Case([(1, 40), (1, 1), (1, 300)]),
    "decode, window, odd group": Case([(1, 40), (1, 1), (1, 300)], heads=(9, 3), dim=96, window=50),
    "decode, unsplit": Case([(1, 7)] * 40, heads=(8, 8), dim=32),
    "decode with padding": Case([(1, 130), (1, 0)], dim=128),
    "latent prefill": Case([(5, 5), (1, 33), (20, 40)], heads=(4, 1), rest=32),
    "latent prefill, odd sizes": Case([(3, 30), (9, 9)], heads=(20, 1), dim=40, rest=12, page=8),
    "latent decode": Case([(1, 40), (1, 1), (1, 0), (1, 200)], heads=(4, 1), rest=32),
    "latent decode, many heads": Case([(1, 70), (1, 3)], heads=(80, 1), dim=32, rest=8),
    "latent decode, two key heads": Case([(1, 20), (1, 3)], heads=(6, 2), dim=32, rest=16),
    "latent decode, wide": Case([(1, 40), (1, 3)], heads=(20, 1), dim=512, rest=64),
    "latent prefill, two key heads": Case([(3, 20), (5, 5)], heads=(6, 2), dim=32, rest=16),
    "latent prefill, wide": Case([(2, 40), (3, 3)], heads=(20, 1), dim=512, rest=64),
}
LARGE = {
    "mixed": Case([(700, 1500), (1, 2000), (129, 129), (1, 1)], heads=(32, 4), dim=128),
    "mixed, SmolLM heads": Case([(300, 300), (1, 77), (64, 640)], heads=(9, 3)),
    "mixed, window": Case([(300, 300), (1, 777), (64, 640)], heads=(16, 8), dim=96, window=128),
    "mixed, wide heads": Case([(65, 300), (3, 77)], heads=(8, 1), dim=256),
    "mixed, many heads share a key": Case([(65, 300), (3, 77)], heads=(71, 1)),
    "decode 1": Case([(1, 1152)], heads=(32, 4), dim=128),
    "decode 16": Case([(1, 1152 - 61 * i) for i in range(16)], heads=(32, 4), dim=128),
    "decode 128": Case([(1, 1 + 9 * i) for i in range(128)], heads=(32, 4), dim=128, page=32),
    "decode, wide heads": Case([(1, 500), (1, 3)], heads=(16, 2), dim=256),
    "decode, no group": Case([(1, 500), (1, 64)], heads=(12, 12), dim=80),
    "latent mixed, DeepSeek-V3": Case([(200, 700), (1, 2000), (129, 129)], heads=(128, 1), dim=512, rest=64),
    "latent mixed, DeepSeek-V2-Lite": Case([(65, 300), (3, 77), (1, 5)], heads=(16, 1), dim=512, rest=64),
    "latent decode 1, DeepSeek-V3": Case([(1, 1152)], heads=(128, 1), dim=512, rest=64),
    "latent decode 32, DeepSeek-V3": Case([(1, 1 + 37 * i) for i in range(32)], heads=(128, 1), dim=512, rest=64),
    "latent decode 32, DeepSeek-V2-Lite": Case([(1, 2000 - 60 * i) for i in range(32)], (16, 1), 512, rest=64),
}


def make(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionBatch]:
    """(q, k, v, k_cache, v_cache, batch): older tokens are in the cache, this step's k and v are not yet.

    Slots that no sequence owns are NaN, and pages lie in random order.
    """
    kv_heads = case.heads[1]
    pages = [-(-context // case.page) for _, context in case.sequences]
    order = (torch.randperm(sum(pages)) + 1).tolist()
    table = torch.zeros(len(pages), max(pages) + 2, dtype=torch.int32)
    shape = (sum(pages) + 1, case.page, kv_heads, case.dim + case.rest)
    k_cache, v_cache = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    slots: list[int] = []
    for b, (new, context) in enumerate(case.sequences):
        mine = torch.tensor(order[: pages[b]], dtype=torch.int64)
        del order[: pages[b]]
        table[b, : pages[b]] = mine
        all_slots = (mine[:, None] * case.page + torch.arange(case.page)).flatten()[:context]
        for cache in (k_cache, v_cache):
            cache.flatten(0, 1)[all_slots] = torch.randn(context, *shape[2:])
        slots += all_slots[context - new :].tolist() if context else [-1] * new
    starts = torch.tensor([0] + [new for new, _ in case.sequences]).cumsum(0)
    tokens = int(starts[-1])
    q, k, v = (torch.randn(tokens, heads, shape[3]) for heads in (case.heads[0], kv_heads, kv_heads))
    batch = AttentionBatch(
        query_start=starts.int().to(device),
        context_lens=torch.tensor([context for _, context in case.sequences], dtype=torch.int32, device=device),
        block_tables=table.to(device),
        slots=torch.tensor(slots, device=device),
        max_query=max(new for new, _ in case.sequences),
        max_context=max(context for _, context in case.sequences),
    )
    q, k, v, k_cache, v_cache = (t.to(device, dtype) for t in (q, k, v, k_cache, v_cache))
    return q, k, v, k_cache, v_cache, batch


def expected(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
    """The reference on the CPU in float32, zero where a sequence has no context."""
    on_cpu = replace(
        batch,
        query_start=batch.query_start.cpu(),
        context_lens=batch.context_lens.cpu(),
        block_tables=batch.block_tables.cpu(),
        slots=batch.slots.cpu(),
    )
    caches = (cache.float().cpu().nan_to_num() for cache in (k_cache, v_cache))
    out = reference(q.float().cpu(), *caches, on_cpu, q.shape[2] ** -0.5, window)
    for b in (on_cpu.context_lens == 0).nonzero().flatten().tolist():
        out[on_cpu.query_start[b] : on_cpu.query_start[b + 1]] = 0
    return out


def error(actual: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error; NaN if anything is NaN."""
    return float((actual.float().cpu() - wanted).norm() / wanted.norm())


def check(case: Case, dtype: torch.dtype, device: str) -> None:
    """Write the step's keys and values, attend, and compare both with the reference."""
    from requant.kernels.triton.attention import attention
    from requant.kernels.triton.kv_write import kv_write

    torch.manual_seed(0)
    q, k, v, k_cache, v_cache, batch = make(case, dtype, device)
    if case.rest:
        v_cache = k_cache[..., : case.dim]
        k, v = k.split([case.dim, case.rest], dim=-1)
        written = v_cache, k_cache[..., case.dim :]
    else:
        written = k_cache, v_cache
    caches = []
    for new, cache in zip((k, v), written, strict=True):
        caches.append(cache.clone())
        caches[-1].flatten(0, 1)[batch.slots[batch.slots >= 0]] = new[batch.slots >= 0]
    kv_write(k, v, *written, batch.slots)
    for cache, wanted in zip(written, caches, strict=True):
        torch.testing.assert_close(cache, wanted, rtol=0, atol=0, equal_nan=True)

    with mock.patch.object(torch, "empty", nan_empty):
        out = attention(q, k_cache, v_cache, batch, case.scale, case.window)
    assert out.dtype == dtype
    assert out.shape == (*q.shape[:2], case.dim)
    found = error(out, expected(q, k_cache, v_cache, batch, case.window))
    assert found <= TOLERANCE[dtype], f"{case}, {dtype}: relative error {found:.1e}"


def test_small_cases_under_the_interpreter() -> None:
    check_small_cases(__file__)


def test_splits_fill_the_device_and_none_is_empty() -> None:
    pytest.importorskip("triton")
    from requant.kernels.triton.attention_decode import splits_for

    assert splits_for(1, 4, 1152, 64) == 16  # 18 steps of 64
    assert splits_for(16, 4, 1152, 64) == 4
    assert splits_for(128, 4, 131072, 64) == 1
    assert splits_for(1, 1, 131072, 64) == 64
    assert splits_for(1, 8, 1, 64) == 1


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_attention_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    check((SMALL | LARGE)[name], dtype, "cuda")


@gpu
def test_inputs_may_be_slices_of_one_projection() -> None:
    from requant.kernels.triton.attention import attention
    from requant.kernels.triton.kv_write import kv_write

    case = LARGE["mixed, SmolLM heads"]
    q, k, v, k_cache, v_cache, batch = make(case, torch.bfloat16, "cuda")
    fused = torch.cat([q, k, v], 1)
    heads, kv_heads = case.heads
    q2, k2, v2 = fused.split([heads, kv_heads, kv_heads], 1)
    other_k, other_v = k_cache.clone(), v_cache.clone()
    kv_write(k, v, k_cache, v_cache, batch.slots)
    kv_write(k2, v2, other_k, other_v, batch.slots)
    assert torch.equal(k_cache.nan_to_num(), other_k.nan_to_num())
    assert torch.equal(v_cache.nan_to_num(), other_v.nan_to_num())
    plain, sliced = (attention(x, k_cache, v_cache, batch, 0.125, None) for x in (q, q2))
    assert torch.equal(plain, sliced)


@gpu
def test_a_captured_decode_step_follows_the_lengths_it_finds() -> None:
    from requant.kernels.triton.attention import attention
    from requant.kernels.triton.kv_write import kv_write

    torch.manual_seed(0)
    captured = Case([(1, 2048)] * 4, heads=(32, 4), dim=128)
    q, k, v, k_cache, v_cache, batch = make(captured, torch.bfloat16, "cuda")

    def step() -> Tensor:
        kv_write(k, v, k_cache, v_cache, batch.slots)
        return attention(q, k_cache, v_cache, batch, captured.dim**-0.5, None)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([1, 17, 2048, 0], [1500, 0, 64, 65], [2, 3, 4, 5]):
        case = replace(captured, sequences=[(1, n) for n in lengths])
        fresh = make(case, torch.bfloat16, "cuda")
        for old, new in zip((q, k, v), fresh[:3], strict=True):
            old.copy_(new)
        for old, new in zip((k_cache, v_cache), fresh[3:5], strict=True):
            old.fill_(float("nan"))[: new.shape[0]] = new
        batch.block_tables.zero_()[:, : fresh[5].block_tables.shape[1]] = fresh[5].block_tables
        batch.context_lens.copy_(fresh[5].context_lens)
        batch.slots.copy_(fresh[5].slots)
        out.fill_(float("nan"))
        graph.replay()
        assert error(out, expected(q, k_cache, v_cache, batch, None)) <= TOLERANCE[torch.bfloat16]


if __name__ == "__main__":
    # The interpreter computes with the bits of bfloat16, not its values: the other dtypes stand in for it.
    small = [(case, dtype) for case in SMALL.values() for dtype in (torch.float32, torch.float16)]
    for small_case, small_dtype in small:
        check(small_case, small_dtype, "cpu")
    print("all passed")
