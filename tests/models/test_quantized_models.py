"""A model with quantized layers is the model that has their dequantized weights."""

import pytest
import torch

from requant.formats import FORMATS, quantize

TOKENS = torch.randint(0, 67, (19,), generator=torch.Generator().manual_seed(7))


def _all_layers(model: torch.nn.Module) -> list[str]:
    return [layer.names.module for layer in model.quantizable() if not layer.names.protected]


@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_mxfp4_equals_transformers_with_dequantized_weights(tiny, case):
    """MXFP4 leaves activations alone, so that the oracle needs to know of the weights only."""
    theirs = tiny.reference(tiny.cases[case]())
    names = _all_layers(tiny.ours(theirs))
    assert len(names) == 8
    model = tiny.ours(theirs, formats=dict.fromkeys(names, FORMATS["mxfp4"]))
    with torch.inference_mode():
        before = theirs(TOKENS[None]).logits[0]
        for layer in model.quantizable():
            for part in layer.names.parts if layer.names.module in names else ():
                weight = theirs.get_submodule(part).weight
                weight.copy_(quantize(weight, "mxfp4").dequantize())
        want = theirs(TOKENS[None]).logits[0]
    (got,) = tiny.stepper(model, [TOKENS]).run([{0: 12}, {0: 7}])
    assert (want - before).abs().max() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen3-moe", "deepseek-v2-lite", "deepseek-v3-yarn"])
def test_mxfp4_experts_and_latent_attention_equal_transformers_with_dequantized_weights(tiny, case):
    theirs = tiny.reference(tiny.cases[case]())
    state = tiny.per_expert(theirs.state_dict())
    names = _all_layers(tiny.ours(theirs, state=state))
    model = tiny.ours(theirs, formats=dict.fromkeys(names, FORMATS["mxfp4"]), state=state)
    with torch.inference_mode():
        before = theirs(TOKENS[None]).logits[0]
        for layer in model.quantizable():
            # The pieces of the state are views of the model's own parameters.
            for part in layer.names.parts if layer.names.module in names else ():
                state[f"{part}.weight"].copy_(quantize(state[f"{part}.weight"], "mxfp4").dequantize())
        want = theirs(TOKENS[None]).logits[0]
    (got,) = tiny.stepper(model, [TOKENS]).run([{0: 12}, *[{0: 1}] * 7])
    assert (want - before).abs().max() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_a_router_can_be_quantized(tiny, name):
    theirs = tiny.reference(tiny.cases["deepseek-v3"]())
    plain = tiny.ours(theirs)
    (want,) = tiny.stepper(plain, [TOKENS]).run([{0: 19}])
    routers = [layer.names.module for layer in plain.quantizable() if layer.names.protected == "MoE router"]
    model = tiny.ours(theirs, formats=dict.fromkeys(routers, FORMATS[name]))
    (got,) = tiny.stepper(model, [TOKENS]).run([{0: 19}])
    assert model.get_submodule(routers[0]).weight.dtype == FORMATS[name].data_dtype
    assert model.get_submodule(routers[0]).e_score_correction_bias.dtype == torch.float32
    assert got.isfinite().all()
    assert 0 < (got - want).norm() / want.norm() < 1


@pytest.mark.parametrize("case", ["qwen2", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_stays_near_the_unquantized_model(tiny, name, case):
    theirs = tiny.reference(tiny.cases[case]())
    plain = tiny.ours(theirs)
    (want,) = tiny.stepper(plain, [TOKENS]).run([{0: 19}])
    model = tiny.ours(theirs, formats=dict.fromkeys(_all_layers(plain), FORMATS[name]))
    (got,) = tiny.stepper(model, [TOKENS]).run([{0: 19}])
    error = (got - want).norm() / want.norm()
    # With random weights some tokens get other experts: the nearest scores are close.
    limit = 0.15 if case == "qwen2" else 0.3
    assert 0.001 < error < (4 * limit if name == "mxfp4" else limit)


def test_a_quantized_tied_head_is_a_copy_and_the_embedding_stays(tiny):
    theirs = tiny.reference(tiny.cases["llama-tied"]())
    model = tiny.ours(theirs, formats={"lm_head": FORMATS["mxfp4"]})
    embedding = theirs.get_input_embeddings().weight
    torch.testing.assert_close(model.model.embed_tokens.weight, embedding, rtol=0, atol=0)
    assert model.lm_head.weight.shape == (67, 32)
    hidden = torch.randn(4, 48)
    want = hidden @ quantize(embedding, "mxfp4").dequantize().T
    torch.testing.assert_close(model.compute_logits(hidden), want)
