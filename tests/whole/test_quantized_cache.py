"""The cache of quantized weights: who finds an entry, who does not, and what is left when things go wrong."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from requant_models import make_checkpoint
from safetensors.torch import load_file, save_file

from requant.engine.build import load_rank
from requant.engine.config import EngineConfig
from requant.entrypoints import cli
from requant.loading.cache import Entry, Store, entry, identity, layout, store, writer

RECIPE = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*expert*": "mxfp4"}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def start(model: Path, cache: Path, recipe: object = RECIPE) -> tuple[dict[str, torch.Tensor], dict]:
    """Load as the engine does, until the entry is there; the parameters and the report."""
    config = EngineConfig.create(
        model=str(model), online_quant_config=recipe, online_quant_cache=str(cache), device="cpu",
        online_quant_info_dir=str(cache.parent / "reports"), kv_cache_memory_bytes=10_000_000, max_model_len=64,
    )  # fmt: skip
    loaded = load_rank(config)
    if loaded.cache_writer:
        loaded.cache_writer.wait()
    assert (loaded.cache_writer is None) == (loaded.report_path is None or used(loaded.report_path))
    report = json.loads(Path(loaded.report_path).read_text()) if loaded.report_path else {}
    return {name: value.view(torch.uint8) for name, value in loaded.planned.model.named_parameters()}, report


def used(report: str) -> bool:
    return json.loads(Path(report).read_text())["cache_entry"] is not None


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_second_start_reads_what_the_first_one_quantized(model: Path, cache: Path) -> None:
    first, report = start(model, cache)
    assert report["cache_entry"] is None
    second, again = start(model, cache)
    assert same(first, second)
    assert Path(again["cache_entry"]).parent == cache
    assert again["bytes_read"] < report["bytes_read"]
    for key in ("num_layers", "layers", "kept", "unmatched_patterns", "online_quant_config"):
        assert again[key] == report[key]


def test_another_recipe_or_contract_has_another_entry(model: Path, cache: Path, monkeypatch) -> None:
    start(model, cache)
    recipe = {**RECIPE, "exclude_layer": ["lm_head"]}
    assert start(model, cache, recipe)[1]["cache_entry"] is None
    swapped = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*mlp*": "per_block_fp8", "*expert*": "mxfp4"}}
    assert start(model, cache, swapped)[1]["cache_entry"] is None
    swapped["layer_quant_config"] = dict(reversed(swapped["layer_quant_config"].items()))
    assert start(model, cache, swapped)[1]["cache_entry"] is None, "the first match wins: the order counts"
    monkeypatch.setattr(identity.Identity.__init__, "__defaults__", (2, "", ""))
    assert start(model, cache)[1]["cache_entry"] is None
    assert len(list(cache.iterdir())) == 5


def test_nothing_to_quantize(model: Path, cache: Path) -> None:
    start(model, cache, None)
    assert not cache.exists()


def test_one_changed_bit_is_noticed_though_size_and_time_are_as_before(model: Path, cache: Path) -> None:
    start(model, cache)
    file = model / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(before.st_size // 2 + 777)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed, report = start(model, cache)
    assert report["cache_entry"] is None
    shutil.rmtree(cache)
    assert same(changed, start(model, cache)[0])


def test_a_renamed_tensor_is_another_checkpoint(model: Path, cache: Path) -> None:
    start(model, cache)
    file = model / "model.safetensors"
    tensors = load_file(file)
    up, down = (f"model.layers.0.mlp.experts.0.{part}_proj.weight" for part in ("up", "gate"))
    tensors[up], tensors[down] = tensors[down], tensors[up]
    save_file(tensors, file)
    exchanged, report = start(model, cache)
    assert report["cache_entry"] is None
    again, report = start(model, cache)
    assert report["cache_entry"] is not None
    assert same(exchanged, again)


@pytest.mark.parametrize("how", ["truncated", "description cut", "no file", "other dtype"])
def test_a_damaged_entry_is_made_anew(model: Path, cache: Path, how: str, caplog) -> None:
    first, _ = start(model, cache)
    (folder,) = cache.iterdir()
    (weights,) = folder.glob("*.safetensors")
    if how == "truncated":
        os.truncate(weights, weights.stat().st_size - 1)
    elif how == "description cut":
        os.truncate(folder / entry.DESCRIPTION, 20)
    elif how == "no file":
        weights.unlink()
    else:  # whole, but not what is looked for: as if there was no such matrix
        content = weights.read_bytes()
        weights.write_bytes(content.replace(b'"dtype": "F8_E4M3"', b'"dtype": "F8_E5M2"'))
    again, report = start(model, cache)
    assert same(first, again)
    if how == "other dtype":
        return
    assert report["cache_entry"] is None
    assert "damaged" in caplog.text
    assert start(model, cache)[1]["cache_entry"] is not None
    assert len(list(cache.iterdir())) == 1


def test_a_full_disk_costs_only_the_entry(model: Path, cache: Path, monkeypatch, caplog) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.os, "pwrite", full)
    first, _ = start(model, cache)
    assert "not cached: No space left on device" in caplog.text
    assert not list(cache.iterdir())
    monkeypatch.undo()
    assert same(first, start(model, cache)[0])
    assert start(model, cache)[1]["cache_entry"] is not None


def test_too_little_room_is_seen_before(model: Path, cache: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    start(model, cache)
    assert "needed in" in caplog.text
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_refused_at_once(model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    command = ["serve", "--model", str(model), "--device", "cpu", "--online-quant-config", json.dumps(RECIPE)]
    assert cli.main([*command, "--online_quant_cache", str(tmp_path / "file" / "cache")]) == 2
    said = capsys.readouterr().err
    assert "cannot write to the cache" in said
    assert said.count("\n") == 1 or "--online-quant-cache takes a writable folder" in said
    assert cli.main([*command, "--online-quant-cache", ""]) == 2
    assert "--online-quant-cache is ''" in capsys.readouterr().err


SLOW = """
import json, sys, time
from requant.engine.build import load_rank
from requant.engine.config import EngineConfig
from requant.loading.cache import layout, writer
layout.FILE_BYTES = 20_000
write = writer._write
gate = [sys.stdin.readline] if len(sys.argv) > 2 else []
def slow(*arguments):
    while gate:
        gate.pop()()
    time.sleep(0.005)
    write(*arguments)
