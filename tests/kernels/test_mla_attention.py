"""Latent attention in plain torch: values are the first features of the keys, against dense float64 arithmetic."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from requant.kernels.attention_batch import AttentionBatch
from requant.kernels.table import lookup

PAGE, SCALE = 16, 0.07

# (new tokens, context including them) of each sequence.
BATCHES = {
    "decode": [(1, 1), (1, 17), (1, 300), (1, 64)],
    "prefill": [(1, 1), (2, 2), (33, 33), (100, 100)],
    "chunks": [(3, 40), (20, 300), (16, 32)],
    "mixed": [(1, 300), (7, 7), (1, 1), (4, 129), (1, 31)],
}
WIDTHS = [(64, 32), (512, 64)]
HEADS = [4, 16, 128]

Sequences = Sequence[tuple[int, int]]


def batch_of(sequences: Sequences, tables: Tensor) -> AttentionBatch:
    """A step of these sequences, whose pages are the rows of ``tables``."""
    new, lens = [n for n, _ in sequences], [length for _, length in sequences]
    return AttentionBatch(
        query_start=torch.tensor([0, *new]).cumsum(0).int(),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=tables,
        slots=torch.zeros(sum(new), dtype=torch.int64),
        max_query=max(new),
        max_context=max(lens),
    )


def make(sequences: Sequences, heads: int, latent: int, rope: int) -> tuple[Tensor, Tensor, AttentionBatch]:
    """Queries, a cache whose pages lie in random order, and the batch."""
    generator = torch.Generator().manual_seed(0)
    pages = [-(-length // PAGE) for _, length in sequences]
    order = (torch.randperm(sum(pages), generator=generator) + 1).int()
    tables = torch.zeros(len(pages), max(pages) + 1, dtype=torch.int32)
    for row, own in zip(tables, order.split(pages), strict=True):
        row[: len(own)] = own
    cache = torch.randn(sum(pages) + 2, PAGE, 1, latent + rope, generator=generator)
    q = torch.randn(sum(new for new, _ in sequences), heads, latent + rope, generator=generator)
    return q, cache, batch_of(sequences, tables)


def dense(q: Tensor, cache: Tensor, latent: int, sequences: Sequences, batch: AttentionBatch) -> Tensor:
    """softmax(q · keysᵀ) · keys[:, :latent] of every query over what stands before it, in float64."""
    out, start = [], 0
    for table, (new, length) in zip(batch.block_tables, sequences, strict=True):
        keys = cache[table.long()].flatten(0, 1)[:length, 0].double()
        scores = torch.einsum("qhd,kd->hqk", q[start : start + new].double(), keys) * SCALE
        behind = torch.ones(new, length, dtype=torch.bool).triu(length - new + 1)
        weights = scores.masked_fill(behind, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,kd->qhd", weights, keys[:, :latent]))
        start += new
    return torch.cat(out)


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> Tensor:
    return lookup("attention", "*", "cpu")(q, k_cache, v_cache, batch, SCALE, None)


@pytest.mark.parametrize("shared", [True, False], ids=["view", "copy"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("latent", "rope"), WIDTHS)
@pytest.mark.parametrize("name", BATCHES)
def test_equals_dense_arithmetic(name: str, latent: int, rope: int, heads: int, shared: bool) -> None:
    q, cache, batch = make(BATCHES[name], heads, latent, rope)
    values = cache[..., :latent]
    got = attend(q, cache, values if shared else values.clone(), batch)
    assert got.dtype == q.dtype
    # Rounded once, from float64: half a unit in the last place of float32.
    wanted = dense(q, cache, latent, BATCHES[name], batch)
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.double(), wanted, rtol=2.0**-23, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BATCHES)
def test_half_precision_is_close(name: str, dtype: torch.dtype) -> None:
    q, cache, batch = make(BATCHES[name], 16, 64, 32)
    q, cache = q.to(dtype), cache.to(dtype)
    got = attend(q, cache, cache[..., :64], batch)
    assert got.dtype == dtype
    wanted = dense(q, cache, 64, BATCHES[name], batch)
    assert (got.double() - wanted).norm() <= (5e-3 if dtype == torch.bfloat16 else 1e-3) * wanted.norm()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("latent", "rope"), WIDTHS)
@pytest.mark.parametrize("name", BATCHES)
def test_a_sequence_is_the_same_alone_bit_for_bit(name: str, latent: int, rope: int, heads: int) -> None:
    q, cache, batch = make(BATCHES[name], heads, latent, rope)
    together = attend(q, cache, cache[..., :latent], batch)
    for b, (start, stop) in enumerate(pairwise(batch.query_start.tolist())):
        alone = batch_of(BATCHES[name][b : b + 1], batch.block_tables[b : b + 1])
        assert torch.equal(attend(q[start:stop], cache, cache[..., :latent], alone), together[start:stop])


@pytest.mark.parametrize("shared", [True, False], ids=["view", "copy"])
@pytest.mark.parametrize("name", BATCHES)
def test_scores_are_never_held_whole(name: str, shared: bool) -> None:
    """The library's fallback holds the scores of all heads and queries, and a copy of the keys for every head."""
    q, cache, batch = make(BATCHES[name], 4, 64, 32)
    values = cache[..., :64]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # anything else raises
        got = attend(q, cache, values if shared else values.clone(), batch)
    assert torch.equal(got, attend(q, cache, values, batch))


def test_padding_gives_zeros() -> None:
    q, cache, batch = make([(1, 20), (1, 0)], 4, 64, 32)
    out = attend(q, cache, cache[..., :64], batch)
    assert out[0].all()
    assert not out[1].any()


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_one_cache_is_written_through_two_views(kv_heads: int) -> None:
    cache = torch.zeros(3, 4, kv_heads, 96)
    latent, rope = torch.randn(4, kv_heads, 64), torch.randn(4, kv_heads, 32)
    slots = torch.tensor([5, -1, 0, 3])
    lookup("kv_write", "*", "cpu")(latent, rope, cache[..., :64], cache[..., 64:], slots)
    wanted = torch.zeros(12, kv_heads, 96)
    wanted[slots] = torch.cat([latent, rope], -1)
    assert torch.equal(cache.flatten(0, 1), wanted)
