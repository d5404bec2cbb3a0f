from collections import Counter

import pytest

from requant.errors import RecipeError
from requant.recipe import Decision, LayerNames, Recipe, resolve

FIRST = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*expert*": "ptpc_fp8"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}
R1 = {**FIRST, "layer_quant_config": {"*expert*": "mxfp4"}}
UNREACHABLE = "(norms, embeddings, biases and convolutions are never quantized)"


def run(recipe, layers):
    return resolve(Recipe.parse(recipe), layers)


def overrides(layers, **patterns):
    return run({"layer_quant_config": patterns["of"]}, layers)


def refuse(recipe, layers):
    with pytest.raises(RecipeError) as caught:
        run(recipe, layers)
    text = str(caught.value)
    assert "\n" not in text
    return text


def quantized(resolution):
    return {name: d.format for name, d in resolution.decisions.items() if d.format}


def test_qwen3_30b_first_recipe_is_144_layers(qwen3_moe):
    result = run(FIRST, qwen3_moe)
    assert len(quantized(result)) == 144
    assert set(quantized(result).values()) == {"ptpc_fp8"}
    assert result.warnings == result.unmatched_patterns == ()
    decisions = result.decisions
    assert list(decisions) == [layer.module for layer in qwen3_moe]
    attention, experts = "model.layers.47.self_attn.qkv_proj", "model.layers.47.mlp.experts"
    assert decisions[attention] == Decision(attention, "ptpc_fp8", "global_quant_config")
    assert decisions[experts] == Decision(experts, "ptpc_fp8", "*expert*")
    gate = "model.layers.0.mlp.gate"
    assert decisions[gate] == Decision(gate, None, "*.gate.*", "excluded by '*.gate.*'")
    assert decisions["lm_head"] == Decision("lm_head", None, "lm_head", "excluded by 'lm_head'")


def test_deepseek_r1_recipe(deepseek_r1_mtp):
    result = run(R1, deepseek_r1_mtp)
    by_format = Counter(quantized(result).values())
    # 59 MoE layers: experts and two shared-expert layers; 62 × 4 attention layers and 3 × 2 dense ones.
    assert by_format == {"mxfp4": 59 * 3, "ptpc_fp8": 62 * 4 + 3 * 2}
    assert quantized(result)["model.layers.3.mlp.shared_experts.gate_up_proj"] == "mxfp4"
    assert quantized(result)["model.layers.61.mlp.experts"] == "mxfp4"
    assert quantized(result)["model.layers.61.self_attn.o_proj"] == "ptpc_fp8"
    assert result.decisions["model.layers.61.eh_proj"].reason == "protected: MTP eh_proj"
    assert result.decisions["model.layers.61.shared_head.head"].reason == "protected: MTP shared_head.head"
    assert result.warnings == ()


def test_deepseek_r1_without_mtp_keeps_layer_61(deepseek_r1):
    result = run(R1, deepseek_r1)
    assert Counter(quantized(result).values()) == {"mxfp4": 58 * 3, "ptpc_fp8": 61 * 4 + 3 * 2}
    layer_61 = [d for name, d in result.decisions.items() if name.startswith("model.layers.61.")]
    assert len(layer_61) == 10
    assert {(d.format, d.pattern, d.reason) for d in layer_61} == {
        (None, "", "not loaded: MTP layer, needs --method mtp")
    }


def test_v4_exclude_that_matches_nothing_warns(deepseek_v4):
    result = run({"global_quant_config": "ptpc_fp8", "exclude_layer": ["lm_head", "*.expert.*"]}, deepseek_v4)
    assert result.unmatched_patterns == ("*.expert.*",)
    (warning,) = result.warnings
    assert warning.startswith(
        f"exclude_layer '*.expert.*' matches no layer that a recipe can reach {UNREACHABLE}; "
        "nearest names: model.layers.0.ffn.experts, layers.0.ffn.experts, "
    )
    assert result.decisions["model.layers.1.ffn.experts"].format == "ptpc_fp8"


