"""What a model looks like to a recipe and to loading: names, placements, no weights, refusals."""

from math import prod

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from requant.errors import ModelError
from requant.models.attention import sliding_windows
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
    """Every tensor, each of its values once."""
    theirs, model = pair
    wanted = [p for layer in model.plain() for p in layer.placements]
    wanted += [p for layer in model.quantizable() if not layer.tied for p in layer.placements]
    shapes = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    shapes |= {n: tuple(b.shape) for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias")}
    assert {p.tensor: p.whole or p.shape for p in wanted} == shapes
    assert sum(prod(p.shape) for p in wanted) == sum(prod(shape) for shape in shapes.values())
    assert len({(p.tensor, p.start) for p in wanted}) == len(wanted)


@pytest.mark.parametrize("case", ["qwen3-moe-mlp-only", "deepseek-v3"])
def test_both_layouts_of_expert_weights_give_the_same_model(tiny, case):
    theirs = tiny.reference(tiny.cases[case]())
    state = tiny.per_expert(theirs.state_dict())
    assert any(name.endswith("experts.5.up_proj.weight") for name in state)
    one, other = tiny.ours(theirs), tiny.ours(theirs, state=state)
    parameters = dict(other.named_parameters())
    assert list(parameters) == [name for name, _ in one.named_parameters()]
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, parameters[name]), name


ATTENTION = {
    "qwen3-moe": ["qkv_proj", "o_proj"],
    "deepseek-v3": ["fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj"],
    "deepseek-v2-lite": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
DENSE = ["gate_up_proj", "down_proj"]
SPARSE = {
    "qwen3-moe": ["gate", "experts"],
    "deepseek-v3": ["gate", "experts", "shared_experts.gate_up_proj", "shared_experts.down_proj"],
}


def _layer_names(case: str, index: int, dense: bool) -> list[str]:
    mlp = DENSE if dense else SPARSE.get(case, SPARSE["deepseek-v3"])
    attention = [f"model.layers.{index}.self_attn.{name}" for name in ATTENTION[case]]
    return attention + [f"model.layers.{index}.mlp.{name}" for name in mlp]


@pytest.mark.parametrize("case", ATTENTION)
def test_names_of_models_with_experts_are_vllms(tiny, case):
    config = tiny.cases[case]()
    model = model_class([type(config).__name__.replace("Config", "ForCausalLM")])(config)
    dense = 0 if case == "qwen3-moe" else 1
    expected = [name for i in range(3) for name in _layer_names(case, i, i < dense)]
    layers = list(model.quantizable())
    assert [layer.names.module for layer in layers] == [*expected, "lm_head"]
    protected = {layer.names.module: layer.names.protected for layer in layers if layer.names.protected}
    assert protected == {f"model.layers.{i}.mlp.gate": "MoE router" for i in range(dense, 3)} | {"lm_head": "lm_head"}
    experts = next(layer for layer in layers if layer.names.module == "model.layers.2.mlp.experts")
    assert experts.names.parts[:4] == tuple(
        f"model.layers.2.mlp.experts.{part}" for part in ("0.gate_proj", "0.up_proj", "0.down_proj", "1.gate_proj")
    )


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"first_k_dense_replace": 2}, [2, 3, 4]),
        ({"first_k_dense_replace": 9}, []),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, [0, 2, 4]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 1}, [1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("case", ["deepseek-v2", "deepseek-v3"])
def test_which_deepseek_layers_have_experts(tiny, case, changes, sparse):
    config = tiny.cases[case]()
    for key, value in {"num_hidden_layers": 5, **changes}.items():
        setattr(config, key, value)
    model = model_class([type(config).__name__.replace("Config", "ForCausalLM")])(config)
    names = {layer.names.module for layer in model.quantizable()}
    assert [i for i in range(5) if f"model.layers.{i}.mlp.experts" in names] == sparse
    assert [i for i in range(5) if f"model.layers.{i}.mlp.down_proj" not in names] == sparse


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("qwen3-moe", torch.bfloat16), ("deepseek-v2", torch.float32), ("deepseek-v3", torch.float32)],
)
def test_deepseeks_routers_are_float32_in_any_model(tiny, case, dtype):
    model = tiny.ours(tiny.reference(tiny.cases[case](), torch.bfloat16), torch.bfloat16)
    assert model.get_submodule("model.layers.2.mlp.gate").weight.dtype == dtype
    others = {p.dtype for name, p in model.named_parameters() if ".gate." not in name}
    assert others == {torch.bfloat16}


