"""``benchmarks/served.py`` on a tiny model: the same requests with and without HTTP, from checkpoint and cache."""

import json
import subprocess
import sys
from pathlib import Path

from requant_models import make_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "served.py"


def test_every_way_answers_every_request(tmp_path: Path) -> None:
    model, output = make_checkpoint(tmp_path / "model"), tmp_path / "out" / "served.json"
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--recipe", "mxfp4", "--concurrency", "1", "3"]
    command += ["--num-prompts", "6", "--input", "20", "--output", "8", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run([*command, "--output-file", str(output)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [(row["way"], row["weights"], row["concurrency"]) for row in rows] == [
        (way, weights, count)
        for way, weights in (("engine", "checkpoint"), ("engine", "cache"), ("http", "cache"))
        for count in (1, 3)
    ]
    for row in rows:
        assert (row["completed"], row["failed"], row["total_output_tokens"]) == (6, 0, 48)
        assert row["mean_e2el_ms"] > row["mean_ttft_ms"] > 0
        assert row["mean_tpot_ms"] > 0
    assert "http" in done.stdout


def test_a_server_that_cannot_start_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--model", str(tmp_path), "--output-file", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
