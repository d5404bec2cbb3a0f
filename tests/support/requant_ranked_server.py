"""The real server with several ranks, and the processes that belong to it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 120


class RankedServer:
    """A server's process, what it wrote to stderr so far, and its ranks' processes.

    Attributes:
        lines: Of stderr.
    """

    def __init__(self, model: Path, *args: str) -> None:
        command = [sys.executable, "-m", "requant.entrypoints.openai_server", "--model", str(model)]
        command += [
            "--host",
            "127.0.0.1",
            "--server-port",
            "0",
            "--served-model-name",
            "tiny",
            "--device",
            "cpu",
            *args,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._seen: set[int] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def stderr(self) -> str:
        return "".join(self.lines)

    def url(self) -> str:
        """Where it serves, once it does."""
        self._wait(lambda: "serving at" in self.stderr)
        return re.search(r"serving at (http://\S+)", self.stderr)[1]  # type: ignore[index]

    def ranks(self, count: int) -> list[int]:
        """The process ids of ``count`` ranks, once there are so many; they are started in their order."""
        self._wait(lambda: len(self._children()) == count)
        return self._children()

    def end(self, within: float) -> int:
        """The exit code, which must come in time, after which no process may be left."""
        code = self.process.wait(within)
        self._reader.join(PATIENCE)
        left = [pid for pid in self._seen if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)]
        assert not left, f"processes are left: {left}"
        return code

    def kill(self) -> None:
        for pid in self._children():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def _wait(self, condition) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.stderr}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.stderr}"
            time.sleep(0.05)

    def _children(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int(re.search(r"PPid:\s+(\d+)", (entry / "status").read_text())[1])  # type: ignore[index]
                    command = (entry / "cmdline").read_text()
                except OSError:
                    continue
                if parent == self.process.pid and "spawn_main" in command:
                    found.append(int(entry.name))
        self._seen |= set(found)
        return sorted(found)


def _is_zombie(pid: int) -> bool:
    """Whether it has ended, and whoever inherited it has not asked for its exit code yet."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@contextmanager
def ranked(model: Path, args: Sequence[str]) -> Iterator[RankedServer]:
    server = RankedServer(model, *args)
    try:
        yield server
    finally:
        server.kill()
