"""Latent attention and its projections, against heads that are computed one by one."""

import pytest
import torch

from requant.errors import CheckpointError
from requant.formats import FORMATS, quantize
from requant.kernels.attention_batch import AttentionBatch
from requant.layers.attention import LatentAttention
from requant.layers.latent import LatentProjection

CPU = torch.device("cpu")
HEADS, LATENT, ROPE, KEY, VALUE = 4, 32, 8, 12, 10


def projection(format=None, dtype=torch.float32):
    layer = LatentProjection("kv_b_proj", HEADS, LATENT, KEY, VALUE)
    weight = torch.randn(HEADS * (KEY + VALUE), LATENT, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer.build(format, dtype, CPU)
    if format is None:
        layer.weight.data.copy_(weight)
    else:
        q = quantize(weight, format.name)
        layer.weight.data.copy_(q.data)
        layer.weight_scale.data.copy_(q.scale)
        weight = q.dequantize(dtype)
    layer.finish()
    return layer, weight.view(HEADS, KEY + VALUE, LATENT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [None, *FORMATS.values()])
def test_projections_use_the_dequantized_values(format, dtype):
    layer, weight = projection(format, dtype)
    q, out = torch.randn(5, HEADS, KEY, dtype=dtype), torch.randn(5, HEADS, LATENT, dtype=dtype)
    for head in range(HEADS):
        keys, values = weight[head].split([KEY, VALUE])
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(layer.absorb(q)[:, head], q[:, head] @ keys, **tolerance)
        torch.testing.assert_close(layer.expand(out)[:, head], out[:, head] @ values.T, **tolerance)
    assert layer.activation(format) is None
    assert layer.layout_bytes(format, dtype, CPU) == (weight.nbytes if format else 0)


def test_dequantized_values_beyond_the_dtype_are_refused():
    layer = LatentProjection("kv_b_proj", HEADS, LATENT, KEY, VALUE)
    q = quantize(torch.full((HEADS * (KEY + VALUE), LATENT), 1e5), "ptpc_fp8")
    for dtype in (torch.bfloat16, torch.float16):
        layer.build(FORMATS["ptpc_fp8"], dtype, CPU)
        layer.weight.data.copy_(q.data)
        layer.weight_scale.data.copy_(q.scale)
        if dtype == torch.bfloat16:
            layer.finish()
    with pytest.raises(CheckpointError, match=r"kv_b_proj: 2816 of 2816 dequantized values are .* \(as float16\)"):
        layer.finish()


def test_a_tokens_projection_does_not_depend_on_the_others():
    layer, _ = projection()
    q, out = torch.randn(33, HEADS, KEY), torch.randn(33, HEADS, LATENT)
    for count in (1, 2, 3, 5, 32):
        assert torch.equal(layer.absorb(q[:count]), layer.absorb(q)[:count])
        assert torch.equal(layer.expand(out[:count]), layer.expand(out)[:count])


BLOCK_SIZE = 4


def batch_of(lengths, ends, counts):
    """The ``counts[b]`` tokens before ``ends[b]`` of sequences that have pages for ``lengths[b]``, in order."""
    pages = [-(-length // BLOCK_SIZE) for length in lengths]
    tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    slots, first = [], 0
    for b, (end, count) in enumerate(zip(ends, counts, strict=True)):
        tables[b, : pages[b]] = torch.arange(first, first + pages[b], dtype=torch.int32)
        slots.append(first * BLOCK_SIZE + torch.arange(end - count, end))
        first += pages[b]
    return AttentionBatch(
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        context_lens=torch.tensor(ends, dtype=torch.int32),
        block_tables=tables,
        slots=torch.cat(slots),
        max_query=max(counts),
        max_context=max(ends),
    )


def moved(batch, device):
    return AttentionBatch(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("new", [(1, 1, 1), (7, 1, 20), (9, 5, 20)])
def test_attention_in_the_latent_space(new, device):
    """All tokens but the last ``new`` in one step, these in a second one."""
    lengths = (9, 5, 20)
    generator = torch.Generator().manual_seed(0)
    layer = LatentAttention(HEADS, LATENT, ROPE, 0.3)
    shape = layer.kv_cache_shape(16, BLOCK_SIZE)
    assert shape == (17, BLOCK_SIZE, 1, LATENT + ROPE)
    assert layer.kv_cache_bytes_per_token(torch.bfloat16) == 2 * (LATENT + ROPE)
    layer.kv_cache = torch.zeros(shape, device=device)
    tokens = [torch.randn(length, LATENT + ROPE, generator=generator) for length in lengths]
    queries = [torch.randn(length, HEADS, LATENT + ROPE, generator=generator) for length in lengths]

    def step(ends, counts):
        spans = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        q, rows = (torch.cat([x[s] for x, s in zip(all_of, spans, strict=True)]) for all_of in (queries, tokens))
        latent, rope = rows.to(device).split([LATENT, ROPE], dim=-1)
        return layer(q.to(device), latent, rope, moved(batch_of(lengths, ends, counts), device)).cpu()

    before = tuple(length - count for length, count in zip(lengths, new, strict=True))
    if any(before):
        step(before, before)
    got = step(lengths, new).split(list(new))
    for b in range(3):
        for i, position in enumerate(range(before[b], lengths[b])):
            seen = tokens[b][: position + 1].double()
            weights = (queries[b][position].double() @ seen.T * 0.3).softmax(-1)
            torch.testing.assert_close(got[b][i].double(), weights @ seen[:, :LATENT], rtol=1e-5, atol=1e-5)


def test_a_spare_page_takes_what_is_written_nowhere():
    layer = LatentAttention(HEADS, LATENT, ROPE, 0.3)
    layer.kv_cache = torch.zeros(layer.kv_cache_shape(2, BLOCK_SIZE))
    batch = batch_of((1,), (1,), (1,))
    nowhere = AttentionBatch(**{**vars(batch), "slots": torch.tensor([-1])})
    layer(torch.randn(1, HEADS, LATENT + ROPE), torch.ones(1, LATENT), torch.full((1, ROPE), torch.nan), nowhere)
    assert not layer.kv_cache[:2].any()
    assert torch.equal(layer.kv_cache[2, 3, 0], torch.cat([torch.ones(LATENT), torch.zeros(ROPE)]))
