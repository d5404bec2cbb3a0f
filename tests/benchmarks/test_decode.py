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
