"""The real server as a process of its own, for as long as a test wants it."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

NAME = "tiny"


@contextmanager
def serve(model: Path, recipe: Any, reports: Path, settings: dict[str, Any]) -> Iterator[str]:
    """Start the server on ``model`` (under the name ``tiny``), wait until it is ready, and give its address.

    A setting that is True is a flag without a value.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "requant.entrypoints.openai_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--server-port", str(port), "--served-model-name", NAME]
    command += ["--online_quant_config", json.dumps(recipe), "--online-quant-info-dir", str(reports)]
    for name, value in settings.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    server = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert server.poll() is None, f"the server ended with exit code {server.returncode}"
            assert time.monotonic() < deadline, "the server did not become ready"
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        assert server.wait(timeout=30) == 0
