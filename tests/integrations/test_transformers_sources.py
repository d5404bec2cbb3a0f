"""Checkpoints that are quantized already: requantized, kept bit for bit, passed through or dequantized."""

import json
import logging
from pathlib import Path

import pytest
import torch
from requant_models import BLOCK_FP8, quantize_checkpoint
from requant_tensors import bits
from requant_transformers import PROMPT, blocks_of_gpt_oss, load, make_checkpoint, rewrite, tensors_of
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.quantizers.auto import AutoHfQuantizer

import requant
from requant.engine.build import plan_model
from requant.engine.config import EngineConfig
from requant.formats import FORMATS
from requant.integrations.transformers import OnlineQuantConfig
from requant.loading import load as load_built_in

BLOCK = FORMATS["per_block_fp8"]
KEPT = ("norm", "embed_tokens", "lm_head", "gate")


def block_fp8(folder: Path, kind: str, **changes: object) -> Path:
    make_checkpoint(folder, kind, torch.bfloat16, **changes)
    quantize_checkpoint(folder, BLOCK_FP8, "per_block_fp8", lambda name: not name.endswith(KEPT))
    return folder


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = ("qwen3", "qwen3_moe", "deepseek_v3")
    return {kind: block_fp8(tmp_path_factory.mktemp(kind), kind, hidden_size=160) for kind in kinds}


