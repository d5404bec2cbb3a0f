"""``benchmarks/load.py`` on a tiny model: every way to load gets its row, and the cache is left empty."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from requant_models import make_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load.py"


def run(model: Path, output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--output-file", str(output), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_row_for_every_way_to_load(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    output, cache = tmp_path / "out" / "load.json", tmp_path / "cache"
    done = run(model, output, "--cache-dir", str(cache), "--recipe", "none", "--recipe", "mxfp4")
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    ways = [(row["recipe"], row["source"], row["process"]) for row in rows]
    sources = [("none", "checkpoint"), ("mxfp4", "checkpoint"), ("mxfp4", "cache")]
    assert ways == [(*source, process) for source in sources for process in ("fresh", "warm")]
    assert rows[4]["bytes_read"] < rows[2]["bytes_read"]
    assert rows[4]["elapsed_seconds"] < rows[2]["elapsed_seconds"], "nothing is quantized"
    assert all(row["floor_seconds"] == row["bytes_read"] / row["bus_bytes_per_second"] for row in rows)
    assert not any(cache.iterdir())
    assert "mxfp4" in done.stdout


def test_files_leave_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    page_cache = importlib.import_module("page_cache")
    file = tmp_path / "file"
    file.write_bytes(bytes(10**6))
    assert page_cache.resident_bytes(file) >= 10**6
    try:
        page_cache.evict([file])
    except OSError as error:
        if "still in the page cache" not in error.strerror:
            raise
        pytest.skip(f"{page_cache.disk_of(file)} keeps its pages")
    assert page_cache.resident_bytes(file) == 0
    with file.open("rb") as opened:
        opened.read(1)
    assert page_cache.resident_bytes(file) > 0


def test_cold_loads(tmp_path: Path) -> None:
    model, output = make_checkpoint(tmp_path / "model"), tmp_path / "load.json"
    done = run(model, output, "--cold", "--recipe", "ptpc_fp8")
    if done.returncode:
        assert "still in the page cache" in done.stderr
        assert done.stderr.startswith("error: ")
        pytest.skip("the file system keeps its pages")
    (row,) = json.loads(output.read_text())["rows"]
    assert (row["recipe"], row["source"], row["process"]) == ("ptpc_fp8", "checkpoint", "cold")
    assert " on " in json.loads(output.read_text())["disk"]


def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path / "load.json", "--recipe", "none")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
