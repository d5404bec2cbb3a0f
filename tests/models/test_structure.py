"""What a model looks like to a recipe and to loading: names, placements, no weights, refusals."""

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from requant.errors import ModelError
from requant.models.decoder import sliding_windows
from requant.models.llama import LlamaForCausalLM, MistralForCausalLM
from requant.models.qwen3 import Qwen3ForCausalLM
from requant.models.registry import model_class

LAYER = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]


def test_quantizable_layers_have_vllms_names(tiny):
    model = LlamaForCausalLM(tiny.cases["llama"]())
    names = [layer.names.module for layer in model.quantizable()]
    assert names == [f"model.layers.{i}.{name}" for i in range(2) for name in LAYER] + ["lm_head"]
    assert [layer.names.module for layer in model.quantizable() if layer.names.protected] == ["lm_head"]


@pytest.mark.parametrize("case", ["llama", "llama-tied", "qwen3"])
def test_a_layers_name_is_its_path(tiny, case):
    config = tiny.cases[case]()
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    model = model_class(config.architectures)(config)
    for layer in model.quantizable():
        assert model.get_submodule(layer.names.module) is layer
    for path, module in model.named_modules():
        if module in list(model.plain()) and module.placements:
            assert [p.tensor for p in module.placements] == [f"{path}.weight"]
    plain = {p.tensor for layer in model.plain() for p in layer.placements}
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"} <= plain
    assert ("model.layers.1.self_attn.q_norm.weight" in plain) == (case == "qwen3")


def test_placements_are_exactly_the_checkpoint(pair):
    theirs, model = pair
    wanted = [p for layer in model.plain() for p in layer.placements]
    wanted += [p for layer in model.quantizable() if not layer.tied for p in layer.placements]
    shapes = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert {p.tensor: p.shape for p in wanted} == shapes
    assert len(wanted) == len(shapes)


def test_constructing_makes_no_parameters(tiny):
    for make in tiny.cases.values():
        config = make()
        model = model_class([type(config).__name__.replace("Config", "ForCausalLM")])(config)
        assert not list(model.parameters())
        assert len(model.attention_layers()) == config.num_hidden_layers
        assert all(layer.kv_cache is None for layer in model.attention_layers())


def test_a_tied_model_holds_the_embedding_once(tiny):
    theirs = tiny.reference(tiny.cases["llama-tied"]())
    model = tiny.ours(theirs)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_registry_names_what_it_knows():
    with pytest.raises(ModelError) as raised:
        model_class(["GPT2LMHeadModel"])
    assert str(raised.value) == (
        "unknown architecture (GPT2LMHeadModel); "
        "known: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    )
    for nothing in (None, []):
        with pytest.raises(ModelError, match=r"unknown architecture \(none given\); known: Llama"):
            model_class(nothing)


@pytest.mark.parametrize("given", [5, [5], [["LlamaForCausalLM"]], {"a": 1}, "GPT2LMHeadModel"])
def test_registry_takes_whatever_a_file_may_hold(given):
    with pytest.raises(ModelError, match=r"unknown architecture \(.+\); known: Llama"):
        model_class(given)
    assert model_class("MistralForCausalLM") is MistralForCausalLM


def test_registry_takes_the_first_known_name():
    assert model_class(["Mystery", "MistralForCausalLM"]) is MistralForCausalLM


def _small(cls: type, **changes: object) -> object:
    return cls(**{"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, **changes})


def test_which_layers_slide():
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    assert sliding_windows(_small(Qwen2Config, **windows), "full_attention") == [None, 7, 7]
    assert sliding_windows(_small(Qwen3Config, sliding_window=7), "full_attention") == [None] * 3
    assert sliding_windows(_small(MistralConfig, sliding_window=9), "sliding_attention") == [9] * 3
    assert sliding_windows(_small(MistralConfig, sliding_window=None), "sliding_attention") == [None] * 3
    assert sliding_windows(_small(LlamaConfig), "full_attention") == [None] * 3


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (LlamaConfig, {"hidden_act": "swoosh"}, "hidden_act 'swoosh' is not known; accepted: .*silu"),
        (LlamaConfig, {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "rope type 'mrope'"),
        (
            Qwen3Config,
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "layer_types has chunked_attention; accepted: full_attention, sliding_attention",
        ),
        (Qwen3Config, {"layer_types": ["sliding_attention"] * 3}, "sliding_window is not given"),
        (Qwen3Config, {"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries for num_hidden_layers 3"),
    ],
)
def test_refusals(cls, changes, message):
    config = _small(cls)
    for key, value in changes.items():
        object.__setattr__(config, key, value)
    model = Qwen3ForCausalLM if cls is Qwen3Config else LlamaForCausalLM
    with pytest.raises(ModelError, match=message) as raised:
        model(config)
    assert "\n" not in str(raised.value)
