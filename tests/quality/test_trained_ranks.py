"""Really trained models, served by one rank and by several: the same greedy tokens. ``--models-dir``: their folder."""

import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from requant_server import NAME, serve

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import perplexity

MODELS: dict[str, dict[str, Any]] = {
    "tiny-qwen3-moe": {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*expert*": "per_block_fp8"}},
    "tiny-deepseek-v3-mtp-fp8": {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*expert*": "mxfp4"}},
}
# Ranks, and whether each has whole experts.
LAYOUTS = [(2, False), (4, False), (2, True)]
SETTINGS: dict[str, Any] = {"dtype": "float32", "max-model-len": 512, "device": "cpu", "deterministic-tp": True}
TOKENS = 32
TIE = 1e-3


def prompts(model: Path) -> list[list[int]]:
    """Runs of held-out text of several lengths."""
    tokens = perplexity.tokenize(str(model), (model / "val.txt").read_text(encoding="utf-8")[:20_000])
    lengths = [3, 17, 64, 130, 200, 33, 90, 5]
    return [tokens[200 * i : 200 * i + length] for i, length in enumerate(lengths)]


def answers(url: str, given: list[list[int]]) -> list[Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    return client.completions.create(
        model=NAME, prompt=given, temperature=0.0, max_tokens=TOKENS, logprobs=2, extra_body={"ignore_eos": True}
    ).choices


def served(
    model: Path, recipe: Any, folder: Path, size: int, expert_parallel: bool, given: list[list[int]]
) -> list[Any]:
    settings = {**SETTINGS, "tensor-parallel-size": size}
    if expert_parallel:
        settings["enable-expert-parallel"] = True
    with serve(model, recipe, folder, settings) as url:
        return answers(url, given)


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_of_several_ranks(models: Path, name: str, tmp_path: Path) -> None:
    model, recipe = models / name, MODELS[name]
    given = prompts(model)
    alone = served(model, recipe, tmp_path / "1", 1, False, given)
    for size, expert_parallel in LAYOUTS:
        reports = tmp_path / f"{size}{expert_parallel}"
        parted = []
        for one, other in zip(alone, served(model, recipe, reports, size, expert_parallel, given), strict=True):
            texts = one.logprobs.tokens, other.logprobs.tokens
            first = next((i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b), None)
            if first is not None:
                best, second = sorted(one.logprobs.top_logprobs[first].values(), reverse=True)[:2]
                assert best - second < TIE, f"token {first} of {texts}"
                parted.append((first, best - second))
        (file,) = reports.glob("online_quant_info_*.json")
        report = json.loads(file.read_text())
        assert (report["tensor_parallel_size"], report["expert_parallel"]) == (size, expert_parallel)
        rows = sum(256 for row in report["layers"] if row["quant_type"] == "per_Token")  # hidden size
        assert report["bytes_sent"] <= 4 * rows
        assert report["bytes_wanted"] < report["bytes_read"]
        print(f"{name}: tp {size}{' + ep' if expert_parallel else ''}: ties {parted}")
