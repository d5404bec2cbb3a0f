import pytest
import torch

from requant.errors import CheckpointError, ConfigError, RecipeError
from requant.loading import check_memory
from requant.loading.plan import BUDGET
from requant.recipe import LayerNames

QKV, O_PROJ = "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"
RECIPE = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*.o_proj": "mxfp4"}, "exclude_layer": "nothing"}


def layer(plan, name):
    return next(row for row in plan.layers if row.name == name)


def test_rows_of_the_plan(tiny):
    plan = tiny.plan(RECIPE)
    qkv = layer(plan, QKV)
    assert (qkv.format.name, qkv.decision.pattern, qkv.source) == ("ptpc_fp8", "global_quant_config", "BF16")
    assert qkv.activation == "fp8_per_token"
    assert qkv.bytes_before == 312 * 96 * 2
    assert qkv.bytes_after == 312 * 96 + 312 * 4
    assert qkv.layout_bytes == 312 * 96 * 4
    o_proj = layer(plan, O_PROJ)
    assert (o_proj.format.name, o_proj.decision.pattern, o_proj.activation) == ("mxfp4", "*.o_proj", "bfloat16")
    assert o_proj.bytes_after == 96 * 112 + 96 * 7
    head = layer(plan, "lm_head")
    assert head.format is None
    assert "protected" in head.decision.reason
    assert head.bytes_after == head.bytes_before == 50 * 96 * 2
    assert plan.plain_bytes == 2 * (50 * 96 + 96 + 312)
    assert plan.unmatched_patterns == ("nothing",)
    assert any("nothing" in warning for warning in plan.warnings)


def test_steps_go_through_the_files_in_order_and_cover_every_tensor(tiny):
    plan = tiny.plan(RECIPE, checkpoint=tiny.save(shards=3))
    places = [(str(step.tensor.file), step.tensor.start) for step in plan.steps]
    assert places == sorted(places)
    assert {step.tensor.name for step in plan.steps} == set(tiny.tensors)
    assert plan.bytes_to_read == sum(tensor.nbytes for tensor in tiny.tensors.values())


@pytest.mark.parametrize(("target", "expected"), [("ptpc_fp8", [0, 200, 272]), ("per_block_fp8", [0, 2, 3])])
def test_each_part_begins_a_new_row_of_scales(tiny, target, expected):
    plan = tiny.plan({"global_quant_config": target})
    steps = [s for s in plan.steps if s.module == QKV and s.placement.parameter == "weight"]
    assert sorted(step.scale_offset for step in steps) == expected


def test_a_tied_head_takes_no_bytes(make_tiny):
    tiny = make_tiny(tied=True)
    plan = tiny.plan({"global_quant_config": "mxfp4"})
    head = layer(plan, "lm_head")
    assert (head.bytes_after, head.format) == (0, None)
    assert [step.module for step in plan.steps if "embed" in step.tensor.name] == ["model.embed_tokens"]


def test_an_override_of_a_tied_head_reads_the_embedding_twice(make_tiny):
    tiny = make_tiny(tied=True)
    plan = tiny.plan({"layer_quant_config": {"lm_head": "mxfp4"}})
    head = layer(plan, "lm_head")
    assert (head.format.name, head.bytes_after) == ("mxfp4", 50 * 48 + 50 * 3)
    assert {s.module for s in plan.steps if "embed" in s.tensor.name} == {"model.embed_tokens", "lm_head"}


def test_missing_tensor(tiny):
    del tiny.tensors[f"{O_PROJ}.weight"]
    with pytest.raises(CheckpointError, match=f"tensor {O_PROJ}.weight is missing from {tiny.folder}"):
        tiny.plan()


def test_wrong_shape(tiny):
    tiny.tensors[f"{O_PROJ}.weight"] = torch.zeros(96, 201)
    with pytest.raises(CheckpointError, match=rf"{O_PROJ}.weight of .* has shape \[96, 201\]; .* needs \[96, 200\]"):
        tiny.plan()


