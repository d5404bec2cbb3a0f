import json
import logging
import re
from pathlib import Path

import pytest

from requant.errors import ConfigError
from requant.loading import LoadResult, report_directory, write_report

RESULT = LoadResult(2.344, 3.5, 1_500_000_000, 1000, 100)


def test_report(tiny, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    plan = tiny.plan({"global_quant_config": "ptpc_fp8"})
    path = write_report(plan, RESULT, tmp_path)
    assert re.fullmatch(r"online_quant_info_\d{8}_\d{6}_\d+\.json", path.name)
    report = json.loads(path.read_text())
    assert list(report) == [
        "model",
        "online_quant_config",
        "elapsed_seconds",
        "load_seconds",
        "peak_device_memory_gb",
        "num_layers",
        "layers",
        "kept",
        "unmatched_patterns",
    ]
    assert report["elapsed_seconds"] == 2.344
    assert report["load_seconds"] == 3.5
    assert report["peak_device_memory_gb"] == 1.5
    assert report["online_quant_config"] == {"global_quant_config": "ptpc_fp8"}
    planned = plan.to_report()
    assert {key: report[key] for key in planned} == planned
    assert [record.message for record in caplog.records] == [
        "Weight post-processing done: 2.34 seconds, 2 layers online-quantized",
        f"Online quantization info saved to {path}",
    ]
    assert not list(tmp_path.glob("*.partial"))


def test_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("ATOM_TORCH_PROFILER_DIR", raising=False)
    assert report_directory(None) == Path(".")
    monkeypatch.setenv("ATOM_TORCH_PROFILER_DIR", str(tmp_path / "environment"))
    assert report_directory(None) == tmp_path / "environment"
    assert report_directory(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    assert not list((tmp_path / "a" / "b").iterdir())


def test_directory_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for directory in (file, file / "below"):
        with pytest.raises(ConfigError, match=r"cannot write the report to .*--online-quant-info-dir"):
            report_directory(str(directory))


def test_report_that_cannot_be_written_after_all(tiny, tmp_path):
    with pytest.raises(ConfigError, match="cannot write the report"):
        write_report(tiny.plan(), RESULT, tmp_path / "vanished")