writer._write = slow
loaded = load_rank(EngineConfig.create(**json.loads(sys.argv[1])))
print("loaded", flush=True)
loaded.cache_writer.wait()
print("written", flush=True)
time.sleep(60)
"""


def slow_start(model: Path, cache: Path, *, gated: bool = False) -> subprocess.Popen[str]:
    """A process that loads, and writes an entry slowly; with ``gated`` not before a line comes on its stdin."""
    options = {"model": str(model), "online_quant_config": RECIPE, "online_quant_cache": str(cache), "device": "cpu"}
    options |= {"online_quant_info_dir": str(cache.parent), "kv_cache_memory_bytes": 10_000_000, "max_model_len": 64}
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, json.dumps(options), *(["gated"] if gated else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_killed_while_it_writes(model: Path, cache: Path, caplog) -> None:
    first = start(model, cache.with_name("other"))[0]
    process = slow_start(model, cache)
    assert process.stdout is not None
    assert process.stdout.readline() == "loaded\n"
    until = time.monotonic() + 10
    while not list(cache.glob(".*/*.safetensors")) and time.monotonic() < until:
        time.sleep(0.01)
    assert [state.state for state in Store(cache).states()] == [store.BEING_WRITTEN]
    assert cli.main(["cache", "prune", str(cache), "--all"]) == 0
    assert len(list(cache.iterdir())) == 1, "what is being written stays"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [state.useless for state in Store(cache).states()] == [True]
    second, report = start(model, cache)
    assert report["cache_entry"] is None
    assert same(first, second)
    (folder,) = cache.iterdir()  # what had been left behind is gone
    Entry(folder).close()


def test_two_processes_write_the_same_entry(model: Path, cache: Path) -> None:
    processes = [slow_start(model, cache, gated=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
    (folder,) = cache.iterdir()
    Entry(folder).close()
    for process in processes:
        process.kill()
        process.wait()
    assert start(model, cache)[1]["cache_entry"] == str(folder)


def test_a_stopped_writer_leaves_nothing(model: Path, cache: Path, monkeypatch) -> None:
    write = writer._write

    def slow(*arguments) -> None:
        time.sleep(0.005)
        write(*arguments)

    monkeypatch.setattr(writer, "_write", slow)
    monkeypatch.setattr(layout, "FILE_BYTES", 20_000)
    config = EngineConfig.create(
        model=str(model), online_quant_config=RECIPE, online_quant_cache=str(cache), device="cpu",
        online_quant_info_dir=str(cache.parent), kv_cache_memory_bytes=10_000_000, max_model_len=64,
    )  # fmt: skip
    loaded = load_rank(config)
    assert loaded.cache_writer is not None
    loaded.cache_writer.stop()
    assert not list(cache.iterdir())


def test_list_and_prune(model: Path, cache: Path, capsys, caplog) -> None:
    caplog.set_level(logging.ERROR)
    start(model, cache)
    start(model, cache, {"global_quant_config": "mxfp4"})

    def listed() -> list[dict[str, Any]]:
        capsys.readouterr()
        assert cli.main(["cache", "list", "--json", str(cache)]) == 0
        return json.loads(capsys.readouterr().out)

    assert [row["state"] for row in listed()] == ["usable"] * 2
    assert [row["recipe"]["global_quant_config"] for row in listed()] == ["mxfp4", "ptpc_fp8"], "the last one first"
    start(model, cache)
    assert [row["recipe"]["global_quant_config"] for row in listed()] == ["ptpc_fp8", "mxfp4"]
    assert cli.main(["cache", "list", str(cache)]) == 0
    out = capsys.readouterr().out
    assert "usable" in out
    assert "2 entries" in out
    keep = (listed()[0]["bytes"] + 1) / 1e9
    assert cli.main(["cache", "prune", str(cache), "--max-gb", str(keep), "--dry-run"]) == 0
    assert len(listed()) == 2
    with Entry(Path(listed()[1]["entry"])):
        assert cli.main(["cache", "prune", str(cache), "--max-gb", str(keep)]) == 0
        assert "in use, stays" in capsys.readouterr().out
    assert cli.main(["cache", "prune", str(cache), "--max-gb", str(keep)]) == 0
    assert [row["recipe"]["global_quant_config"] for row in listed()[:1]] == ["ptpc_fp8"]
    capsys.readouterr()
    os.utime(model / "model.safetensors")
    assert [row["state"] for row in listed()] == ["the checkpoint has changed"]
    (cache / "something else").mkdir()
    assert cli.main(["cache", "prune", str(cache)]) == 0
    assert [path.name for path in cache.iterdir()] == ["something else"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "/no/such/folder"], "no such folder: /no/such/folder"),
        (["prune", ".", "--max-gb", "-1"], "--max-gb is -1.0; accepted: 0 or more"),
        (["prune", ".", "--max-gb", "nan"], "--max-gb is nan; accepted: 0 or more"),
        (["list"], "the following arguments are required: DIR"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_command_lines(arguments: list[str], says: str, capsys) -> None:
    assert cli.main(["cache", *arguments]) == 2
    assert says in capsys.readouterr().err