@pytest.mark.parametrize("recipe", [None, "", {}, {"exclude_layer": ["lm_head"]}])
def test_without_a_target_nothing_is_quantized(recipe, llama):
    result = run(recipe, llama)
    assert quantized(result) == {}
    assert result.decisions["model.layers.0.mlp.down_proj"].reason == "no rule matches"
    assert result.decisions["model.layers.0.mlp.down_proj"].pattern == ""


def test_order_of_the_rules(llama):
    result = run(
        {
            "global_quant_config": "ptpc_fp8",
            "layer_quant_config": {"*.0.*down_proj": "mxfp4", "*down_proj": "per_block_fp8", "*.mlp": "mxfp4"},
            "exclude_layer": ["*.1.mlp.gate_up_proj"],
        },
        llama,
    )
    decided = {name: (d.format, d.pattern) for name, d in result.decisions.items()}
    assert decided["model.layers.0.mlp.down_proj"] == ("mxfp4", "*.0.*down_proj")
    assert decided["model.layers.1.mlp.down_proj"] == ("per_block_fp8", "*down_proj")
    assert decided["model.layers.0.mlp.gate_up_proj"] == ("mxfp4", "*.mlp")
    assert decided["model.layers.1.mlp.gate_up_proj"] == (None, "*.1.mlp.gate_up_proj")
    assert decided["model.layers.0.self_attn.o_proj"] == ("ptpc_fp8", "global_quant_config")


def test_the_order_of_overrides_in_json_text_counts(llama):
    first = run('{"layer_quant_config": {"*": "mxfp4", "*.mlp": "ptpc_fp8"}}', llama)
    second = run('{"layer_quant_config": {"*.mlp": "ptpc_fp8", "*": "mxfp4"}}', llama)
    assert quantized(first)["model.layers.0.mlp.down_proj"] == "mxfp4"
    assert quantized(second)["model.layers.0.mlp.down_proj"] == "ptpc_fp8"


# Fused layers


def test_all_parts_named_one_by_one_are_the_fused_layer(llama):
    result = overrides(llama, of={"*.q_proj": "mxfp4", "*.[kv]_proj": "mxfp4"})
    assert quantized(result) == {f"model.layers.{i}.self_attn.qkv_proj": "mxfp4" for i in range(2)}
    assert result.decisions["model.layers.0.self_attn.qkv_proj"].pattern == "*.q_proj"


