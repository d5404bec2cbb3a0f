"""The server as a program: how it starts, what it says, and that nothing is left of it. The core is a fake."""

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from requant.entrypoints import openai_server

ROOT = Path(__file__).parents[2]
PATIENCE = 60


@contextmanager
def program(factory: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """The server's command line with another core; killed if the test leaves it running."""
    script = f"import sys; from requant.entrypoints.openai_server import main; sys.exit(main(core_factory={factory!r}))"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "support")])
    process = subprocess.Popen(
        [sys.executable, "-c", script, *args],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def serving(model: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--host", "127.0.0.1", "--server-port", "0", *more]


def url_of(process: subprocess.Popen[str]) -> str:
    """Wait for the line that says where it serves."""
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"serving at (http://\S+)", line)
        if found:
            return found[1]
    raise AssertionError(f"the server ended with exit code {process.wait(PATIENCE)} before it served")


def wait_until_unlocked(file: Path) -> None:
    """Return when the process that holds the lock is gone."""
    with file.open() as handle:
        waiter = threading.Thread(target=fcntl.flock, args=(handle, fcntl.LOCK_EX), daemon=True)
        waiter.start()
        waiter.join(PATIENCE)
        assert not waiter.is_alive(), "the engine's process outlives the server"


def is_locked(file: Path) -> bool:
    with file.open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def one_line_error(process: subprocess.Popen[str], code: int) -> str:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("requant: error: ")]
    assert err.splitlines()[-1] == line
    if code == 2:
        assert "Traceback" not in err
    return line


def test_it_serves_and_ends_when_told_to(tiny_model: Path, tmp_path: Path) -> None:
    args = serving(tiny_model, "--online-quant-info-dir", str(tmp_path), "--served-model-name", "a", "b")
    with program("requant_fakes:build", *args) as process:
        client = openai.OpenAI(base_url=f"{url_of(process)}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["a", "b"]
        assert client.completions.create(model="b", prompt="the fox", max_tokens=1).choices[0].text == "the"
        assert is_locked(tmp_path / "alive")
        process.terminate()
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert (out, err) == ("", "")
    assert not is_locked(tmp_path / "alive")


def test_an_open_stream_does_not_keep_it(tiny_model: Path) -> None:
    with program("requant_fakes:build", *serving(tiny_model)) as process:
        url = url_of(process)
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "<|stall|>dog", "stream": True}) as answer:
            assert answer.status_code == 200
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "Traceback" not in err


def test_the_engine_ends_with_a_killed_server(tiny_model: Path, tmp_path: Path) -> None:
    with program("requant_fakes:build", *serving(tiny_model, "--online-quant-info-dir", str(tmp_path))) as process:
        url_of(process)
        process.kill()
        process.wait(PATIENCE)
        wait_until_unlocked(tmp_path / "alive")


def test_it_ends_while_loading(tiny_model: Path, tmp_path: Path) -> None:
    args = serving(tiny_model, "--online-quant-info-dir", str(tmp_path))
    with program("requant_fakes:never_ready", *args) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err == ""
    assert not is_locked(tmp_path / "alive")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [("<|raise|>", "RuntimeError: the fake core was told to fail"), ("<|exit|>", "exit code 7")],
)
def test_it_ends_when_the_engine_dies(tiny_model: Path, prompt: str, says: str) -> None:
    with program("requant_fakes:build", *serving(tiny_model)) as process:
        client = openai.OpenAI(base_url=f"{url_of(process)}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError, match=says):
            client.completions.create(model=str(tiny_model), prompt=prompt)
        line = one_line_error(process, 1)
    assert says in line


@pytest.mark.parametrize(
    ("factory", "code", "says"),
    [
        ("refuse_to_build", 2, "the recipe names no format"),
        ("fail_to_build", 1, "the engine failed while starting: RuntimeError: out of luck"),
        ("exit_while_building", 1, "the engine failed while starting: the engine's process ended with exit code 9"),
    ],
)
def test_what_cannot_be_built(tiny_model: Path, factory: str, code: int, says: str) -> None:
    with program(f"requant_fakes:{factory}", *serving(tiny_model)) as process:
        assert one_line_error(process, code) == f"requant: error: {says}"


def test_no_tokenizer(tmp_path: Path) -> None:
    with program("requant_fakes:never_ready", *serving(tmp_path)) as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert err.startswith("requant: error: no tokenizer can be loaded from")


def test_a_port_in_use(tiny_model: Path) -> None:
    """Said before anything is loaded: this core would never be ready."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        args = ["--model", str(tiny_model), "--host", "127.0.0.1", "--server-port", str(port)]
        with program("requant_fakes:never_ready", *args) as process:
            line = one_line_error(process, 2)
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in line


@pytest.mark.parametrize("host", ["no.such.invalid", "a..b", "x" * 70, "zz::1", "\udcff"])
def test_a_host_that_is_none(tiny_model: Path, host: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert openai_server.main(["--model", str(tiny_model), "--host", host]) == 2
    message = capfd.readouterr().err
    assert message.startswith("requant: error: cannot listen on ")
    assert message.count("\n") == 1


def test_a_wrong_flag_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "requant.entrypoints.openai_server", "--modell", "M"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert (done.stdout, done.stderr) == ("", "requant: error: unrecognized arguments: --modell M\n")
