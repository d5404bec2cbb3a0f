"""The linear layer: names, placements, parameters, and the unquantized forward."""

import pytest
import torch
import torch.nn.functional as F

from requant.layers.linear import Linear, Part, merged_linear, plain_linear, qkv_linear
from requant.loading.protocols import PlainModule, QuantizableModule
from requant.parallel import Placement

CPU = torch.device("cpu")


def test_qkv_names_and_placements():
    layer = qkv_linear("model.layers.3.self_attn.qkv_proj", 48, 6, 2, 8, bias=True)
    prefix = "model.layers.3.self_attn"
    assert layer.names.module == f"{prefix}.qkv_proj"
    assert layer.names.parts == (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
    assert layer.names.protected is None
    assert layer.placements == (
        Placement(f"{prefix}.q_proj.weight", (48, 48), "weight", 0),
        Placement(f"{prefix}.k_proj.weight", (16, 48), "weight", 48),
        Placement(f"{prefix}.v_proj.weight", (16, 48), "weight", 64),
        Placement(f"{prefix}.q_proj.bias", (48,), "bias", 0),
        Placement(f"{prefix}.k_proj.bias", (16,), "bias", 48),
        Placement(f"{prefix}.v_proj.bias", (16,), "bias", 64),
    )
    assert (layer.in_features, layer.out_features) == (48, 80)


def test_a_layer_that_is_not_fused_is_its_own_part():
    layer = plain_linear("model.layers.0.mlp.down_proj", 32, 16)
    assert layer.names.parts == (layer.names.module,)
    assert layer.placements == (Placement("model.layers.0.mlp.down_proj.weight", (16, 32)),)


def test_satisfies_the_protocols_of_loading():
    layer = plain_linear("a.b", 4, 4)
    assert isinstance(layer, QuantizableModule)
    assert isinstance(layer, PlainModule)


def test_owns_nothing_before_build_and_runs_only_after_finish():
    layer = merged_linear("mlp.gate_up_proj", 8, {"gate_proj": 6, "up_proj": 6}, bias=True)
    assert not list(layer.parameters())
    with pytest.raises(RuntimeError, match="finish"):
        layer(torch.zeros(1, 8))
    layer.build(None, torch.bfloat16, CPU)
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()} == {
        "weight": ((12, 8), torch.bfloat16, False),
        "bias": ((12,), torch.bfloat16, False),
    }
    with pytest.raises(RuntimeError, match="finish"):
        layer(torch.zeros(1, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (0, 8)])
def test_unquantized_forward(shape):
    parts = [Part("a", 3), Part("b", 4, bias=True), Part("c", 2)]
    layer = Linear("fused", 8, parts)
    layer.build(None, torch.float32, CPU)
    weight, bias = torch.randn(9, 8), torch.randn(4)
    layer.weight.data.copy_(weight)
    layer.bias.data[3:7].copy_(bias)
    layer.finish()
    x = torch.randn(shape)
    want = F.linear(x, weight) + torch.cat([torch.zeros(3), bias, torch.zeros(2)])
    assert layer(x).shape == (*shape[:-1], 9)
    torch.testing.assert_close(layer(x), want)


def test_accepts_strided_input():
    layer = plain_linear("o", 4, 3)
    layer.build(None, torch.float32, CPU)
    layer.weight.data.normal_()
    layer.finish()
    wide = torch.randn(5, 2, 8)[..., :4]
    torch.testing.assert_close(layer(wide), layer(wide.contiguous()))