@pytest.mark.parametrize(
    ("recipe", "first", "second"),
    [
        (
            {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*.k_proj": "mxfp4"}},
            "q_proj ptpc_fp8 by global_quant_config",
            "k_proj mxfp4 by layer_quant_config '*.k_proj'",
        ),
        (
            {"layer_quant_config": {"*.q_proj": "mxfp4", "re:[kv]_proj": "ptpc_fp8"}},
            "q_proj mxfp4 by layer_quant_config '*.q_proj'",
            "k_proj ptpc_fp8 by layer_quant_config 're:[kv]_proj'",
        ),
        (
            {"layer_quant_config": {"*.v_proj": "mxfp4"}},
            "q_proj is kept, no rule matches it",
            "v_proj mxfp4 by layer_quant_config '*.v_proj'",
        ),
        (
            {"global_quant_config": "mxfp4", "exclude_layer": ["*.q_proj"]},
            "q_proj is kept by exclude_layer '*.q_proj'",
            "k_proj mxfp4 by global_quant_config",
        ),
    ],
)
def test_parts_that_disagree(recipe, first, second, llama):
    assert refuse(recipe, llama) == (
        "model.layers.0.self_attn.qkv_proj is one fused layer, but its parts get different targets: "
        f"{first}; {second}; name the whole layer, e.g. '*.self_attn.qkv_proj', instead of its parts"
    )


def test_one_expert_of_many_disagrees(qwen3_moe):
    message = refuse({**FIRST, "layer_quant_config": {"*.experts.77.up_proj": "mxfp4"}}, qwen3_moe)
    assert message.startswith("model.layers.0.mlp.experts is one fused layer")
    assert "experts.0.gate_proj ptpc_fp8 by global_quant_config; experts.77.up_proj mxfp4 by layer_quant" in message


def test_a_part_excluded_beside_parts_without_a_rule_is_no_conflict(llama):
    result = run({"layer_quant_config": {"*.o_proj": "mxfp4"}, "exclude_layer": ["*.v_proj"]}, llama)
    kept = result.decisions["model.layers.0.self_attn.qkv_proj"]
    assert kept == Decision(kept.layer, None, "*.v_proj", "excluded by '*.v_proj'")


@pytest.mark.parametrize("kind", [{"fixed": "no kernel"}, {"not_loaded": "MTP"}])
def test_no_conflict_in_a_layer_that_is_kept_anyway(kind, llama):
    extra = LayerNames("mtp.qkv_proj", ("mtp.q_proj", "mtp.k_proj"), **kind)
    result = overrides([*llama, extra], of={"*.q_proj": "mxfp4", "*.[kv]_proj": "mxfp4", "mtp.q_proj": "ptpc_fp8"})
    assert result.decisions["mtp.qkv_proj"].format is None


# Patterns that match nothing


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("*exprt*", "model.layers.0.mlp.experts"),
        ("*.self_atn.o_proj", "model.layers.0.self_attn.o_proj"),
        ("model.layers.99.mlp.experts", "model.layers.47.mlp.experts"),
        ("model.layers.*.self_attn.qkv_prj.weight", "model.layers.0.self_attn.qkv_proj"),
        ("re:self_atten", "model.layers.0.self_attn"),
        ("*.QKV_PROJ", "model.layers."),
        ("", "model.layers."),
        ("lmhead", "lm_head"),
    ],
)
def test_override_that_matches_nothing(pattern, nearest, qwen3_moe):
    message = refuse({"layer_quant_config": {"*expert*": "mxfp4", pattern: "mxfp4"}}, qwen3_moe)
    assert message.startswith(
        f"layer_quant_config {pattern!r} matches no layer that a recipe can reach {UNREACHABLE}; "
        f"nearest names: {nearest}"
    )


@pytest.mark.parametrize("name", ["*.input_layernorm", "model.embed_tokens", "*.q_norm", "*bias"])
def test_norms_and_embeddings_are_no_layers(name, llama):
    assert f"layer_quant_config {name!r} matches no layer" in refuse({"layer_quant_config": {name: "mxfp4"}}, llama)
    result = run({"global_quant_config": "mxfp4", "exclude_layer": [name, "lm_head"]}, llama)
    assert result.unmatched_patterns == (name,)


def test_a_misspelt_part_is_reported_before_the_disagreement_it_causes(llama):
    message = refuse({"layer_quant_config": {"*.q_proj": "mxfp4", "*.k_proj": "mxfp4", "*.v_prj": "mxfp4"}}, llama)
    assert message.startswith("layer_quant_config '*.v_prj' matches no layer")


def test_an_override_that_an_earlier_rule_shadows_is_matched(llama):
    result = run({"layer_quant_config": {"*": "mxfp4", "*.mlp": "ptpc_fp8"}, "exclude_layer": "*.mlp"}, llama)
    assert result.warnings == ()


def test_main_model_and_mtp_layers_are_judged_together(deepseek_r1):
    result = run({"layer_quant_config": {"model.layers.61.self_attn.o_proj": "mxfp4"}}, deepseek_r1)
    assert quantized(result) == {}
    assert result.warnings == (
        "layer_quant_config 'model.layers.61.self_attn.o_proj' has no effect: it matches only layers that are not "
        "loaded (model.layers.61.self_attn.o_proj: MTP layer, needs --method mtp)",
    )
    assert run({"layer_quant_config": {"*.self_attn.o_proj": "mxfp4"}}, deepseek_r1).warnings == ()
    assert run({"exclude_layer": "model.layers.61.*"}, deepseek_r1).unmatched_patterns == ()


# Protected layers


def test_the_global_target_never_reaches_protected_layers(deepseek_r1_mtp):
    decisions = run({"global_quant_config": "mxfp4"}, deepseek_r1_mtp).decisions
    kept = {name: d.reason for name, d in decisions.items() if d.format is None}
    assert kept == {layer.module: f"protected: {layer.protected}" for layer in deepseek_r1_mtp if layer.protected}
    assert len(kept) == 59 + 3
    assert {d.pattern for name, d in decisions.items() if name in kept} == {""}


