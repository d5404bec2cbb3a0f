"""The real SmolLM2-135M-Instruct, where ``make demo`` has put it: it still knows the capital of France."""

import json
from pathlib import Path

import pytest
from requant_models import check_same_tokens

from requant import LLM, SamplingParams
from requant.recipe import FORMATS

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct-q4_1"
LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")

pytestmark = pytest.mark.skipif(not MODEL.is_dir(), reason=f"needs the model that `make demo` puts into {MODEL.name}")


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_answers_and_lists_120_layers(fmt: str, tmp_path: Path) -> None:
    recipe = {"global_quant_config": fmt, "exclude_layer": ["lm_head"]}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(str(MODEL), recipe, online_quant_info_dir=str(tmp_path), max_model_len=256) as llm:
        (answer,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=20), progress=False)
    assert "Paris" in answer.outputs[0].text
    (file,) = tmp_path.glob("online_quant_info_*.json")
    report = json.loads(file.read_text())
    assert [row["layer"] for row in report["layers"]] == [f"model.layers.{i}.{n}" for i in range(30) for n in LAYERS]
    assert report["kept"] == [{"layer": "lm_head", "reason": "excluded by 'lm_head'"}]


def test_the_batch_changes_no_token(tmp_path: Path) -> None:
    recipe = {"global_quant_config": "ptpc_fp8", "exclude_layer": ["lm_head"]}
    prompts = ["The capital of France is", "Once upon a time, there was", "1, 2, 3,", "The moon", "def add(a, b):"]
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2)
    with LLM(str(MODEL), recipe, online_quant_info_dir=str(tmp_path), max_model_len=256, dtype="float32") as llm:
        alone = [llm.generate(prompt, params, progress=False)[0].outputs[0] for prompt in prompts]
        together = [out.outputs[0] for out in llm.generate(prompts, params, progress=False)]
    check_same_tokens(alone, together)
