"""Rotary embedding against transformers' own module, every accepted type."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from requant.errors import ModelError
from requant.kernels.rotary_reference import rotate, rotate_pairs
from requant.layers.rotary import RotaryEmbedding

CPU = torch.device("cpu")
HEAD = 16

TYPES: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.25},
    "yarn ": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
    },
}


def _config(rope: dict[str, object] | None, **more: object) -> LlamaConfig:
    return LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope, **more)


def _built(config: LlamaConfig) -> RotaryEmbedding:
    rotary = RotaryEmbedding(config, HEAD)
    rotary.build(torch.bfloat16, CPU)
    return rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TYPES)
def test_equals_transformers_bit_for_bit(kind, dtype):
    config = _config({"rope_type": kind.strip(), "rope_theta": 1e4, **TYPES[kind]})
    q, k = torch.randn(200, 4, HEAD).to(dtype), torch.randn(200, 2, HEAD).to(dtype)
    positions = torch.arange(56, 256)
    cos, sin = _built(config)(positions, dtype)
    theirs = LlamaRotaryEmbedding(config)(q, positions[None])
    want_q, want_k = apply_rotary_pos_emb(q[None], k[None], *theirs, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(q, cos, sin), want_q[0], rtol=0, atol=0)
    torch.testing.assert_close(rotate(k, cos, sin), want_k[0], rtol=0, atol=0)


def test_partial_rotation_leaves_the_rest_of_a_head():
    whole = LlamaConfig(hidden_size=16, num_attention_heads=4, head_dim=4, max_position_embeddings=256)
    partial = _config({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25})
    x, positions = torch.randn(9, 3, HEAD), torch.arange(9)
    got = rotate(x, *_built(partial)(positions, x.dtype))
    small = RotaryEmbedding(whole, 4)
    small.build(torch.float32, CPU)
    torch.testing.assert_close(got[..., :4], rotate(x[..., :4], *small(positions, x.dtype)), rtol=0, atol=0)
    torch.testing.assert_close(got[..., 4:], x[..., 4:], rtol=0, atol=0)


def test_neighbours_are_rotated_as_complex_numbers():
    positions = torch.arange(3, 40)
    rotary = _built(_config(None))
    cos, sin = rotary(positions, torch.float32)
    x = torch.randn(37, 3, HEAD)
    angles = positions[:, None, None].double() * rotary.inv_freq.double()
    want = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    first, second = rotate_pairs(x, cos, sin).double().chunk(2, dim=-1)
    torch.testing.assert_close(torch.complex(first, second), want, rtol=1e-5, atol=1e-5)


def test_old_configurations_mean_the_same():
    old = _config(None, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = _config({"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0})
    torch.testing.assert_close(_built(old).inv_freq, _built(new).inv_freq, rtol=0, atol=0)
    assert _built(new).inv_freq[0] == 0.5


def test_frequencies_are_real_and_float32_whatever_the_context_and_dtype():
    with torch.device("meta"):
        rotary = RotaryEmbedding(_config(None), HEAD)
    rotary.build(torch.bfloat16, CPU)
    assert (rotary.inv_freq.dtype, rotary.inv_freq.device) == (torch.float32, CPU)
    torch.testing.assert_close(rotary.inv_freq, _built(_config(None)).inv_freq, rtol=0, atol=0)
    assert not rotary.state_dict()
    assert rotary.placements == ()


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "mrope", "rope_theta": 1e4},
            "rope type 'mrope' is not supported; accepted: default, linear, dynamic, llama3, yarn, longrope",
        ),
        (
            {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_parameters are given for each of full_attention; accepted: one for all layers",
        ),
        ({"rope_type": "linear", "rope_theta": 1e4}, r"do not suit rope type 'linear' \(KeyError: 'factor'\)"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": "four"}, "do not suit rope type 'yarn'"),
    ],
)
def test_refusals(rope, message):
    config = _config(None)
    config.rope_parameters = rope
    with pytest.raises(ModelError, match=message) as raised:
        RotaryEmbedding(config, HEAD)
    assert "\n" not in str(raised.value)
