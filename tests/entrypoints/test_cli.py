import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import requant
from requant.entrypoints import cli, openai_server
from requant.errors import CheckpointError


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
        (["serve", "--model", "M", "-tp", "4"], "--tensor-parallel-size is 4"),
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


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand-ins for what plans and for what prints; the calls that were made."""
    calls: list[Any] = []

    def plan_model(config: object, *, headers_only: bool) -> SimpleNamespace:
        calls.append((config, headers_only))
        return SimpleNamespace(plan=SimpleNamespace(to_report=lambda: {"num_layers": 3}))

    def render(plan: object, console: Any) -> None:
        console.print("a table")

    monkeypatch.setitem(sys.modules, "requant.engine.build", SimpleNamespace(plan_model=plan_model))
    monkeypatch.setitem(sys.modules, "requant.tools.plan", SimpleNamespace(render=render))
    return calls


def test_plan(planner: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "M", "--online_quant_config", "{}"]) == 0
    assert "a table" in capsys.readouterr().out
    assert cli.main(["plan", "--model", "M", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"num_layers": 3}
    (first, headers_only), _ = planner
    assert headers_only is True
    assert (first.model.model, first.quant.online_quant_config) == ("M", "{}")


def test_errors_of_the_plan(
    planner: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: object, *, headers_only: bool) -> None:
        raise CheckpointError("no config.json in M")

    monkeypatch.setitem(sys.modules, "requant.engine.build", SimpleNamespace(plan_model=refuse))
    assert cli.main(["plan", "--model", "M"]) == 2
    assert capsys.readouterr().err == "requant: error: no config.json in M\n"


def test_a_reader_that_goes_away() -> None:
    """``requant … | head`` ends quietly."""
    script = "import sys; from requant.entrypoints.console import run; sys.exit(run(lambda argv: print('x' * 10**6)))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
