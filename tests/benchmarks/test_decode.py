"""``benchmarks/decode.py`` on a tiny model: every recipe and number of requests gets its row."""

import json
import subprocess
import sys
from pathlib import Path

from requant_models import make_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "decode.py"


def test_a_row_for_every_recipe_and_number_of_requests(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    output = tmp_path / "out" / "decode.json"
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--output-file", str(output)]
    command += ["--recipe", "none", "--recipe", "mxfp4", "--requests", "1", "3", "--input", "9", "--output", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    document = json.loads(output.read_text())
    assert [(row["recipe"], row["requests"]) for row in document["rows"]] == [
        ("none", 1),
        ("none", 3),
        ("mxfp4", 1),
        ("mxfp4", 3),
    ]
    for row in document["rows"]:
        assert row["tpot_ms"] > 0
        assert row["prefill_tokens_per_second"] > 0
        assert (row["load_seconds"] is None) == (row["recipe"] == "none")
        assert row["tokens_per_second"] * row["tpot_ms"] / 1e3 - row["requests"] < 1e-6
    assert "mxfp4" in done.stdout


def test_a_step_is_taken_apart(tmp_path: Path) -> None:
    model, output = make_checkpoint(tmp_path / "model", "qwen3_moe"), tmp_path / "decode.json"
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--output-file", str(output), "--profile"]
    command += ["--recipe", "ptpc_fp8", "--requests", "2", "--input", "9", "--output"]
    done = subprocess.run([*command, "30"], capture_output=True, text=True, check=True)
    (row,) = json.loads(output.read_text())["rows"]
    profile = row["profile"]
    kernels = {kernel["kernel"]: kernel for kernel in profile["kernels"]}
    assert kernels["aten::mm"]["microseconds"] > 0
    assert (
        kernels["aten::rms_norm"]["calls"] == 2 * 4 + 1
    )  # of each layer's two norms, those of heads, and the last one
    bytes_of = {kind["kind"]: kind["bytes"] for kind in profile["kinds"]}
    assert set(bytes_of) == {"products", "experts", "attention", "other"}
    assert bytes_of["experts"] > 0
    assert "a step" in done.stdout
    done = subprocess.run([*command, "20"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "accepted with --profile: 24 or more" in done.stderr
