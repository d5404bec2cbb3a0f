"""Weights that transformers loads with a recipe: those of each checkpoint matrix by itself, and of requant's engine."""

from pathlib import Path

import pytest
import torch
from requant_tensors import bits
from requant_transformers import PROMPT, load, make_checkpoint, tensors_of
from torch import Tensor

import requant
from requant.engine.build import plan_model
from requant.engine.config import EngineConfig
from requant.formats import FORMATS
from requant.integrations.transformers import QuantizedExperts, QuantizedLinear
from requant.loading import load as load_built_in

NATIVE = ["qwen3", "qwen3_moe", "deepseek_v3"]
# Where a part of a layer's parts that transformers keeps apart is in the engine.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
MIXED = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*.mlp.*": "mxfp4", "*o_proj": "per_block_fp8"}}
RECIPES = {**{name: {"global_quant_config": name} for name in FORMATS}, "mixed": MIXED}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sizes that no block divides: 96 and 160 columns, experts of 72 rows."""
    changes = {"hidden_size": 160}
    kinds = [*NATIVE, "deepseek_v4", "gpt_oss"]
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind, torch.float32, **changes) for kind in kinds}


def matrices(experts: str, tensors: dict[str, Tensor], name: str, count: int, *parts: str) -> list[list[Tensor]]:
    """The checkpoint's matrices of each expert."""
    return [[tensors[f"{experts}.{e}.{part}.weight"] for part in parts] for e in range(count)]


def check_experts(module: QuantizedExperts, index: int, name: str, expected: list[list[Tensor]]) -> None:
    stack = module.stack(index)
    assert len(stack) == len(expected)
    for expert, parts in enumerate(expected):
        quantized = [requant.quantize(part, name) for part in parts]
        assert torch.equal(bits(stack.data[expert]), bits(torch.cat([q.data for q in quantized])))
        assert torch.equal(bits(stack.scale[expert]), bits(torch.cat([q.scale for q in quantized])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", NATIVE)
def test_weights_are_those_of_each_checkpoint_matrix(
    checkpoints: dict[str, Path], kind: str, name: str, dtype: torch.dtype
) -> None:
    """Quantized from the checkpoint's float32, whatever the model's dtype."""
    model, tensors = load(checkpoints[kind], dtype, global_quant_config=name), tensors_of(checkpoints[kind])
    linears = {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    owners = {
        key.removesuffix(".weight")
        for key, tensor in tensors.items()
        if tensor.ndim == 2 and ".experts." not in key and not key.endswith(("gate.weight", "embed_tokens.weight"))
    }
    assert set(linears) == owners - {"lm_head"}
    for path, module in linears.items():
        expected = requant.quantize(tensors[f"{path}.weight"], name)
        assert torch.equal(bits(module.weight), bits(expected.data)), path
        assert torch.equal(bits(module.weight_scale), bits(expected.scale)), path
    experts = {path: module for path, module in model.named_modules() if isinstance(module, QuantizedExperts)}
    assert len(experts) == {"qwen3": 0, "qwen3_moe": 2, "deepseek_v3": 1}[kind]
    for path, module in experts.items():
        check_experts(module, 0, name, matrices(path, tensors, name, 8, "gate_proj", "up_proj"))
        check_experts(module, 1, name, matrices(path, tensors, name, 8, "down_proj"))


@pytest.mark.parametrize("name", FORMATS)
def test_deepseek_v4_follows_transformers_renamings(checkpoints: dict[str, Path], name: str) -> None:
    model, tensors = load(checkpoints["deepseek_v4"], global_quant_config=name), tensors_of(checkpoints["deepseek_v4"])
    for layer in range(3):
        ours, theirs = f"model.layers.{layer}", f"model.layers.{layer}"
        for module, tensor in {"q_b_proj": "wq_b", "kv_proj": "wkv", "o_b_proj": "wo_b"}.items():
            linear = model.get_submodule(f"{ours}.self_attn.{module}")
            expected = requant.quantize(tensors[f"{theirs}.attn.{tensor}.weight"], name)
            assert torch.equal(bits(linear.weight), bits(expected.data))
            assert torch.equal(bits(linear.weight_scale), bits(expected.scale))
        experts = model.get_submodule(f"{ours}.mlp.experts")
        check_experts(experts, 0, name, matrices(f"{theirs}.ffn.experts", tensors, name, 4, "w1", "w3"))
        check_experts(experts, 1, name, matrices(f"{theirs}.ffn.experts", tensors, name, 4, "w2"))


@pytest.mark.parametrize("name", FORMATS)
def test_gpt_oss_stacks_are_turned_to_rows_of_outputs(checkpoints: dict[str, Path], name: str) -> None:
    model, tensors = load(checkpoints["gpt_oss"], global_quant_config=name), tensors_of(checkpoints["gpt_oss"])
    for path in ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"):
        for index, part in enumerate(("gate_up_proj", "down_proj")):
            expected = [[matrix.T.contiguous()] for matrix in tensors[f"{path}.{part}"]]
            check_experts(model.get_submodule(path), index, name, expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", NATIVE)
def test_weights_equal_the_built_in_engines(checkpoints: dict[str, Path], kind: str, recipe: str) -> None:
    theirs = load(checkpoints[kind], **RECIPES[recipe])
    config = EngineConfig.create(
        model=str(checkpoints[kind]), online_quant_config=RECIPES[recipe], device="cpu", dtype="float32"
    )
    planned = plan_model(config)
    load_built_in(planned.plan, planned.model)
    compared = 0
    for layer in planned.plan.quantized:
        ours, parent = planned.model.get_submodule(layer.name), layer.name.rpartition(".")[0]
        if layer.name.endswith(".experts"):
            module = theirs.get_submodule(layer.name)
            pairs = {"w13_weight": module.gate_up_proj, "w13_weight_scale": module.gate_up_proj_scale}
            pairs |= {"w2_weight": module.down_proj, "w2_weight_scale": module.down_proj_scale}
        else:
            parts = FUSED.get(layer.name.rpartition(".")[2], (layer.name.rpartition(".")[2],))
            modules = [theirs.get_submodule(f"{parent}.{part}") for part in parts]
            pairs = {name: torch.cat([getattr(m, name) for m in modules]) for name in ("weight", "weight_scale")}
        for name, value in pairs.items():
            assert torch.equal(bits(getattr(ours, name)), bits(value)), f"{layer.name}.{name}"
            compared += 1
    assert compared >= 2 * len(planned.plan.quantized) > 0
    # The same rows of the report, layer for layer, in the names of the engine.
    told = {row["layer"]: row for row in theirs.hf_quantizer.report["layers"]}
    for row in planned.plan.to_report()["layers"]:
        if row["layer"].endswith("kv_b_proj"):  # which the engine multiplies into its queries instead
            row["activation"] = told[row["layer"]]["activation"]
        assert told.pop(row["layer"]) == row
    assert not told


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", [*NATIVE, "deepseek_v4", "gpt_oss"])
def test_generate(checkpoints: dict[str, Path], kind: str, name: str) -> None:
    model = load(checkpoints[kind], torch.bfloat16, global_quant_config=name)
    assert not [key for key, value in model.state_dict().items() if value.is_meta]
    out = model.generate(PROMPT, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert out.shape == (1, PROMPT.shape[1] + 5)
    assert torch.isfinite(model(PROMPT).logits).all()
