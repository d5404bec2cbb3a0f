"""``benchmarks/load.py`` on a tiny model: every way to load gets its row, and the cache is left empty."""

import json
import subprocess
import sys
from pathlib import Path

from requant_models import make_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load.py"


def test_a_row_for_every_way_to_load(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    output, cache = tmp_path / "out" / "load.json", tmp_path / "cache"
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--output-file", str(output)]
    command += ["--cache-dir", str(cache), "--recipe", "none", "--recipe", "mxfp4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(output.read_text())["rows"]
    ways = [(row["recipe"], row["source"], row["process"]) for row in rows]
    sources = [("none", "checkpoint"), ("mxfp4", "checkpoint"), ("mxfp4", "cache")]
    assert ways == [(*source, process) for source in sources for process in ("fresh", "warm")]
    assert rows[4]["bytes_read"] < rows[2]["bytes_read"]
    assert rows[4]["elapsed_seconds"] < rows[2]["elapsed_seconds"], "nothing is quantized"
    assert all(row["floor_seconds"] == row["bytes_read"] / row["bus_bytes_per_second"] for row in rows)
    assert not any(cache.iterdir())
    assert "mxfp4" in done.stdout
