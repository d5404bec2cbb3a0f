"""Paged attention against a plain softmax over each query's own keys, in float64."""

import math

import pytest
import torch
from torch import Tensor

from requant.kernels.attention_batch import AttentionBatch
from requant.kernels.table import lookup

BLOCK, PAGES, DIM = 4, 32, 8


def batch_of(queries: list[int], lens: list[int]) -> AttentionBatch:
    free = iter((torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(3)) + 1).tolist())
    tables = torch.zeros(len(lens), max(-(-n // BLOCK) for n in lens) + 1, dtype=torch.int32)
    for b, length in enumerate(lens):
        for page in range(-(-length // BLOCK)):
            tables[b, page] = next(free)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    slots = torch.zeros(sum(queries), dtype=torch.int64)
    return AttentionBatch(starts, torch.tensor(lens, dtype=torch.int32), tables, slots, max(queries), max(lens))


def naive(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, window: int) -> Tensor:
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[2]
    for b, length in enumerate(batch.context_lens.tolist()):
        first, last = batch.query_start[b].item(), batch.query_start[b + 1].item()
        for token in range(first, last):
            position = length - (last - token)
            seen = range(max(0, position + 1 - window), position + 1)
            where = [(batch.block_tables[b, p // BLOCK].item(), p % BLOCK) for p in seen]
            for head in range(q.shape[1]):
                keys = torch.stack([k_cache[page, slot, head // group] for page, slot in where]).double()
                values = torch.stack([v_cache[page, slot, head // group] for page, slot in where]).double()
                out[token, head] = torch.softmax(keys @ q[token, head].double() * scale, 0) @ values
    return out


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize(
    ("queries", "lens"),
    [
        ([1, 1, 1], [1, 9, 16]),
        ([5, 12], [5, 12]),
        ([3, 7], [11, 20]),
        ([1, 6, 1, 2], [13, 6, 4, 9]),
        ([1, 0, 2], [3, 8, 2]),
        ([1, 0, 1], [3, 8, 2]),
        ([1], [17]),
    ],
    ids=["decode", "prefill", "chunks", "mixed", "idle", "idle-decode", "one"],
)
def test_equals_plain_softmax(queries, lens, heads, kv_heads, window):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(queries), heads, DIM, generator=generator)
    k_cache, v_cache = torch.randn(2, PAGES, BLOCK, kv_heads, DIM, generator=generator).unbind(0)
    batch, scale = batch_of(queries, lens), 1 / math.sqrt(DIM)
    got = lookup("attention", "*", "cpu")(q, k_cache, v_cache, batch, scale, window)
    assert got.shape == q.shape
    want = naive(q, k_cache, v_cache, batch, scale, window or 10**9)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_scale_is_the_callers():
    q, k_cache, v_cache = torch.ones(1, 1, DIM), torch.randn(PAGES, BLOCK, 1, DIM), torch.randn(PAGES, BLOCK, 1, DIM)
    batch = batch_of([1], [6])
    attend = lookup("attention", "*", "cpu")
    pages = batch.block_tables[0, :2].long()
    mean = v_cache[pages].flatten(0, 1)[:6].mean(0)
    torch.testing.assert_close(attend(q, k_cache, v_cache, batch, 0.0, None)[0], mean)
    assert not torch.allclose(attend(q, k_cache, v_cache, batch, 1.0, None)[0], mean)


def test_padding_of_a_decode_batch_gives_zeros():
    q, (k_cache, v_cache) = torch.randn(2, 1, DIM), torch.randn(2, PAGES, BLOCK, 1, DIM)
    out = lookup("attention", "*", "cpu")(q, k_cache, v_cache, batch_of([1, 1], [6, 0]), 1.0, None)
    assert out[0].all()
    torch.testing.assert_close(out[1], torch.zeros(1, DIM), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_cache_stays_finite(dtype: torch.dtype) -> None:
    k, v = torch.ones(2, 3, 1, 2, dtype=dtype)
    k[1, 0, 0], v[1, 0, 1], v[2, 0, 0] = torch.nan, torch.inf, -torch.inf
    caches = torch.zeros(2, 2, 4, 1, 2, dtype=dtype)
    lookup("kv_write", "*", "cpu")(k, v, *caches, torch.tensor([0, 2, 1]))
    assert caches[0].flatten(0, 1)[:3, 0].tolist() == [[1, 1], [1, 1], [0, 1]]
    assert caches[1].flatten(0, 1)[:3, 0].tolist() == [[1, 1], [0, 1], [1, 0]]
