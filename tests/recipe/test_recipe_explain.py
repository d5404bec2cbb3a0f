import pytest

from requant.errors import RecipeError
from requant.recipe import LayerNames, Recipe, explain, resolve

R1 = Recipe.parse(
    {
        "global_quant_config": "ptpc_fp8",
        "layer_quant_config": {"*expert*": "mxfp4", "*mlp*": "per_block_fp8"},
        "exclude_layer": ["lm_head", "*.gate.*"],
    }
)


def test_rules_are_listed_up_to_the_one_that_decides(deepseek_r1):
    assert explain(R1, deepseek_r1, "model.layers.3.mlp.experts").splitlines() == [
        "model.layers.3.mlp.experts",
        "  exclude_layer 'lm_head': does not match",
        "  exclude_layer '*.gate.*': does not match",
        "  layer_quant_config '*expert*' -> mxfp4: matches model.layers.3.mlp.experts, and decides",
        "  => mxfp4",
    ]


def test_the_global_target(deepseek_r1):
    assert explain(R1, deepseek_r1, "model.layers.3.self_attn.o_proj").splitlines()[-3:] == [
        "  layer_quant_config '*mlp*' -> per_block_fp8: does not match",
        "  global_quant_config -> ptpc_fp8: applies, and decides",
        "  => ptpc_fp8",
    ]


def test_a_part_by_its_checkpoint_name(deepseek_r1):
    lines = explain(R1, deepseek_r1, "model.layers.3.mlp.experts.200.up_proj.weight").splitlines()
    assert lines[0] == "model.layers.3.mlp.experts.200.up_proj (a part of model.layers.3.mlp.experts)"
    assert lines[-1] == "  => mxfp4"


def test_the_name_that_matched(deepseek_r1):
    assert explain(R1, deepseek_r1, "model.layers.3.mlp.gate").splitlines()[-2:] == [
        "  exclude_layer '*.gate.*': matches model.layers.3.mlp.gate.weight, and decides",
        "  => kept: excluded by '*.gate.*'",
    ]


def test_rules_that_do_not_reach_a_protected_layer(llama):
    recipe = Recipe("ptpc_fp8", (("*", "mxfp4"),))
    assert explain(recipe, llama, "lm_head").splitlines() == [
        "lm_head",
        "  layer_quant_config '*' -> mxfp4: matches lm_head, but does not reach a protected layer (lm_head)",
        "  global_quant_config -> ptpc_fp8: applies, but does not reach a protected layer (lm_head)",
        "  => kept: protected: lm_head",
    ]


def test_parts_that_different_rules_decide(llama):
    recipe = Recipe("mxfp4", (("*.q_proj", "mxfp4"),))
    assert explain(recipe, llama, "model.layers.0.self_attn.qkv_proj").splitlines()[1:] == [
        "  layer_quant_config '*.q_proj' -> mxfp4: matches model.layers.0.self_attn.q_proj (1 of 3 parts), and decides",
        "  global_quant_config -> mxfp4: applies, and decides",
        "  => mxfp4",
    ]


def test_parts_that_disagree(llama):
    outcome = explain(Recipe(None, (("*.q_proj", "mxfp4"),)), llama, "model.layers.0.self_attn.qkv_proj")
    assert "  => error: model.layers.0.self_attn.qkv_proj is one fused layer, but its parts" in outcome


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [({"fixed": "no FP8 form"}, "cannot be quantized: no FP8 form"), ({"not_loaded": "MTP"}, "not loaded: MTP")],
)
def test_no_rule_is_tried_on_layers_that_are_kept_anyway(kind, outcome):
    layer = LayerNames("a.wo_a", ("a.wo_a",), **kind)
    assert explain(R1, [layer], "a.wo_a").splitlines() == ["a.wo_a", f"  => kept: {outcome}"]


def test_an_empty_recipe(llama):
    assert explain(Recipe(), llama, "model.layers.0.mlp.down_proj").splitlines() == [
        "model.layers.0.mlp.down_proj",
        "  => kept: no rule matches",
    ]


def test_an_unknown_name(llama):
    with pytest.raises(RecipeError, match=r"no layer is named 'lm_hed'; nearest names: lm_head"):
        explain(R1, llama, "lm_hed")


def test_outcome_is_that_of_resolve(deepseek_v4):
    recipe = Recipe.parse({"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*expert*": "mxfp4"}})
    for name, decision in resolve(recipe, deepseek_v4).decisions.items():
        expected = decision.format or f"kept: {decision.reason}"
        assert explain(recipe, deepseek_v4, name).splitlines()[-1] == f"  => {expected}"
