"""The router: which of its parameters are float32, what it computes in, and that a recipe's format is honoured."""

import pytest
import torch
import torch.nn.functional as F

from requant.formats import FORMATS, quantize
from requant.layers.linear import plain_linear
from requant.layers.router import Router
from requant.parallel import Placement

CPU = torch.device("cpu")
NAME = "model.layers.3.mlp.gate"
EXPERTS, HIDDEN = 12, 64


def weight_and_input():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(EXPERTS, HIDDEN, generator=generator), torch.randn(7, HIDDEN, generator=generator).bfloat16()


def test_names_and_placements():
    layer = Router(NAME, HIDDEN, EXPERTS, float32=True, correction_bias=True)
    assert (layer.names.module, layer.names.parts, layer.names.protected) == (NAME, (NAME,), "MoE router")
    bias = f"{NAME}.e_score_correction_bias"
    assert layer.placements == (
        Placement(f"{NAME}.weight", (EXPERTS, HIDDEN), dtype=torch.float32),
        Placement(bias, (EXPERTS,), "e_score_correction_bias", dtype=torch.float32),
    )
    assert Router(NAME, HIDDEN, EXPERTS).placements == (Placement(f"{NAME}.weight", (EXPERTS, HIDDEN)),)


@pytest.mark.parametrize("float32", [False, True])
def test_what_an_unquantized_router_computes_in(float32):
    weight, x = weight_and_input()
    layer = Router(NAME, HIDDEN, EXPERTS, float32=float32)
    layer.build(None, torch.bfloat16, CPU)
    assert layer.weight.dtype == (torch.float32 if float32 else torch.bfloat16)
    assert layer.e_score_correction_bias is None
    layer.weight.data.copy_(weight)
    layer.finish()
    logits = layer(x)
    assert logits.dtype == layer.weight.dtype
    exact = F.linear(x.double(), weight.double()).float()
    if float32:
        torch.testing.assert_close(logits, exact, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(logits.float(), exact, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_router_is_a_linear_layer_of_that_format(name, float32):
    weight, x = weight_and_input()
    q = quantize(weight, name)
    router = Router(NAME, HIDDEN, EXPERTS, float32=float32, correction_bias=True)
    linear = plain_linear(NAME, HIDDEN, EXPERTS)
    for layer in (router, linear):
        layer.build(FORMATS[name], torch.bfloat16, CPU)
        layer.weight.data.copy_(q.data)
        layer.weight_scale.data.copy_(q.scale)
        layer.finish()
    assert router.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(router(x), linear(x).float())
