"""What recipes cost on small models that are really trained: figures that do not depend on requant, and its own.

``--models-dir`` names the folder of the models: ``tiny-qwen3-moe``, ``tiny-deepseek-v3-mtp`` and its block FP8 copy,
each with a held-out text (``val.txt``). The constants were measured with transformers in float32 on the same windows.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from requant_models import check_same_tokens
from requant_server import NAME, serve
from safetensors.torch import load_file, save_file

import requant
from requant.formats import FORMATS, QuantizedTensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import perplexity

QWEN, DEEPSEEK, DEEPSEEK_FP8 = "tiny-qwen3-moe", "tiny-deepseek-v3-mtp", "tiny-deepseek-v3-mtp-fp8"
WINDOW = 512
# The first 20,480 tokens, as they are, and with weights alone quantized to MXFP4 (with another rule for the scales):
# routed experts only, every linear layer.
SHORT = 20_480
EXACT = {QWEN: (5.117, 5.291, 5.439), DEEPSEEK: (5.332, 5.413, 5.842)}
# The same with FP8 weights a channel.
FP8_WEIGHTS = {QWEN: 5.135, DEEPSEEK: 5.352}
# All 62,145 tokens.
WHOLE = {QWEN: 6.126, DEEPSEEK: 6.316, DEEPSEEK_FP8: 6.336}


def measure(model: Path, recipe: Any, report: Path, limit: int | None = None, text: Path | None = None) -> float:
    tokens = perplexity.tokenize(str(model), (text or model / "val.txt").read_text(encoding="utf-8"))
    windows = perplexity.cut_windows(tokens, WINDOW, limit, rest=True)
    return perplexity.measure(str(model), recipe, windows, "float32", report)["ppl"]


@pytest.mark.parametrize("name", [QWEN, DEEPSEEK])
def test_unquantized_perplexity(models: Path, name: str, tmp_path: Path) -> None:
    assert measure(models / name, None, tmp_path) == pytest.approx(WHOLE[name], rel=1e-3)


@pytest.fixture(scope="module")
def dequantized(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The block FP8 checkpoint with every weight as float(q) · s in float32."""
    folder = tmp_path_factory.mktemp("dequantized")
    for file in (models / DEEPSEEK_FP8).iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(models / DEEPSEEK_FP8 / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        weight, scale = name.removesuffix("_scale_inv"), tensors.pop(name)
        n, k = tensors[weight].shape
        q = QuantizedTensor(tensors[weight], scale, FORMATS["per_block_fp8"], (n, k))
        tensors[weight] = q.dequantize(torch.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_dequantized_perplexity(models: Path, dequantized: Path, tmp_path: Path) -> None:
    text = models / DEEPSEEK_FP8 / "val.txt"
    assert measure(dequantized, None, tmp_path, text=text) == pytest.approx(WHOLE[DEEPSEEK_FP8], rel=1e-3)


def test_block_fp8_as_it_is_costs_little(models: Path, tmp_path: Path) -> None:
    """Its layers run in block FP8, activations included; the weights alone give the dequantized figure."""
    assert 1 < measure(models / DEEPSEEK_FP8, None, tmp_path) / WHOLE[DEEPSEEK_FP8] < 1.01


EXPERTS = {"layer_quant_config": {"*.mlp.experts": "mxfp4"}}
KEPT = {"exclude_layer": ["lm_head", "*.gate.*"]}
RECIPES: dict[str, dict[str, Any]] = {
    "ptpc_fp8": {"global_quant_config": "ptpc_fp8", **KEPT},
    "per_block_fp8": {"global_quant_config": "per_block_fp8", **KEPT},
    "mixed": {**EXPERTS, "global_quant_config": "ptpc_fp8", **KEPT},
    "experts": EXPERTS,
    "mxfp4": {"global_quant_config": "mxfp4", **KEPT},
    "router": {"layer_quant_config": {"*.mlp.gate": "ptpc_fp8"}},
}


def bounds(name: str) -> dict[str, tuple[float, float]]:
    """What a recipe's perplexity is at least and at most, relative to the unquantized one."""
    plain, *mxfp4 = EXACT[name]
    fp8, experts, everything = (ppl / plain for ppl in (FP8_WEIGHTS[name], *mxfp4))
    return {
        # With quantized activations, so more than the weights alone.
        "ptpc_fp8": (1.0, 1.01 * fp8),
        "per_block_fp8": (1.0, 1.01 * fp8),
        "mixed": (0.99 * experts, 1.01 * experts * fp8),
        # MXFP4 leaves activations alone: these are figures of the quantized weights.
        "experts": (0.995 * experts, 1.005 * experts),
        "mxfp4": (0.985 * everything, 1.015 * everything),
        "router": (0.99, 1.02),
    }


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [QWEN, DEEPSEEK])
def test_what_a_recipe_costs(models: Path, name: str, recipe: str, tmp_path: Path) -> None:
    least, most = bounds(name)[recipe]
    found = measure(models / name, RECIPES[recipe], tmp_path, SHORT) / EXACT[name][0]
    assert least <= found <= most, f"{found:.4f} times the unquantized perplexity"


@pytest.mark.parametrize("target", ["ptpc_fp8", "mxfp4"])
def test_block_fp8_requantized_costs_what_the_original_does(models: Path, target: str, tmp_path: Path) -> None:
    """Two roundings instead of one: next to the BF16 checkpoint in the same format; 0.5 % of perplexity in both."""
    recipe = {"global_quant_config": target, **KEPT}
    one, other = (measure(models / name, recipe, tmp_path, SHORT) for name in (DEEPSEEK, DEEPSEEK_FP8))
    assert other == pytest.approx(one, rel=1e-2 if target == "ptpc_fp8" else 2e-2)


MIXED = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*expert*": "mxfp4"}, **KEPT}


@pytest.mark.parametrize("name", [QWEN, DEEPSEEK_FP8])
def test_greedy_tokens_alone_and_in_a_batch_of_32(models: Path, name: str, tmp_path: Path) -> None:
    tokens = perplexity.tokenize(str(models / name), (models / name / "val.txt").read_text(encoding="utf-8"))
    prompts = [tokens[1000 * i : 1000 * i + 3 + 11 * i] for i in range(32)]
    params = requant.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    options = {"online_quant_info_dir": str(tmp_path), "dtype": "float32", "max_model_len": 512}
    options |= {"kv_cache_memory_bytes": 200_000_000, "no_enable_prefix_caching": True}
    with requant.LLM(str(models / name), MIXED, **options) as llm:
        alone = [llm.generate([prompt], params, progress=False)[0].outputs[0] for prompt in prompts]
        together = [out.outputs[0] for out in llm.generate(prompts, params, progress=False)]
    check_same_tokens(alone, together)
    assert len({out.token_ids for out in alone}) > 16


@pytest.mark.parametrize("name", [QWEN, DEEPSEEK_FP8])
def test_the_server_gives_the_tokens_of_llm(models: Path, name: str, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    settings = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 100_000_000}
    prompts = ['def fibonacci(n):\n    """', "import numpy as np\n\n\nclass ", "The following example shows how to "]
    params = requant.SamplingParams(temperature=0.0, max_tokens=32)
    with requant.LLM(str(models / name), MIXED, online_quant_info_dir=str(tmp_path), **settings) as llm:
        expected = [out.outputs[0].text for out in llm.generate(prompts, params, progress=False)]
    with serve(models / name, MIXED, tmp_path / "served", settings) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        answer = client.completions.create(model=NAME, prompt=prompts, temperature=0.0, max_tokens=32)
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == len(prompts)
