"""``benchmarks/multi_gpu.py`` on a tiny model and the CPU: a row for every number of ranks, and nothing differs."""

import json
import subprocess
import sys
from pathlib import Path

from requant_models import make_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "multi_gpu.py"


def test_a_row_for_every_number_of_ranks(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_moe")
    output = tmp_path / "out" / "multi_gpu.json"
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--output-file", str(output), "--device", "cpu"]
    command += ["--tp", "1", "2", "--requests", "1", "3", "--input", "9", "--output", "5", "--check", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    one, two = json.loads(output.read_text())["rows"]
    assert (one["tp"], two["tp"], len(one["ranks"]), len(two["ranks"])) == (1, 2, 1, 2)
    for row in (one, two):
        assert [run["requests"] for run in row["runs"]] == [1, 3]
        assert all(run["tpot_ms"] > 0 for run in row["runs"])
        for rank in row["ranks"]:
            assert rank["checked"] > 50
            assert rank["differ"] == 0
            assert rank["bytes_read"] >= rank["bytes_wanted"] > 0
    assert one["ranks"][0]["bytes_wanted"] == one["ranks"][0]["bytes_read"]
    assert all(rank["bytes_wanted"] < 0.6 * one["ranks"][0]["bytes_wanted"] for rank in two["ranks"])
    assert "tp 2" in done.stdout
