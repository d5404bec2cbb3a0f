"""The real server on a tiny checkpoint: what it answers is what ``LLM`` generates, and the report is written."""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from requant_models import LAYERS, make_checkpoint
from requant_server import serve

from requant import LLM, SamplingParams

RECIPE = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*.mlp.*": "mxfp4"}, "exclude_layer": ["lm_head"]}
PROMPTS = ["the quick brown fox", "jumps", "over the lazy dog the quick", "fox fox fox"]
SETTINGS = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 8_000_000}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def url(checkpoint: Path, reports: Path) -> Iterator[str]:
    with serve(checkpoint, RECIPE, reports, SETTINGS) as address:
        yield address


def test_the_server_gives_the_tokens_of_llm(url: str, checkpoint: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(str(checkpoint), RECIPE, online_quant_info_dir=str(tmp_path), **SETTINGS) as llm:
        expected = [out.outputs[0] for out in llm.generate(PROMPTS, params, progress=False)]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS, temperature=0.0, max_tokens=16, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in answer.choices] == [out.text for out in expected]


def test_the_report_of_the_served_model(url: str, reports: Path) -> None:
    (file,) = reports.glob("online_quant_info_*.json")
    report = json.loads(file.read_text())
    names = [f"model.layers.{i}.{layer}" for i in range(2) for layer in LAYERS]
    assert [row["layer"] for row in report["layers"]] == names
    assert report["num_layers"] == 8
    kinds = {row["layer"].split(".")[3]: row["quant_type"] for row in report["layers"]}
    assert kinds == {"self_attn": "per_Token", "mlp": "per_1x32"}
    assert [row["layer"] for row in report["kept"]] == ["lm_head"]
    assert report["load_seconds"] >= report["elapsed_seconds"] > 0