@pytest.mark.parametrize(
    ("pattern", "count", "kind"),
    [
        ("*.mlp.gate", 59, "MoE router"),
        ("*.gate", 59, "MoE router"),
        ("*.gate.weight", 59, "MoE router"),
        ("model.layers.[4-6].mlp.gate", 3, "MoE router"),
        ("lm_head", 1, "lm_head"),
        ("lm_head.weight", 1, "lm_head"),
        ("model.layers.61.eh_proj", 1, "MTP eh_proj"),
        ("*.eh_proj", 1, "MTP eh_proj"),
        ("*.shared_head.head", 1, "MTP shared_head.head"),
        ("model.layers.61.shared_head.head", 1, "MTP shared_head.head"),
    ],
)
def test_an_override_by_their_own_name_reaches_protected_layers(pattern, count, kind, deepseek_r1_mtp):
    result = overrides(deepseek_r1_mtp, of={pattern: "mxfp4"})
    assert len(quantized(result)) == count
    (warning,) = result.warnings
    plural = "s" if count > 1 else ""
    assert warning.startswith(
        f"layer_quant_config {pattern!r} quantizes {count} protected layer{plural} ({kind}) to mxfp4"
    )
    assert warning.endswith("; this can cost accuracy")
    assert next(iter(quantized(result))) in warning


@pytest.mark.parametrize(
    ("pattern", "kinds", "spelling"),
    [
        ("*.gate.*", "MoE router", "'*.mlp.gate'"),
        ("*mlp.gat?", "MoE router", "'*.mlp.gate'"),
        ("re:mlp\\.gate$", "MoE router", "'*.mlp.gate'"),
        ("re:^lm_head$", "lm_head", "'lm_head'"),
        ("*lm_head", "lm_head", "'lm_head'"),
        ("lm_head*", "lm_head", "'lm_head'"),
        ("*eh_proj", "MTP eh_proj", "'*.eh_proj'"),
        ("*.shared_head", "MTP shared_head.head", "'*.shared_head.head'"),
        ("*head", "MTP shared_head.head, lm_head", "'*.shared_head.head' or 'lm_head'"),
    ],
)
@pytest.mark.parametrize("loaded", [True, False])
def test_an_override_that_meets_only_protected_layers_out_of_reach(pattern, kinds, spelling, loaded, request):
    layers = request.getfixturevalue("deepseek_r1_mtp" if loaded else "deepseek_r1")
    assert refuse({"global_quant_config": "ptpc_fp8", "layer_quant_config": {pattern: "mxfp4"}}, layers) == (
        f"layer_quant_config {pattern!r} matches only protected layers ({kinds}), which an override reaches only by "
        f"their own name; accepted: {spelling}"
    )
    # The spelling that the message names does reach them.
    for accepted in spelling.replace("'", "").split(" or "):
        assert overrides(layers, of={accepted: "mxfp4"}).warnings or not loaded


def test_an_override_that_also_meets_other_layers_passes_over_the_protected(deepseek_r1_mtp):
    result = overrides(deepseek_r1_mtp, of={"*": "mxfp4"})
    assert {name for name, d in result.decisions.items() if d.format is None} == {
        layer.module for layer in deepseek_r1_mtp if layer.protected
    }
    assert result.decisions["lm_head"].reason == "protected: lm_head"
    assert result.warnings == ()


def test_a_later_override_decides_where_an_earlier_one_is_passed_over(llama):
    result = overrides(llama, of={"*": "mxfp4", "lm_head": "ptpc_fp8"})
    assert result.decisions["lm_head"] == Decision("lm_head", "ptpc_fp8", "lm_head")
    assert len(result.warnings) == 1


