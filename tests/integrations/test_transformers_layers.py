"""Which layers of a transformers model a recipe reaches, by which names, and how they come into memory."""

import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from requant_models import BLOCK_FP8, quantize_checkpoint
from requant_tensors import bits
from requant_transformers import PROMPT, load, make_checkpoint, rewrite, tensors_of
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

import requant
from requant.engine.build import plan_model
from requant.engine.config import EngineConfig
from requant.integrations.transformers import OnlineQuantConfig, QuantizedExperts, QuantizedLinear
from requant.integrations.transformers.load import Loader

PTPC = {"global_quant_config": "ptpc_fp8"}
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = ("qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v4")
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in kinds}


def formats(model: nn.Module, prefix: str = "model.layers.1.") -> dict[str, str]:
    """The quantized modules of a layer."""
    return {
        name.removeprefix(prefix): module.format.name
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear | QuantizedExperts) and name.startswith(prefix)
    }


@pytest.mark.parametrize(
    "pattern",
    [
        "*.qkv_proj",  # the fused name
        "re:[qkv]_proj",  # the parts' names
        "model.layers.?.self_attn.qkv_proj.weight",
    ],
)
def test_a_fused_layer_goes_by_all_of_its_names(checkpoints: dict[str, Path], pattern: str) -> None:
    model = load(checkpoints["qwen3"], layer_quant_config={pattern: "mxfp4"})
    assert formats(model) == {f"self_attn.{part}_proj": "mxfp4" for part in "qkv"}


@pytest.mark.parametrize(
    "pattern",
    [
        "*.mlp.experts",  # transformers' module
        "*.experts.*",  # transformers' parameters, and the checkpoint's matrices
        "re:ffn.experts.\\d+.w[123]",  # the checkpoint's names
        "layers.*.ffn.experts",
        "re:mlp.experts.(gate_up|down)_proj",
    ],
)
def test_experts_go_by_transformers_and_the_checkpoints_names(
    tmp_path: Path, checkpoints: dict[str, Path], pattern: str
) -> None:
    """DeepSeek-V4, with the names of the public checkpoints, which are not transformers'."""
    (tmp_path / "config.json").write_text((checkpoints["deepseek_v4"] / "config.json").read_text())
    rewrite(tmp_path, {k.removeprefix("model."): v for k, v in tensors_of(checkpoints["deepseek_v4"]).items()})
    assert formats(load(tmp_path, layer_quant_config={pattern: "mxfp4"})) == {"mlp.experts": "mxfp4"}


@pytest.mark.parametrize("pattern", ["*.wq_b", "*.attn.wq_b.weight"])
def test_a_linear_goes_by_the_checkpoints_name(checkpoints: dict[str, Path], pattern: str) -> None:
    model = load(checkpoints["deepseek_v4"], layer_quant_config={pattern: "mxfp4"})
    expected = {"self_attn.q_b_proj": "mxfp4"}
    if pattern == "*.wq_b":
        expected["self_attn.compressor.indexer.q_b_proj"] = "mxfp4"
    assert formats(model) == expected


