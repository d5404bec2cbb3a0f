"""The parent's handle of the engine's process: start it, talk to it, and leave nothing behind."""

import logging
import multiprocessing
import threading
from collections.abc import Callable

from requant.engine.config import EngineConfig
from requant.engine.core_process import Failed, FromCore, ToCore, run_core
from requant.engine.interface import CoreFactory

logger = logging.getLogger(__name__)

_PATIENCE = 5.0  # Seconds that a process which was told to end may take before it is killed.


class EngineProcess:
    """The engine core's process and the pipe to it.

    Args:
        config: What to build.
        factory: Builds it, over there.
        log_level: Of the process's log, which goes to this process's stderr.
    """

    def __init__(self, config: EngineConfig, factory: CoreFactory, log_level: str = "info") -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, self._theirs = context.Pipe()
        # A daemon is ended with its parent, should the parent end without calling stop().
        self._process = context.Process(
            target=run_core, args=(self._theirs, config, factory, log_level), name="requant-engine", daemon=True
        )
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return self._process.pid

    def start(self, on_message: Callable[[FromCore], None]) -> None:
        """Start the process.

        Args:
            on_message: Called for every message, on a thread of its own. The last message is a
                :class:`~requant.engine.core_process.Failed`, also if the process ended without a word.
        """
        self._process.start()
        self._theirs.close()
        self._reader = threading.Thread(target=self._read, args=(on_message,), name="engine-reader", daemon=True)
        self._reader.start()

    def send(self, message: ToCore) -> None:
        """Send a message; one to a process that is gone is dropped, since the reader tells of that."""
        try:
            self._connection.send(message)
        except OSError as error:
            logger.debug("the engine's process does not take messages any more: %s", error)

    def stop(self) -> None:
        """End the process, at once and whatever it is doing; returns when it is gone."""
        if self._process.pid is None:
            return
        self._process.terminate()
        self._process.join(_PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        if self._reader is not None:
            self._reader.join()
        self._connection.close()

    def _read(self, on_message: Callable[[FromCore], None]) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                break
            on_message(message)
            if isinstance(message, Failed):
                return
        self._process.join(_PATIENCE)
        on_message(Failed(f"the engine's process ended with exit code {self._process.exitcode}", for_user=False))
