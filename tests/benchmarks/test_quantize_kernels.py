"""``benchmarks/quantize_kernels.py`` on small shapes: its rows, its arithmetic, and that wrong bits end it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from requant.formats import FORMATS
from requant.kernels import reference

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quantize_kernels.py"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False)


def test_a_row_for_every_format_source_and_shape(tmp_path: Path) -> None:
    output = tmp_path / "out" / "kernels.json"
    shapes = ["--shape", "128x256", "--shape", "130x64"]
    done = run("--gigabytes", "0.0005", *shapes, "--output-file", str(output))
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [(row["format"], row["source"], row["shape"]) for row in rows] == [
        (name, source, shape)
        for name in FORMATS
        for source in ("bfloat16", "per_block_fp8")
        if name != source
        for shape in ([128, 256], [130, 64])
    ]
    for row in rows:
        n, k = row["shape"]
        assert row["matrices"] == 500_000 // (n * k * (2 if row["source"] == "bfloat16" else 1))
        assert row["ratio"] == row["bytes"] / row["seconds"] / row["ceiling_bytes_per_second"]
    first = rows[0]
    assert first["bytes"] == first["matrices"] * 128 * (256 * 3 + 4), "2 bytes in, 1 out, a scale a row"
    assert "of copy" in done.stdout


def test_wrong_bits_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("quantize_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "quantize_kernels", module)
    spec.loader.exec_module(module)
    for converts, op in ((False, reference.quantize_many), (True, reference.requantize)):
        case = module.make_case(FORMATS["mxfp4"], converts, 128, 128, 10**5, torch.device("cpu"))
        case.call(op)()
        case.check()
        case.data[-1][5, 7] ^= 1
        with pytest.raises(RuntimeError, match="not the bits of the reference"):
            case.check()


@pytest.mark.parametrize("flags", [("--shape", "128"), ("--shape", "0x5"), ("--gigabytes", "0")])
def test_what_is_not_accepted_is_said(flags: tuple[str, str]) -> None:
    done = run(*flags)
    assert done.returncode == 2
    assert f"{flags[0]} is" in done.stderr.splitlines()[-1]
