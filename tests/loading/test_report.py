import json
import logging
import re
from pathlib import Path

import pytest

from requant.errors import ConfigError
from requant.loading import LoadResult, prepare_report

RECIPE = {"global_quant_config": "ptpc_fp8"}
RESULT = LoadResult(2.344, 3.5, 1_500_000_000, 1000, 100)


def test_report(tiny, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    plan = tiny.plan(RECIPE)
    path = Path(prepare_report(plan, str(tmp_path / "reports"))(RESULT))
    assert path.parent == tmp_path / "reports"
    assert re.fullmatch(r"online_quant_info_\d{8}_\d{6}_\d+\.json", path.name)
    report = json.loads(path.read_text())
    assert list(report) == [
        "model",
        "online_quant_config",
        "elapsed_seconds",
        "load_seconds",
        "peak_device_memory_gb",
        "bytes_sent",
        "cache_entry",
        "tensor_parallel_size",
        "expert_parallel",
        "bytes_wanted",
        "bytes_read",
        "num_layers",
        "layers",
        "kept",
        "unmatched_patterns",
    ]
    assert report["elapsed_seconds"] == 2.344
    assert report["load_seconds"] == 3.5
    assert report["peak_device_memory_gb"] == 1.5
    assert report["online_quant_config"] == RECIPE
    planned = plan.to_report()
    assert {key: report[key] for key in planned} == planned
    assert [record.message for record in caplog.records] == [
        "Weight post-processing done: 2.34 seconds, 2 layers online-quantized",
        f"Online quantization info saved to {path}",
    ]
    assert list(path.parent.iterdir()) == [path]


def test_directory(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("ATOM_TORCH_PROFILER_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    plan = tiny.plan(RECIPE)
    assert Path(prepare_report(plan)(RESULT)).resolve().parent == tmp_path
    monkeypatch.setenv("ATOM_TORCH_PROFILER_DIR", "environment")
    assert Path(prepare_report(plan)(RESULT)).parent == Path("environment")
    assert Path(prepare_report(plan, "flag")(RESULT)).parent == Path("flag")


def test_without_a_recipe_there_is_no_report(tiny, tmp_path):
    assert prepare_report(tiny.plan(), str(tmp_path / "reports"))(RESULT) is None
    assert not (tmp_path / "reports").exists()


def test_directory_that_cannot_be_written(tiny, tmp_path):
    file = tmp_path / "file"
    file.touch()
    plan = tiny.plan(RECIPE)
    for directory in (file, file / "below"):
        with pytest.raises(ConfigError, match=r"cannot write the report to .*--online-quant-info-dir"):
            prepare_report(plan, str(directory))


def test_directory_that_vanishes_while_loading(tiny, tmp_path):
    write = prepare_report(tiny.plan(RECIPE), str(tmp_path / "reports"))
    (tmp_path / "reports").rmdir()
    with pytest.raises(ConfigError, match="cannot write the report"):
        write(RESULT)