def test_excludes_reach_protected_layers_by_any_pattern(qwen3_moe):
    result = run(
        {"layer_quant_config": {"*.mlp.gate": "mxfp4", "lm_head": "mxfp4"}, "exclude_layer": "re:gate$|lm"}, qwen3_moe
    )
    assert quantized(result) == {}
    assert result.decisions["model.layers.9.mlp.gate"].reason == "excluded by 're:gate$|lm'"
    assert result.warnings == ()


def test_the_checkpoint_name_is_an_own_name_too(deepseek_v4):
    assert quantized(overrides(deepseek_v4, of={"head": "mxfp4"})) == {"lm_head": "mxfp4"}


def test_lm_head_counts_as_matched_where_it_is_tied(llama):
    # A tied head goes by its own name; its embedding is no layer.
    assert run({"global_quant_config": "mxfp4", "exclude_layer": "lm_head"}, llama).unmatched_patterns == ()


# Layers that can't be quantized


def test_fixed_layers_are_kept_whatever_the_recipe(deepseek_v4):
    name = "model.layers.0.attn.wo_a"
    for recipe in (
        {"global_quant_config": "mxfp4"},
        {"global_quant_config": "mxfp4", "exclude_layer": name},
        {"layer_quant_config": {"*.attn": "mxfp4"}},
    ):
        result = run(recipe, deepseek_v4)
        assert result.decisions[name] == Decision(
            name, None, "", "cannot be quantized: its grouped einsum has no FP8 form"
        )
        assert result.warnings == result.unmatched_patterns == ()


def test_an_override_that_meets_only_fixed_layers_warns(deepseek_v4):
    assert overrides(deepseek_v4, of={"*.wo_a": "mxfp4"}).warnings == (
        "layer_quant_config '*.wo_a' has no effect: it matches only layers that cannot be quantized "
        "(model.layers.0.attn.wo_a: its grouped einsum has no FP8 form)",
    )
    # Beside fixed layers it meets a protected one that it can't reach.
    (warning,) = overrides(deepseek_v4, of={"re:(wo_a|gate)$": "mxfp4"}).warnings
    assert "has no effect" in warning


def test_unmatched_excludes_are_listed_in_their_order(llama):
    result = run({"exclude_layer": ["b", "lm_head", "a", "re:x{3}"]}, llama)
    assert result.unmatched_patterns == ("b", "a", "re:x{3}")
    assert len(result.warnings) == 3


def test_all_parts_of_a_large_model_are_seen(deepseek_r1_mtp):
    """45,312 expert matrices against ten patterns, each part on its own."""
    patterns = {f"*.experts.*[{d}].{w}_proj": "mxfp4" for d in ("0-4", "5-9") for w in ("gate", "up", "down")}
    result = run({**FIRST, "layer_quant_config": {**patterns, "*shared*": "mxfp4"}}, deepseek_r1_mtp)
    assert Counter(quantized(result).values())["mxfp4"] == 59 * 3


def test_a_part_goes_by_its_aliases_too():
    """Where another library calls the parts otherwise; a pattern need not match the names of both."""
    aliases = (("layer.attention.query", "layer.attention.key"), ("layer.x", "layer.y"))
    layer = LayerNames("layer.attn.qk_proj", ("layer.attn.wq", "layer.attn.wk"), aliases=aliases)
    for pattern in ("*.attention.*", "re:[xy]$", "layer.attention", "*.attn.w?", "layer.attn.qk_proj"):
        decision = resolve(Recipe(overrides=((pattern, "mxfp4"),)), [layer]).decisions[layer.module]
        assert decision.format == "mxfp4"
    with pytest.raises(RecipeError, match="its parts get different targets"):
        resolve(Recipe(overrides=(("*.query", "mxfp4"),)), [layer])
    with pytest.raises(RecipeError, match=r"nearest names: layer\.attention\.query"):
        resolve(Recipe(overrides=(("*.attention.qwery", "mxfp4"),)), [layer])


def test_an_alias_is_a_protected_layers_own_name():
    layer = LayerNames("head", ("head",), protected="lm_head", aliases=(("output.lm_head",),))
    assert resolve(Recipe(overrides=(("*.lm_head", "mxfp4"),)), [layer]).decisions["head"].format == "mxfp4"