@pytest.mark.parametrize("name", [f"{O_PROJ}.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize(("dtype", "shown"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.uint8, "U8")])
def test_quantized_or_integer_source(tiny, name, dtype, shown):
    tiny.tensors[name] = torch.zeros(tiny.tensors[name].shape).to(dtype)
    with pytest.raises(
        CheckpointError, match=f"tensor {name} of .* is {shown}( without its scales .*)?; accepted: BF16, F16, F32; "
    ):
        tiny.plan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_float_sources(make_tiny, dtype):
    plan = make_tiny(dtype=dtype).plan(RECIPE)
    assert layer(plan, QKV).source == {torch.float16: "F16", torch.float32: "F32"}[dtype]


def test_unknown_tensors(tiny):
    for i in range(5):
        tiny.tensors[f"vision.{i}.weight"] = torch.zeros(1)
    with pytest.raises(
        CheckpointError, match=r"^the model takes no such tensor as vision\.0\.weight, .* and 2 more of "
    ):
        tiny.plan()


def test_scale_beside_a_float_weight(tiny):
    tiny.tensors[f"{O_PROJ}.weight_scale_inv"] = torch.zeros(1, 2)
    with pytest.raises(CheckpointError, match=r"takes no such tensor as .*o_proj\.weight_scale_inv of "):
        tiny.plan()


def test_buffers_are_passed_over(tiny):
    tiny.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    tiny.tensors["model.layers.0.self_attn.masked_bias"] = torch.zeros(4)
    assert not tiny.plan().warnings


def test_a_copy_of_the_head_is_passed_over_only_if_tied(make_tiny):
    tiny = make_tiny(tied=True)
    tiny.tensors["lm_head.weight"] = torch.zeros(50, 96)
    assert not tiny.plan().warnings


def test_layers_behind_the_last_one_are_named(tiny):
    tiny.tensors["model.layers.1.extra.weight"] = torch.zeros(1)
    plan = tiny.plan()
    assert plan.warnings == ("passed over, being of layers behind the model's last one: model.layers.1.extra.weight",)


def test_unknown_tensor_of_a_layer_that_is_loaded(tiny):
    tiny.tensors["model.layers.0.extra.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.extra\.weight"):
        tiny.plan()


@pytest.mark.parametrize("recipe", [None, RECIPE])
def test_quantized_checkpoint(tiny, recipe):
    with pytest.raises(CheckpointError, match="quant_method 'gptq'"):
        tiny.plan(recipe, config={"quantization_config": {"quant_method": "gptq"}})


def test_parts_that_disagree(tiny):
    with pytest.raises(RecipeError, match=QKV):
        tiny.plan({"global_quant_config": "mxfp4", "layer_quant_config": {"*.q_proj": "ptpc_fp8"}})


def test_override_without_a_match(tiny):
    with pytest.raises(RecipeError, match="qvk_proj"):
        tiny.plan({"layer_quant_config": {"*.qvk_proj": "ptpc_fp8"}})


def test_memory(tiny):
    plan = tiny.plan(RECIPE)
    needed = plan.weight_bytes + plan.layout_bytes + plan.loading_bytes
    check_memory(plan, needed)
    with pytest.raises(ConfigError, match=r"not enough memory on cpu for tiny: .* needed .* available"):
        check_memory(plan, needed - 1)
    with pytest.raises(ConfigError, match="KV cache"):
        check_memory(plan, needed, cache_bytes=plan.loading_bytes + 1)


def test_loading_takes_at_most_the_budget(tiny):
    import dataclasses

    plan = tiny.plan()
    huge = dataclasses.replace(plan, steps=plan.steps * 100_000)
    assert huge.loading_bytes == BUDGET
    assert plan.loading_bytes < BUDGET


def test_report_without_times(tiny):
    report = tiny.plan(RECIPE).to_report()
    ranks, sizes = ["tensor_parallel_size", "expert_parallel"], ["bytes_wanted", "bytes_read"]
    named = ["num_layers", "layers", "kept", "unmatched_patterns"]
    assert list(report) == ["model", "online_quant_config", *ranks, *sizes, *named]
    assert (report["tensor_parallel_size"], report["expert_parallel"]) == (1, False)
    assert report["bytes_read"] == report["bytes_wanted"] > 0
    assert report["num_layers"] == 2
    assert report["layers"][0] == {
        "layer": QKV,
        "quant_type": "per_Token",
        "quant_dtype": "torch.float8_e4m3fn",
        "source": "BF16",
        "pattern": "global_quant_config",
        "activation": "fp8_per_token",
        "bytes_before": 312 * 96 * 2,
        "bytes_after": 312 * 96 + 312 * 4,
        "layout_bytes": 312 * 96 * 4,
    }
    assert [row["layer"] for row in report["kept"]] == ["lm_head"]
    assert report["kept"][0]["reason"]
    assert report["unmatched_patterns"] == ["nothing"]


MTP = [
    LayerNames(f"model.layers.1.{name}", (f"model.layers.1.{name}",), protected, not_loaded="an MTP layer")
    for name, protected in (("eh_proj", "MTP eh_proj"), ("self_attn.o_proj", None))
]


def test_layers_that_are_not_loaded_are_kept_and_known(tiny):
    for names in MTP:
        tiny.tensors[f"{names.module}.weight"] = torch.zeros(96, 200)
    tiny.tensors["model.layers.1.enorm.weight"] = torch.zeros(96)
    plan = tiny.plan({"global_quant_config": "mxfp4", "exclude_layer": "*.eh_proj"}, not_loaded=MTP)
    assert plan.warnings == ()
    assert plan.unmatched_patterns == ()
    rows = {row["layer"]: row["reason"] for row in plan.to_report()["kept"]}
    assert {rows[names.module] for names in MTP} == {"not loaded: an MTP layer"}
    mtp = layer(plan, "model.layers.1.eh_proj")
    assert (mtp.bytes_before, mtp.bytes_after, mtp.source) == (96 * 200 * 4, 0, "F32")
    assert not any(step.tensor.name.startswith("model.layers.1.") for step in plan.steps)


def test_layers_that_are_not_loaded_must_be_in_the_checkpoint(tiny):
    plan = tiny.plan(not_loaded=MTP)
    assert not {row.name for row in plan.layers} & {names.module for names in MTP}
    with pytest.raises(RecipeError, match="eh_proj"):
        tiny.plan({"layer_quant_config": {"*.eh_proj": "mxfp4"}}, not_loaded=MTP)
