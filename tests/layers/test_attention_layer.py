"""What an attention layer writes into its cache, and where."""

import pytest
import torch

from requant.layers.attention import Attention
from requant.layers.attention_batch import AttentionBatch


def _bound(dtype: torch.dtype = torch.float32) -> Attention:
    layer = Attention(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)
    layer.kv_cache = torch.zeros(layer.kv_cache_shape(3, 4), dtype=dtype)
    return layer


def test_cache_shape_has_one_page_more_and_the_bytes_of_a_token():
    layer = Attention(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)
    assert layer.kv_cache_shape(10, 16) == (2, 11, 16, 2, 8)
    assert layer.kv_cache_bytes_per_token(torch.bfloat16) == 2 * 2 * 8 * 2
    assert layer.kv_cache_bytes_per_token(torch.float32) == 2 * 2 * 8 * 4


def test_writes_each_token_to_its_slot_and_padding_to_no_usable_page():
    layer = _bound()
    k, v = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    slots = torch.tensor([9, 2, -1, 5, -1])
    batch = AttentionBatch(
        query_start=torch.arange(6, dtype=torch.int32),
        context_lens=torch.tensor([2, 3, 1, 2, 1], dtype=torch.int32),
        block_tables=torch.tensor([[2], [0], [0], [1], [0]], dtype=torch.int32),
        slots=slots,
        max_query=1,
        max_context=3,
    )
    out = layer(torch.randn(5, 4, 8), k, v, batch)
    assert out.shape == (5, 32)
    keys, values = (cache.flatten(0, 1)[:12] for cache in layer.kv_cache)
    want_keys, want_values = torch.zeros(12, 2, 8), torch.zeros(12, 2, 8)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want_keys[slot], want_values[slot] = k[token], v[token]
    torch.testing.assert_close(keys, want_keys, rtol=0, atol=0)
    torch.testing.assert_close(values, want_values, rtol=0, atol=0)


def test_a_token_sees_itself():
    layer = _bound(torch.bfloat16)
    q, k, v = (torch.randn(1, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    one = torch.ones(1, dtype=torch.int32)
    start = torch.tensor([0, 1], dtype=torch.int32)
    batch = AttentionBatch(start, one, torch.ones(1, 1, dtype=torch.int32), torch.tensor([4]), 1, 1)
    want = v.repeat_interleave(2, dim=1).flatten(1)
    torch.testing.assert_close(layer(q, k, v, batch), want, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_other_slots_and_padding():
    cuda = torch.device("cuda")
    layer = Attention(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
    layer.kv_cache = torch.zeros(layer.kv_cache_shape(4, 16), dtype=torch.bfloat16, device=cuda)
    q, k, v = (torch.randn(2, heads, 64, device=cuda).bfloat16() for heads in (4, 2, 2))
    batch = AttentionBatch(
        query_start=torch.arange(3, dtype=torch.int32, device=cuda),
        context_lens=torch.ones(2, dtype=torch.int32, device=cuda),
        block_tables=torch.tensor([[0], [1]], dtype=torch.int32, device=cuda),
        slots=torch.tensor([0, 16], device=cuda),
        max_query=1,
        max_context=1,
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(q, k, v, batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(q, k, v, batch)
    layer.kv_cache.zero_()
    batch.slots.copy_(torch.tensor([32, -1]))
    batch.block_tables.copy_(torch.tensor([[2], [0]]))
    batch.context_lens.copy_(torch.tensor([1, 0]))
    k.normal_()
    v.normal_()
    graph.replay()
    torch.cuda.synchronize()
    keys, values = (cache.flatten(0, 1)[:64] for cache in layer.kv_cache)
    assert keys.any(-1).any(-1).nonzero().flatten().tolist() == [32]
    torch.testing.assert_close((keys[32], values[32]), (k[0], v[0]), rtol=0, atol=0)
    torch.testing.assert_close(out[0], v[0].repeat_interleave(2, dim=0).flatten(), rtol=0, atol=0)
