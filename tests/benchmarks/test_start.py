"""``benchmarks/start.py`` on a tiny model: two processes a recipe, and their time adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from requant_models import make_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "start.py"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_two_processes_a_recipe(tmp_path: Path) -> None:
    model, output = make_checkpoint(tmp_path / "model"), tmp_path / "out" / "start.json"
    done = run("--model", str(model), "--output-file", str(output), "--recipe", "ptpc_fp8")
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [(row["recipe"], row["kernels"]) for row in rows] == [("ptpc_fp8", "to compile"), ("ptpc_fp8", "compiled")]
    for row in rows:
        assert {"process", "headers", "plan", "load"} <= set(row["stages"])
        assert row["ready_seconds"] == pytest.approx(sum(row["stages"].values()), abs=0.05)
    assert "ptpc_fp8" in done.stdout


def test_what_cannot_be_built_says_why(tmp_path: Path) -> None:
    done = run("--model", str(tmp_path / "nothing"), "--output-file", str(tmp_path / "out" / "start.json"))
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "nothing" in done.stderr