def test_a_model_without_experts_is_dense(tiny):
    config = tiny.cases["qwen3-moe"]()
    config.num_experts = 0
    names = [layer.names.module for layer in model_class(["Qwen3MoeForCausalLM"])(config).quantizable()]
    assert names == [f"model.layers.{i}.{name}" for i in range(3) for name in LAYER] + ["lm_head"]


def test_mtp_layers_are_named_and_not_loaded(tiny):
    config = tiny.cases["deepseek-v3"]()
    config.num_nextn_predict_layers = 2
    model = model_class(["DeepseekV3ForCausalLM"])(config)
    expected = []
    for i in (3, 4):
        expected += [f"model.layers.{i}.eh_proj", *_layer_names("deepseek-v3", i, False)]
        expected.append(f"model.layers.{i}.shared_head.head")
    assert [names.module for names in model.not_loaded] == expected
    assert {names.not_loaded for names in model.not_loaded} == {"an MTP layer, which only speculative decoding uses"}
    assert [names.protected for names in model.not_loaded if names.protected] == [
        "MTP eh_proj",
        "MoE router",
        "MTP shared_head.head",
    ] * 2
    assert len(list(model.children())) == 2  # nothing of them is in the model


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
        "known: DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, LlamaForCausalLM, MistralForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"
    )
    for nothing in (None, []):
        with pytest.raises(ModelError, match=r"unknown architecture \(none given\); known: DeepseekV2ForCausalLM"):
            model_class(nothing)


@pytest.mark.parametrize("given", [5, [5], [["LlamaForCausalLM"]], {"a": 1}, "GPT2LMHeadModel"])
def test_registry_takes_whatever_a_file_may_hold(given):
    with pytest.raises(ModelError, match=r"unknown architecture \(.+\); known: DeepseekV2ForCausalLM"):
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


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; accepted: 1 to 6 experts to choose from"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; accepted: 1 or more"),
        ("qwen3-moe", {"hidden_act": "swoosh"}, "hidden_act 'swoosh' is not known"),
        ("deepseek-v3", {"n_group": 3}, "n_group 3 does not divide the 8 experts"),
        ("deepseek-v3", {"topk_group": 5}, "topk_group is 5; accepted: 1 to n_group, 4"),
        ("deepseek-v3", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5; accepted: 1 to 4 experts"),
        ("deepseek-v3", {"n_group": 8}, "groups of 1 experts are too small"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; accepted: noaux_tc"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; accepted: sigmoid"),
        ("deepseek-v3", {"n_group": None}, "n_group is not given in config.json; accepted: a number"),
        ("deepseek-v3", {"topk_group": None}, "topk_group is not given"),
        ("deepseek-v3", {"num_experts_per_tok": None}, "num_experts_per_tok is not given"),
        ("deepseek-v3", {"first_k_dense_replace": None}, "first_k_dense_replace is not given"),
        ("deepseek-v3", {"moe_layer_freq": 0}, "moe_layer_freq is 0; accepted: a number from 1"),
        ("deepseek-v3", {"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq is .0, 1, 1.; accepted: a number from 1"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; accepted: softmax"),
        ("deepseek-v2", {"topk_method": "best"}, "topk_method is 'best'; accepted: greedy, group_limited_greedy"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("deepseek-v2", {"n_group": None}, "n_group is not given"),
    ],
)
def test_refusals_of_models_with_experts(tiny, case, changes, message):
    config = tiny.cases[case]()
    for key, value in changes.items():
        object.__setattr__(config, key, value)
    name = type(config).__name__.replace("Config", "ForCausalLM")
    with pytest.raises(ModelError, match=message) as raised:
        model_class([name])(config)
    assert "\n" not in str(raised.value)