def bfloat16_of(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A block FP8 matrix as the contract dequantizes it."""
    codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
    return BLOCK.dequantize(codes, scale.float(), tuple(codes.shape)).to(torch.bfloat16)


@pytest.mark.parametrize("name", ["ptpc_fp8", "mxfp4"])
def test_block_fp8_is_dequantized_to_bfloat16_and_quantized(fp8: dict[str, Path], name: str) -> None:
    model, tensors = load(fp8["qwen3_moe"], global_quant_config=name), tensors_of(fp8["qwen3_moe"])
    expected = requant.quantize(bfloat16_of(tensors, "model.layers.0.self_attn.q_proj"), name)
    linear = model.model.layers[0].self_attn.q_proj
    assert torch.equal(bits(linear.weight), bits(expected.data))
    assert torch.equal(bits(linear.weight_scale), bits(expected.scale))
    stack, path = model.model.layers[1].mlp.experts.stack(0), "model.layers.1.mlp.experts.5"
    parts = [requant.quantize(bfloat16_of(tensors, f"{path}.{part}"), name) for part in ("gate_proj", "up_proj")]
    assert torch.equal(bits(stack.data[5]), bits(torch.cat([part.data for part in parts])))
    assert torch.equal(bits(stack.scale[5]), bits(torch.cat([part.scale for part in parts])))


@pytest.mark.parametrize("recipe", [{"global_quant_config": "per_block_fp8"}, {}, {"exclude_layer": "*"}])
def test_block_fp8_stays_bit_for_bit(fp8: dict[str, Path], recipe: dict[str, object]) -> None:
    """As its own target, without a target, and excluded: always the checkpoint's codes."""
    model, tensors = load(fp8["qwen3_moe"], **recipe), tensors_of(fp8["qwen3_moe"])
    linear, name = model.model.layers[1].self_attn.o_proj, "model.layers.1.self_attn.o_proj"
    assert torch.equal(bits(linear.weight), bits(tensors[f"{name}.weight"]))
    assert torch.equal(bits(linear.weight_scale), bits(tensors[f"{name}.weight_scale_inv"]))
    stack = model.model.layers[1].mlp.experts.stack(1)
    for expert in range(8):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj"
        assert torch.equal(bits(stack.data[expert]), bits(tensors[f"{name}.weight"]))
        assert torch.equal(bits(stack.scale[expert]), bits(tensors[f"{name}.weight_scale_inv"]))
    assert model.hf_quantizer.report["num_layers"] == 0
    assert model.generate(PROMPT, max_new_tokens=3, pad_token_id=0).shape[1] == PROMPT.shape[1] + 3


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_a_mixed_recipe_on_block_fp8_equals_the_built_in_engine(fp8: dict[str, Path], kind: str) -> None:
    recipe = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*.mlp.*": "mxfp4"}, "exclude_layer": "*o_proj"}
    theirs = load(fp8[kind], torch.bfloat16, **recipe)
    config = EngineConfig.create(model=str(fp8[kind]), online_quant_config=recipe, device="cpu")
    planned = plan_model(config)
    load_built_in(planned.plan, planned.model)
    told = theirs.hf_quantizer.report
    assert [row["layer"] for row in planned.plan.to_report()["layers"]] == [row["layer"] for row in told["layers"]]
    for name, ours in planned.model.named_modules():
        if name.endswith((".o_proj", ".down_proj", "_b_proj")):
            module = theirs.get_submodule(name)
            assert torch.equal(bits(ours.weight), bits(module.weight)), name
            assert torch.equal(bits(ours.weight_scale), bits(module.weight_scale)), name
        elif name.endswith(".experts"):
            module = theirs.get_submodule(name)
            assert torch.equal(bits(ours.w13_weight), bits(module.gate_up_proj)), name
            assert torch.equal(bits(ours.w2_weight_scale), bits(module.down_proj_scale)), name


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_deepseek_v4_as_it_is_published(tmp_path: Path, scale: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """Block FP8 with scales called ``scale``, FP4 experts, and layers that stay BF16 (the compressor) or become it."""
    make_checkpoint(tmp_path, "deepseek_v4")
    tensors: dict[str, Tensor] = {}
    for name, value in tensors_of(tmp_path).items():
        public = name.removeprefix("model.")
        owner = public.removesuffix(".weight")
        if ".experts." in name:
            quantized = requant.quantize(value, "mxfp4")
            tensors[public] = quantized.data.view(torch.int8)
            tensors[f"{owner}.scale"] = quantized.scale.view(torch.float8_e8m0fnu)
        elif ".compressor." in name or not owner.endswith(("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")):
            tensors[public] = value
        else:
            quantized = requant.quantize(value, "per_block_fp8")
            power = torch.exp2(quantized.scale.log2().ceil())
            tensors[public] = quantized.data
            tensors[f"{owner}.scale"] = power.to(scale)
    rewrite(tmp_path, tensors, {**BLOCK_FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp4"})
    with caplog.at_level(logging.WARNING, logger="requant"):
        model = load(tmp_path, torch.bfloat16, global_quant_config="ptpc_fp8", exclude_layer="*.fused_wqa_wkv")
    assert "3 layers: mxfp4 in the checkpoint, passed through unchanged (model.layers.0.mlp.experts" in caplog.text
    assert "3 layers: quantized in the checkpoint; dequantized (model.layers.0.self_attn.o_a_proj" in caplog.text
    attention, experts = model.model.layers[1].self_attn, model.model.layers[1].mlp.experts

    def dequantized(owner: str) -> Tensor:
        codes, scales = tensors[f"{owner}.weight"], tensors[f"{owner}.scale"].float()
        return BLOCK.dequantize(codes, scales, tuple(codes.shape)).to(torch.bfloat16)

    expected = requant.quantize(dequantized("layers.1.attn.wq_b"), "ptpc_fp8")
    assert torch.equal(bits(attention.q_b_proj.weight), bits(expected.data))
    assert torch.equal(bits(attention.q_a_proj.weight), bits(tensors["layers.1.attn.wq_a.weight"]))
    assert attention.o_a_proj.weight.dtype == torch.bfloat16
    assert torch.equal(attention.o_a_proj.weight, dequantized("layers.1.attn.wo_a"))
    compressor = attention.compressor
    assert torch.equal(compressor.kv_proj.weight, tensors["layers.1.attn.compressor.wkv.weight"])
    assert torch.equal(
        compressor.indexer.scorer.weights_proj.weight, tensors["layers.1.attn.indexer.weights_proj.weight"]
    )
    stack = experts.stack(0)
    for expert in range(4):
        codes = [tensors[f"layers.1.ffn.experts.{expert}.{part}.weight"] for part in ("w1", "w3")]
        scales = [tensors[f"layers.1.ffn.experts.{expert}.{part}.scale"] for part in ("w1", "w3")]
        assert torch.equal(bits(stack.data[expert]), bits(torch.cat(codes)))
        assert torch.equal(bits(stack.scale[expert]), bits(torch.cat([scale.view(torch.uint8) for scale in scales])))
    assert model.generate(PROMPT, max_new_tokens=3, pad_token_id=0).shape[1] == PROMPT.shape[1] + 3


def test_gpt_oss_passes_through_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "gpt_oss")
    blocks_of_gpt_oss(tmp_path)
    with caplog.at_level(logging.WARNING, logger="requant"):
        model = load(tmp_path, torch.bfloat16, global_quant_config="ptpc_fp8")
    told = "2 layers: mxfp4 in the checkpoint, passed through unchanged (model.layers.0.mlp.experts first)"
    assert told in caplog.text
    tensors, report = tensors_of(tmp_path), model.hf_quantizer.report
    kept = {row["layer"]: row["reason"] for row in report["kept"]}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        assert kept[name] == "mxfp4 in the checkpoint, passed through unchanged, not quantized to ptpc_fp8"
        for index, part in enumerate(("gate_up_proj", "down_proj")):
            stack = model.get_submodule(name).stack(index)
            assert torch.equal(stack.data, tensors[f"{name}.{part}_blocks"].flatten(2))
            assert torch.equal(stack.scale, tensors[f"{name}.{part}_scales"])
    assert {row["layer"] for row in report["layers"]} == {
        f"model.layers.{layer}.self_attn.{part}" for layer in range(2) for part in ("qkv_proj", "o_proj")
    }
    assert model.generate(PROMPT, max_new_tokens=3).shape[1] == PROMPT.shape[1] + 3


def test_the_experts_of_gpt_oss_equal_transformers_dequantized(tmp_path: Path) -> None:
    """transformers' own reading of the blocks is the oracle of which nibble is which."""
    make_checkpoint(tmp_path, "gpt_oss")
    blocks_of_gpt_oss(tmp_path)
    model = load(tmp_path, torch.bfloat16)
    own = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    for layer in range(2):
        for index, part in enumerate(("gate_up_proj", "down_proj")):
            values = model.model.layers[layer].mlp.experts.stack(index).dequantize(torch.bfloat16)
            assert torch.equal(values.transpose(1, 2), getattr(own.model.layers[layer].mlp.experts, part))


def test_scales_may_lie_in_another_file_than_their_weights(fp8: dict[str, Path], tmp_path: Path) -> None:
    tensors = tensors_of(fp8["qwen3_moe"])
    files = {name: "scales.safetensors" if name.endswith("_inv") else "weights.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (tmp_path / "config.json").write_text((fp8["qwen3_moe"] / "config.json").read_text())
    expected = load(fp8["qwen3_moe"], global_quant_config="mxfp4").state_dict()
    for name, value in load(tmp_path, global_quant_config="mxfp4").state_dict().items():
        assert torch.equal(bits(value), bits(expected[name])), name


def test_a_kept_layer_that_is_partly_quantized_is_dequantized(tmp_path: Path) -> None:
    """As in requant's engine, where its parts are one layer; the parts that are not quantized are as they were."""
    make_checkpoint(tmp_path, "qwen3_moe")
    before = tensors_of(tmp_path)
    some = ("layers.0.self_attn.q_proj", "layers.0.mlp.experts.3.up_proj")
    quantize_checkpoint(tmp_path, BLOCK_FP8, "per_block_fp8", lambda name: name.endswith(some))
    model, tensors = load(tmp_path, torch.bfloat16), tensors_of(tmp_path)
    name = "model.layers.0.self_attn"
    assert torch.equal(model.get_parameter(f"{name}.q_proj.weight"), bfloat16_of(tensors, f"{name}.q_proj"))
    assert torch.equal(model.get_parameter(f"{name}.k_proj.weight"), before[f"{name}.k_proj.weight"])
    stack, name = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj"), "model.layers.0.mlp.experts"
    gate, up = stack[3].chunk(2)
    assert torch.equal(up, bfloat16_of(tensors, f"{name}.3.up_proj"))
    assert torch.equal(gate, before[f"{name}.3.gate_proj.weight"])
    assert torch.isfinite(model(PROMPT).logits).all()


def test_one_config_serves_several_checkpoints(fp8: dict[str, Path], tmp_path: Path) -> None:
    config = OnlineQuantConfig(global_quant_config="ptpc_fp8")
    AutoModelForCausalLM.from_pretrained(fp8["qwen3"], quantization_config=config)
    assert config.source is None
    plain = make_checkpoint(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    assert model.hf_quantizer.report["layers"][0]["source"] == "BF16"


def test_transformers_own_configs_are_left_alone(fp8: dict[str, Path]) -> None:
    """What is wrapped answers other pairs as before."""
    merged = AutoHfQuantizer.merge_quantization_configs(BLOCK_FP8, None)
    assert type(merged) is FineGrainedFP8Config
    with pytest.raises(ValueError, match="FineGrainedFP8Config but you are passing a Mxfp4Config"):
        AutoHfQuantizer.merge_quantization_configs(BLOCK_FP8, Mxfp4Config())
