import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from requant_models import MXFP4, make_checkpoint, quantize_checkpoint

import requant
from requant.entrypoints import cli, openai_server


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "serve" in out
    assert "plan" in out


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert "--online-quant-config JSON" in out
    assert "--max-num-seqs" in out
    assert ("--server-port" in out) == (command == "serve")
    assert ("--json" in out) == (command == "plan")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"requant {requant.__version__}"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["bake"], "invalid choice: 'bake'"),
        (["serve"], "--model is ''"),
        (["plan"], "--model is ''"),
        (["serve", "--model", "M", "--json"], "unrecognized arguments: --json"),
        (["serve", "--model", "M", "-tp", "0"], "--tensor-parallel-size is 0; accepted: 1 to 1024"),
    ],
)
def test_errors_are_one_line(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("requant: error: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_the_server_module_has_the_same_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert openai_server.main(["--model", "M", "--dtype", "int8"]) == 2
    assert capsys.readouterr().err.startswith("requant: error: argument --dtype: invalid choice: 'int8'")


RECIPE = json.dumps({"layer_quant_config": {"*.mlp.*": "mxfp4"}})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("planned")))


def test_plan_prints_tables(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", checkpoint, "--online_quant_config", RECIPE]) == 0
    out = capsys.readouterr().out
    assert "model.layers.{0-1}.mlp.down_proj" in out
    assert "4 layers quantized" in out
    assert cli.main(["plan", "--model", checkpoint, "--online_quant_config", RECIPE, "--every-layer"]) == 0
    assert "model.layers.1.mlp.down_proj" in capsys.readouterr().out


def test_plan_as_json_is_the_report_without_times(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", checkpoint, "--online_quant_config", RECIPE, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_layers"] == 4
    assert report["online_quant_config"] == json.loads(RECIPE)
    assert {row["reason"] for row in report["kept"]} == {"no rule matches", "protected: lm_head"}


def test_plan_explains_one_layer(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", checkpoint, "--online_quant_config", RECIPE, "--explain"]
    assert cli.main(["plan", *flags, "model.layers.1.mlp.up_proj"]) == 0
    out = capsys.readouterr().out
    assert "a part of model.layers.1.mlp.gate_up_proj" in out
    assert "'*.mlp.*' -> mxfp4" in out
    assert cli.main(["plan", *flags, "model.layers.1.mlp.upp_proj"]) == 2
    assert "no layer is named 'model.layers.1.mlp.upp_proj'" in capsys.readouterr().err


def test_plan_explains_what_the_checkpoint_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers that are passed through whatever their target."""
    make_checkpoint(tmp_path, dtype=torch.bfloat16, intermediate_size=192)
    quantize_checkpoint(tmp_path, MXFP4, "mxfp4", lambda name: ".mlp." in name)
    flags = ["--model", str(tmp_path), "--online_quant_config", '{"global_quant_config":"ptpc_fp8"}', "--explain"]
    assert cli.main(["plan", *flags, "model.layers.1.mlp.up_proj"]) == 0
    reason = "mxfp4 in the checkpoint, passed through unchanged, not quantized to ptpc_fp8"
    assert capsys.readouterr().out.splitlines()[-1] == f"  => kept: {reason}"
    assert cli.main(["plan", *flags, "model.layers.1.self_attn.o_proj"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  => ptpc_fp8"


def test_plan_explains_no_layer_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    assert cli.main(["plan", "--model", str(tmp_path), "--explain", "model.layers.2.eh_proj"]) == 2
    assert "no layer is named 'model.layers.2.eh_proj'" in capsys.readouterr().err


def test_plan_reads_no_weight(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With holes in place of the weights, whose size on disk is then that of the header alone."""
    shutil.copytree(checkpoint, tmp_path / "hollow")
    file = tmp_path / "hollow" / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    with file.open("wb") as hollow:
        hollow.write(whole[:header])
        hollow.truncate(len(whole))
    assert file.stat().st_blocks * 512 < len(whole)
    outputs = []
    for model in (checkpoint, str(tmp_path / "hollow")):
        assert cli.main(["plan", "--model", model, "--online_quant_config", RECIPE, "--json"]) == 0
        outputs.append({**json.loads(capsys.readouterr().out), "model": ""})
    assert outputs[0] == outputs[1]


def test_errors_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"requant: error: no such folder: {tmp_path / 'nowhere'}\n"


def test_a_reader_that_goes_away() -> None:
    """``requant … | head`` ends quietly."""
    script = "import sys; from requant.console import run; sys.exit(run(lambda argv: print('x' * 10**6)))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
