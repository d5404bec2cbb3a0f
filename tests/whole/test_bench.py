"""``requant bench`` and ``python -m requant.benchmarks.benchmark_serving`` against the real server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from requant_models import make_checkpoint
from requant_server import NAME, serve

COMMANDS = {
    "vllm": ["-m", "requant.benchmarks.benchmark_serving"],
    "openai-chat": ["-m", "requant.entrypoints.cli", "bench"],
}


@pytest.mark.parametrize("backend", COMMANDS)
def test_every_request_is_answered_in_full(backend: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 8_000_000}
    arguments = ["--model", str(model), "--served-model-name", NAME, f"--backend={backend}", "--dataset-name=random"]
    arguments += ["--random-input-len=40", "--random-output-len=20", "--random-range-ratio=0.8", "--num-prompts=20"]
    arguments += ["--max-concurrency=8", "--request-rate=200", "--ignore-eos", "--save-result", "--save-detailed"]
    arguments += ["--percentile-metrics=ttft,tpot,itl,e2el", f"--result-dir={tmp_path}", "--result-filename=r.json"]
    with serve(model, {"global_quant_config": "ptpc_fp8"}, tmp_path / "reports", settings) as url:
        run = [sys.executable, *COMMANDS[backend], *arguments, f"--base-url={url}"]
        done = subprocess.run(run, capture_output=True, text=True, check=True)
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (20, 0)
    assert all(4 <= length <= 36 for length in result["output_lens"])
    assert len(set(result["output_lens"])) > 5
    assert result["mean_e2el_ms"] > result["mean_ttft_ms"] > result["mean_tpot_ms"] > 0
    assert "Mean TPOT (ms)" in done.stdout