def test_deepseek_v4_keeps_its_sensitive_layers(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["deepseek_v4"], torch.bfloat16, **PTPC)
    assert set(formats(model)) == {
        *(
            f"self_attn.{name}"
            for name in ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj", "compressor.indexer.q_b_proj")
        ),
        "mlp.experts",
        *(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
    }
    kept = {row["layer"]: row["reason"] for row in model.hf_quantizer.report["kept"]}
    attention = "model.layers.1.self_attn"
    assert kept[f"{attention}.o_a_proj"] == "cannot be quantized: DeepseekV4GroupedLinear is not a plain product"
    for name in ("kv_proj", "gate_proj", "indexer.kv_proj", "indexer.gate_proj", "indexer.scorer.weights_proj"):
        assert kept[f"{attention}.compressor.{name}"].startswith("cannot be quantized: transformers keeps it")
    assert kept["lm_head"] == "protected: lm_head"


def test_routers_are_kept_and_an_override_of_one_is_told(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="requant"):
        model = load(checkpoints["deepseek_v3"], layer_quant_config={"*.mlp.gate": "mxfp4"}, exclude_layer="*.nothing")
    assert "'*.mlp.gate' has no effect: it matches only layers that cannot be quantized" in caplog.text
    assert "exclude_layer '*.nothing' matches no layer" in caplog.text
    assert model.hf_quantizer.report["unmatched_patterns"] == ["*.nothing"]
    assert formats(model) == {}
    stored = tensors_of(checkpoints["deepseek_v3"])["model.layers.1.mlp.gate.weight"]
    assert torch.equal(model.model.layers[1].mlp.gate.weight, stored.float())


def test_an_excluded_layer_keeps_the_checkpoints_values(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["qwen3_moe"], torch.bfloat16, exclude_layer=["*.experts", "*.o_proj"], **PTPC)
    assert set(formats(model)) == {f"self_attn.{part}_proj" for part in "qkv"}
    own = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3_moe"], dtype=torch.bfloat16)
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.o_proj.weight"):
        assert torch.equal(model.get_parameter(f"model.layers.0.{name}"), own.get_parameter(f"model.layers.0.{name}"))


@pytest.mark.parametrize("also_in_the_file", [False, True])
def test_a_tied_head_is_quantized_as_a_copy(tmp_path: Path, also_in_the_file: bool) -> None:
    make_checkpoint(tmp_path, "qwen3", torch.float32, tie_word_embeddings=True)
    tensors = tensors_of(tmp_path)
    embedding = tensors["model.embed_tokens.weight"]
    assert "lm_head.weight" not in tensors
    if also_in_the_file:
        rewrite(tmp_path, {**tensors, "lm_head.weight": embedding.clone()})
    untouched = load(tmp_path, torch.bfloat16, **PTPC)
    assert untouched.lm_head.weight is untouched.model.embed_tokens.weight
    model = load(tmp_path, torch.bfloat16, layer_quant_config={"lm_head": "per_block_fp8"})
    expected = requant.quantize(embedding, "per_block_fp8")
    assert torch.equal(bits(model.lm_head.weight), bits(expected.data))
    assert torch.equal(bits(model.lm_head.weight_scale), bits(expected.scale))
    assert torch.equal(model.model.embed_tokens.weight, embedding.bfloat16())
    model.tie_weights()
    assert model.lm_head.weight.dtype == torch.float8_e4m3fn
    assert model.generate(PROMPT, max_new_tokens=3).shape[1] == PROMPT.shape[1] + 3


def test_layers_of_multi_token_prediction_are_matched_and_not_loaded(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tensors = tensors_of(checkpoints["deepseek_v3"])
    more = {k.replace(".1.", ".2.", 1): v.clone() for k, v in tensors.items() if k.startswith("model.layers.1.")}
    (tmp_path / "config.json").write_text((checkpoints["deepseek_v3"] / "config.json").read_text())
    rewrite(tmp_path, {**tensors, **more, "model.layers.2.eh_proj.weight": torch.ones(96, 192)})
    model = load(tmp_path, layer_quant_config={"model.layers.2.*": "mxfp4"})
    kept = {row["layer"]: row["reason"] for row in model.hf_quantizer.report["kept"]}
    assert kept["model.layers.2.mlp.experts"] == "not loaded: transformers' model does not have it"
    assert "model.layers.2.eh_proj" in kept


def test_recipes_are_read_from_files_and_text(tmp_path: Path) -> None:
    recipe = {"global_quant_config": "MXFP4 ", "exclude_layer": "lm_head"}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    expected = {"global_quant_config": "mxfp4", "exclude_layer": ["lm_head"], "quant_method": "requant"}
    for given in (recipe, json.dumps(recipe), str(tmp_path / "recipe.json")):
        assert OnlineQuantConfig.from_recipe(given).to_dict() == expected
    assert OnlineQuantConfig.from_dict(expected).to_dict() == expected


@pytest.mark.parametrize("name", ["ptpc_fp8", "per_block_fp8", "mxfp4"])
def test_what_transformers_cuts_is_quantized_in_its_parts(tmp_path: Path, name: str) -> None:
    """A checkpoint with one tensor for gate and up, which a conversion of the architecture takes apart."""
    make_checkpoint(tmp_path, "qwen3", torch.float32)
    before = get_checkpoint_conversion_mapping("qwen3")
    tensors = tensors_of(tmp_path)
    for layer in range(2):
        parts = [tensors.pop(f"model.layers.{layer}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"model.layers.{layer}.mlp.both.weight"] = torch.cat(parts)
    rewrite(tmp_path, tensors)
    targets = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    register_checkpoint_conversion_mapping("qwen3", [WeightConverter("mlp.both.weight", targets, [Chunk(0)])], True)
    try:
        model = load(tmp_path, torch.bfloat16, global_quant_config=name)
        assert formats(load(tmp_path, layer_quant_config={"*.both": name})) == {
            "mlp.gate_proj": name,
            "mlp.up_proj": name,
        }
        quantize_checkpoint(tmp_path, BLOCK_FP8, "per_block_fp8", lambda owner: owner.endswith(".both"))
        with pytest.raises(requant.errors.CheckpointError, match=r"both.weight .* is F8_E4M3, and transformers cuts"):
            load(tmp_path, global_quant_config=name)
    finally:
        register_checkpoint_conversion_mapping("qwen3", before or [], True)
    for index, part in enumerate(("gate", "up")):
        expected = requant.quantize(tensors["model.layers.1.mlp.both.weight"].chunk(2)[index], name)
        linear = model.get_submodule(f"model.layers.1.mlp.{part}_proj")
        assert torch.equal(bits(linear.weight), bits(expected.data))
        assert torch.equal(bits(linear.weight_scale), bits(expected.scale))


@pytest.mark.parametrize("quantized", [False, True])
def test_one_matrix_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantized: bool) -> None:
    """When a tensor is read, no other one of the checkpoint is alive: not its stack, nor its neighbours."""
    make_checkpoint(tmp_path, "qwen3_moe", num_experts=16)
    if quantized:
        quantize_checkpoint(tmp_path, BLOCK_FP8, "per_block_fp8", lambda name: ".experts." in name)
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []
    original = Loader.collect

    def watched(self: Loader, name: str, read: Any) -> None:
        def once() -> Tensor:
            if not name.endswith("_inv"):
                counts.append(sum(ref() is not None for ref in alive))
            value = read()
            alive.append(weakref.ref(value))
            return value

        original(self, name, once)

    monkeypatch.setattr(Loader, "collect", watched)
    load(tmp_path, torch.bfloat16, **PTPC)
    assert len(counts) == 2 * (4 + 3 * 16)
    assert max(counts) == 0


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*/*.json")), ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_the_recipes_of_this_repository_mean_the_same_as_in_the_engine(
    checkpoints: dict[str, Path], file: Path
) -> None:
    folder = checkpoints[file.parent.name.replace("-", "_")]
    config = OnlineQuantConfig.from_recipe(file)
    told = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).hf_quantizer.report
    assert told["num_layers"] > 0
    if file.parent.name == "deepseek-v4":
        return  # the engine does not run it
    plan = plan_model(EngineConfig.create(model=str(folder), online_quant_config=str(file), device="cpu")).plan
    expected = {row["layer"]: row["quant_type"] for row in plan.to_report()["layers"]}
    assert {row["layer"]: row["quant_type"] for row in told["layers"]} == expected
    assert {row["layer"] for row in told["kept"]} == {layer.name for layer in plan.kept}
    assert told["unmatched_patterns"] == list(plan.unmatched_patterns)


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
def test_other_heads_find_the_same_layers(checkpoints: dict[str, Path], kind: Any) -> None:
    """Of a checkpoint with a language model's head: names lose a prefix, a new head is not quantized."""
    config = OnlineQuantConfig(global_quant_config="mxfp4")
    model = kind.from_pretrained(checkpoints["qwen3_moe"], quantization_config=config, num_labels=3)
    model.config.pad_token_id = 0
    whole = load(checkpoints["qwen3_moe"], global_quant_config="mxfp4").model
    base = model if kind is AutoModel else model.model
    assert formats(base, "layers.1.") == formats(whole, "layers.1.") != {}
    assert torch.equal(bits(base.layers[1].mlp.experts.down_proj), bits(whole.layers[1].mlp.experts.down_proj))
    assert not [name for name, value in model.state_dict().items() if value.is_meta]
    kept = {row["layer"]: row["reason"] for row in model.hf_quantizer.report["kept"]}
    assert kept["lm_head"] == "not loaded: transformers' model does not have it"
    assert kept.get("score") in (None, "not loaded: the checkpoint does not have it")
    assert torch.isfinite(model(PROMPT)[0]).all()


def test_a_model_without_a_linear_is_loaded_as_it_is(tmp_path: Path) -> None:
    """GPT-2 has convolutions, which are never quantized."""
    model = load(make_checkpoint(tmp_path, "gpt2"), **PTPC)
    assert formats(model, "") == {}
    assert model.hf_quantizer.report["num_layers"] == 0
