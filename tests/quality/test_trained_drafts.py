"""The MTP layer of trained models: it drafts what its makers measured, under a recipe too, and changes no token.

``--models-dir`` names the folder of the models; see ``test_trained_models.py``.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from requant_models import check_same_tokens
from requant_ranked_server import ranked

from requant import LLM, SamplingParams
from requant.engine.build import load_rank
from requant.engine.config import EngineConfig
from requant.engine.request_output import CompletionOutput

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import perplexity
from draft_agreement import draft_agreement

NAMES = ("tiny-deepseek-v3-mtp", "tiny-deepseek-v3-mtp-fp8")
R1 = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*expert*": "mxfp4"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}
# Share of places where the draft is the model's own choice, over all held-out text (which val.txt is a part of).
STATED = 0.753
WINDOW = 512


@cache
def agreement(model: Path, recipe: str, reports: Path) -> float:
    windows = perplexity.cut_windows(perplexity.tokenize(str(model), (model / "val.txt").read_text()), WINDOW)
    config = EngineConfig.create(
        model=str(model), online_quant_config=json.loads(recipe), dtype="float32", method="mtp", device="cpu",
        max_model_len=WINDOW + 1, max_num_seqs=1, online_quant_info_dir=str(reports),
    )  # fmt: skip
    return draft_agreement(load_rank(config).runner, windows).share


@pytest.mark.parametrize("name", NAMES)
def test_teacher_forced_agreement(models: Path, name: str, tmp_path: Path) -> None:
    plain = agreement(models / name, "null", tmp_path)
    assert plain == pytest.approx(STATED, abs=0.02)
    assert agreement(models / name, json.dumps(R1), tmp_path) > plain - 0.02


def prompts(model: Path, count: int) -> list[str]:
    text = (model / "val.txt").read_text()
    return [text[900 * i : 900 * i + 50 + 17 * i] for i in range(count)]


def generate(model: Path, count: int, reports: Path, device: str, recipe: Any, **more: Any) -> list[CompletionOutput]:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=2)
    settings = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 200_000_000, "device": device}
    with LLM(str(model), recipe, online_quant_info_dir=str(reports), **settings, **more) as llm:
        outputs = llm.generate(prompts(model, count), params, progress=False)
        if more:
            counts = llm._core._stats().speculation
            assert counts.accepted / counts.tokens > 0.3, "so many are accepted that mistakes would show"
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", [None, R1], ids=["none", "r1"])
@pytest.mark.parametrize("count", [1, 32])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(models: Path, name: str, count: int, recipe: Any, device: str, tmp_path: Path) -> None:
    model = models / name
    expected = generate(model, count, tmp_path, device, recipe)
    # On a GPU sums depend on how many rows there are, and a last bit can move an FP8 activation to the next code.
    tie = 1e-3 if device == "cpu" else 0.1 if recipe or "fp8" in name else 1e-2
    for drafts in (1, 2, 3):
        more = {"method": "mtp", "num_speculative_tokens": drafts}
        check_same_tokens(expected, generate(model, count, tmp_path, device, recipe, **more), tie=tie)


COMMANDS = {
    "tiny-deepseek-v3-mtp-fp8": (["--enforce-eager", "--method", "mtp", "--num-speculative-tokens", "3"], R1),
    "tiny-qwen3-moe": (
        ["--enable-expert-parallel"],
        {"global_quant_config": "mxfp4", "exclude_layer": ["lm_head", "*.gate.*"]},
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_with_two_ranks(models: Path, name: str, tmp_path: Path) -> None:
    flags, recipe = COMMANDS[name]
    flags = [*flags, "-tp", "2", "--online_quant_config", json.dumps(recipe), "--online-quant-info-dir", str(tmp_path)]
    with ranked(models / name, [*flags, "--kv-cache-memory-bytes", "200000000"]) as server:
        client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(model="tiny", prompt="import numpy as", max_tokens=8, temperature=0)
        assert answer.choices[0].text.startswith(" np\n")
        server.process.terminate()
        assert server.end(within=10) == 0
