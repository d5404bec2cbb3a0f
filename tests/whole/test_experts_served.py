"""Models with experts behind the real server: BF16, block FP8 and MXFP4 checkpoints, under recipes that mix formats."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from requant_models import BLOCK_FP8, MXFP4, QUARK, check_same_tokens, make_checkpoint, quantize_checkpoint
from requant_server import NAME, serve
from requant_tensors import bits
from safetensors.torch import load_file

import requant
from requant import LLM, SamplingParams
from requant.engine.build import plan_model
from requant.engine.config import EngineConfig
from requant.loading import load

RECIPE = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*expert*": "mxfp4"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}
PROMPTS = ["the quick brown fox", "jumps", "over the lazy dog the quick", "fox fox fox"]
SETTINGS = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 8_000_000}
NORMS_AND_MORE = ("norm", "embed_tokens", "lm_head", "gate")


def _linear(name: str) -> bool:
    return not name.endswith(NORMS_AND_MORE)


def _expert(name: str) -> bool:
    return ".experts." in name


# Inner sizes of experts are multiples of 32 where MXFP4 stores them.
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "qwen3_moe": lambda folder: make_checkpoint(folder, "qwen3_moe"),
    "deepseek_v3": lambda folder: make_checkpoint(folder, "deepseek_v3"),
    "deepseek_v3-fp8": lambda folder: _quantized(folder, "deepseek_v3", BLOCK_FP8, "per_block_fp8", _linear),
    "qwen3_moe-mxfp4": lambda folder: _quantized(folder, "qwen3_moe", MXFP4, "mxfp4", _expert),
    "qwen3_moe-quark": lambda folder: _quantized(folder, "qwen3_moe", QUARK, "mxfp4", _expert),
}


def _quantized(folder: Path, kind: str, section: dict[str, object], format: str, owners: Callable[[str], bool]) -> Path:
    sizes = {"moe_intermediate_size": 64} if format == "mxfp4" else {}
    make_checkpoint(folder, kind, torch.bfloat16, **sizes)
    quantize_checkpoint(folder, section, format, owners)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in CHECKPOINTS.items()}


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3-fp8", "qwen3_moe-mxfp4"])
def test_the_server_gives_the_tokens_of_llm(checkpoints: dict[str, Path], name: str, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(str(checkpoints[name]), RECIPE, online_quant_info_dir=str(tmp_path), **SETTINGS) as llm:
        expected = [out.outputs[0] for out in llm.generate(PROMPTS, params, progress=False)]
    with serve(checkpoints[name], RECIPE, tmp_path / "served", SETTINGS) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        extra = {"ignore_eos": True}
        answer = client.completions.create(model=NAME, prompt=PROMPTS, temperature=0.0, max_tokens=16, extra_body=extra)
    assert [choice.text for choice in answer.choices] == [out.text for out in expected]
    (file,) = (tmp_path / "served").glob("online_quant_info_*.json")
    report = json.loads(file.read_text())
    kinds = {row["layer"]: (row["source"], row["quant_type"]) for row in report["layers"]}
    kept = {row["layer"]: row["reason"] for row in report["kept"]}
    experts = "model.layers.1.mlp.experts"
    if name == "qwen3_moe-mxfp4":
        assert kept[experts] == "mxfp4 in the checkpoint already, which is its target"
        assert kinds["model.layers.1.self_attn.o_proj"] == ("BF16", "per_Token")
    else:
        source = "per_block_fp8" if "fp8" in name else "F32"
        assert kinds[experts] == (source, "per_1x32")
        assert kinds["model.layers.1.self_attn.o_proj"] == (source, "per_Token")


@pytest.mark.parametrize("recipe", [None, RECIPE, {"global_quant_config": "ptpc_fp8"}], ids=["none", "mixed", "fp8"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_request_alone_and_in_a_batch_of_32(
    checkpoints: dict[str, Path], name: str, recipe: object, tmp_path: Path
) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 500) for _ in range(1 + 3 * i)] for i in range(32)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    settings = {**SETTINGS, "no_enable_prefix_caching": True, "device": "cpu"}
    with LLM(str(checkpoints[name]), recipe, online_quant_info_dir=str(tmp_path), **settings) as llm:
        alone = [llm.generate([prompt], params, progress=False)[0].outputs[0] for prompt in prompts[::4]]
        together = [out.outputs[0] for out in llm.generate(prompts, params, progress=False)]
    check_same_tokens(alone, together[::4])
    assert len({out.token_ids for out in together}) > 20


@pytest.mark.parametrize("recipe", [None, RECIPE, {"global_quant_config": "mxfp4"}], ids=["none", "mixed", "mxfp4"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_plan_counts_every_byte_and_the_report_every_layer(
    checkpoints: dict[str, Path], name: str, recipe: object
) -> None:
    config = EngineConfig.create(model=str(checkpoints[name]), online_quant_config=recipe, device="cpu")
    planned = plan_model(config)
    load(planned.plan, planned.model)
    assert sum(parameter.nbytes for parameter in planned.model.parameters()) == planned.plan.weight_bytes
    report = planned.plan.to_report()
    listed = [row["layer"] for row in (*report["layers"], *report["kept"])]
    assert sorted(listed) == sorted(layer.names.module for layer in planned.model.quantizable())


def test_mxfp4_sources_are_warned_of(checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    for name in ("qwen3_moe-mxfp4", "qwen3_moe-quark"):
        caplog.clear()
        config = EngineConfig.create(
            model=str(checkpoints[name]), online_quant_config={"global_quant_config": "ptpc_fp8"}, device="cpu"
        )
        planned = plan_model(config)
        load(planned.plan, planned.model)
        warning = "2 layers: mxfp4 in the checkpoint, passed through unchanged (model.layers.0.mlp.experts first)"
        assert warning in [record.getMessage() for record in caplog.records]
        kept = {row["layer"]: row["reason"] for row in planned.plan.to_report()["kept"]}
        reason = "mxfp4 in the checkpoint, passed through unchanged, not quantized to ptpc_fp8"
        assert kept["model.layers.0.mlp.experts"] == reason


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("target", ["ptpc_fp8", "per_block_fp8", "mxfp4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "deepseek_v3-fp8"])
def test_every_experts_weights_are_those_of_quantize(
    checkpoints: dict[str, Path], name: str, target: str, device: str
) -> None:
    source = load_file(checkpoints[name] / "model.safetensors")
    recipe = {"layer_quant_config": {"*.mlp.experts": target}}
    config = EngineConfig.create(model=str(checkpoints[name]), online_quant_config=recipe, device=device)
    planned = plan_model(config)
    load(planned.plan, planned.model)
    experts = planned.model.get_submodule("model.layers.1.mlp.experts")

    def expected(part: str) -> requant.formats.QuantizedTensor:
        weight = source[f"{part}.weight"]
        if weight.dtype == torch.float8_e4m3fn:
            format = requant.formats.FORMATS["per_block_fp8"]
            scale = source[f"{part}.weight_scale_inv"]
            stored = requant.formats.QuantizedTensor(weight, scale, format, tuple(weight.shape))
            if target == "per_block_fp8":
                return stored
            weight = stored.dequantize(torch.bfloat16)
        return requant.quantize(weight, target)

    for expert in range(8):
        owner = f"model.layers.1.mlp.experts.{expert}"
        gate, up, down = (expected(f"{owner}.{part}_proj") for part in ("gate", "up", "down"))
        assert torch.equal(bits(experts.w13_weight[expert]), bits(torch.cat([gate.data, up.data])))
        assert torch.equal(bits(experts.w13_weight_scale[expert]), bits(torch.cat([gate.scale, up.scale])))
        assert torch.equal(bits(experts.w2_weight[expert]), bits(down.data))
        assert torch.equal(bits(experts.w2_weight_scale[expert]), bits(down.scale))
