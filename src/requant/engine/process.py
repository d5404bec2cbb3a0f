"""The front end's handle of the engine's processes, one a rank: start, talk to rank 0, and leave nothing behind."""

import logging
import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from queue import Empty, SimpleQueue

from requant.engine.config import EngineConfig, ParallelConfig
from requant.engine.core_process import Failed, FromCore, ToCore, run_core
from requant.engine.interface import CoreFactory
from requant.engine.seat import Pulse, Seat, listen
from requant.engine.worker import run_worker
from requant.errors import ConfigError

logger = logging.getLogger(__name__)

_PATIENCE = 2.0  # Seconds that a process which was told to end may take before it is killed.
_CULPRIT = 3.0  # Seconds to wait for the rank that failed first, once one has failed because another did.
_LOOK = 0.5  # Seconds between two looks at the ranks' pulse.


@dataclass
class _Rank:
    """One process, this end of its pipe and, until it is started, the other end."""

    process: SpawnProcess
    connection: Connection
    theirs: Connection


class EngineProcess:
    """The engine core's process and the pipe to it; with several ranks, those of the others as well.

    Whichever of them fails, ends or hangs first is what the engine failed of, and ends all.

    Args:
        config: What to build.
        factory: Builds rank 0's core, over there.
        log_level: Of rank 0's log, which goes to this process's stderr.

    Raises:
        ConfigError: The ranks cannot meet at the port that the configuration names.
    """

    def __init__(self, config: EngineConfig, factory: CoreFactory, log_level: str = "info") -> None:
        context = multiprocessing.get_context("spawn")
        self._patience = config.parallel.worker_timeout
        self._pulse: _PulseReader | None = None
        self._ranks: list[_Rank] = []
        self._handed_over: list[Connection | socket.socket] = []
        if config.parallel.tensor_parallel_size == 1:
            self._add(context, run_core, config, factory, log_level)
        else:
            self._add_ranks(context, config, factory, log_level)
        self._events: SimpleQueue[tuple[int, Failed]] = SimpleQueue()
        self._readers: list[threading.Thread] = []
        self._supervisor: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Process id of rank 0, once started."""
        return self.pids[0]

    @property
    def pids(self) -> list[int | None]:
        """Process ids of all ranks, once started."""
        return [rank.process.pid for rank in self._ranks]

    def start(self, on_message: Callable[[FromCore], None]) -> None:
        """Start the processes.

        Args:
            on_message: Called for every message, on threads of its own. The last message is a
                :class:`~requant.engine.core_process.Failed`, also if a process ended without a word.
        """
        for rank in self._ranks:
            rank.process.start()
            rank.theirs.close()
        for end in self._handed_over:  # so that one is noticed whose process is gone
            end.close()
        self._readers = [
            _thread(f"engine-reader-{index}", self._read, index, on_message) for index in range(len(self._ranks))
        ]
        self._supervisor = _thread("engine-supervisor", self._supervise, on_message)

    def send(self, message: ToCore) -> None:
        """Send rank 0 a message; one to a process that is gone is dropped, since a reader tells of that."""
        try:
            self._ranks[0].connection.send(message)
        except OSError as error:
            logger.debug("the engine's process does not take messages any more: %s", error)

    def stop(self) -> None:
        """End the processes, at once and whatever they are doing; returns when they are gone."""
        self._events.put((0, Failed("the engine was shut down", for_user=False)))
        self._end()
        if self._supervisor is not None:
            self._supervisor.join()
        for rank in self._ranks:
            rank.connection.close()

    def _end(self) -> None:
        started = [rank.process for rank in self._ranks if rank.process.pid is not None]
        for process in started:
            process.terminate()
        deadline = time.monotonic() + _PATIENCE
        for process in started:
            process.join(max(deadline - time.monotonic(), 0))
        for process in started:
            if process.is_alive():  # stopped, or in the middle of something that cannot be interrupted
                process.kill()
                process.join()

    def _add(self, context: SpawnContext, main: Callable[..., None], *args: object) -> None:
        connection, theirs = context.Pipe()
        name = f"requant-engine-{len(self._ranks)}"
        # A daemon is ended with its parent, should the parent end without calling stop().
        process = context.Process(target=main, args=(theirs, *args), name=name, daemon=True)
        self._ranks.append(_Rank(process, connection, theirs))

    def _add_ranks(self, context: SpawnContext, config: EngineConfig, factory: CoreFactory, log_level: str) -> None:
        parallel = config.parallel
        try:
            listener = listen(parallel.port)
        except OSError as error:
            raise ConfigError(_port_error(parallel, error)) from error
        port, pulse = listener.getsockname()[1], Pulse(context, parallel.tensor_parallel_size)
        pipes = [context.Pipe(duplex=False) for _ in range(1, parallel.tensor_parallel_size)]
        leader = Seat(0, port, pulse, listener, [sender for _, sender in pipes])
        self._add(context, run_core, config, factory, log_level, leader)
        for rank, (receiver, _) in enumerate(pipes, start=1):
            self._add(context, run_worker, config, Seat(rank, port, pulse, None, [receiver]))
        self._pulse = _PulseReader(pulse.size, pulse.alive, pulse.begun)
        self._handed_over = [listener, *(end for pipe in pipes for end in pipe)]

    def _read(self, index: int, on_message: Callable[[FromCore], None]) -> None:
        """Hand the messages of one rank on, and its end to the supervisor."""
        rank = self._ranks[index]
        while True:
            try:
                message = rank.connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(message, Failed):
                self._events.put((index, message))
                return
            on_message(message)
        code = _exit_code(rank.process)
        ended = (
            f"was ended by {_signal_name(-code)}" if code is not None and code < 0 else f"ended with exit code {code}"
        )
        message = Failed(f"the engine's process {ended}", for_user=False, consequence=code == 0)
        self._events.put((index, message))

    def _supervise(self, on_message: Callable[[FromCore], None]) -> None:
        """Wait for the first failure, find out whose it is, end all ranks and tell."""
        event = None
        while event is None:
            try:
                event = self._events.get(timeout=_LOOK)
            except Empty:
                event = self._pulse.missed(self._patience) if self._pulse else None
        if event[1].consequence:
            event = self._culprit(event)
        index, failure = event
        if len(self._ranks) > 1 and not failure.for_user:
            failure = Failed(f"rank {index}: {failure.message}", for_user=False)
        self._end()
        for reader in self._readers:
            reader.join()
        on_message(failure)

    def _culprit(self, event: tuple[int, Failed]) -> tuple[int, Failed]:
        deadline = time.monotonic() + _CULPRIT
        while time.monotonic() < deadline:
            try:
                other = self._events.get(timeout=_LOOK)
            except Empty:
                continue
            if not other[1].consequence:
                return other
        return event


class _PulseReader:
    """Watches the ranks' signs of life.

    Args:
        size: How many ranks.
        alive: Signs of life of a rank.
        begun: Collectives that a rank has begun.
    """

    def __init__(self, size: int, alive: Callable[[int], int], begun: Callable[[int], int]) -> None:
        self._alive, self._begun = alive, begun
        now = time.monotonic()
        self._seen = [(0, now)] * size
        self._level = [(0, now)] * size

    def missed(self, patience: float) -> tuple[int, Failed] | None:
        """The rank that has given no sign for ``patience`` seconds, or has been behind another for as long; or None."""
        now = time.monotonic()
        furthest = max(self._begun(rank) for rank in range(len(self._seen)))
        for rank in range(len(self._seen)):
            alive, begun = self._alive(rank), self._begun(rank)
            if alive != self._seen[rank][0]:
                self._seen[rank] = alive, now
            if begun != self._level[rank][0] or begun == furthest:
                self._level[rank] = begun, now
        for rank, (alive, since) in enumerate(self._seen):
            if alive and now - since > patience:
                return rank, Failed(f"no sign of life for {now - since:.0f} seconds", for_user=False)
        for rank, (_, since) in enumerate(self._level):
            if now - since > patience:
                return rank, Failed(f"hangs: {now - since:.0f} seconds behind the others", for_user=False)
        return None


def _thread(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


def _exit_code(process: SpawnProcess) -> int | None:
    """The exit code of a process that has closed its pipe; None if it lives on.

    Another thread may be asking for it as well, and only one is told by the system: the other looks again.
    """
    deadline = time.monotonic() + _PATIENCE
    while process.exitcode is None and time.monotonic() < deadline:
        process.join(0.05)
    return process.exitcode


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _port_error(config: ParallelConfig, error: OSError) -> str:
    return (
        f"the ranks cannot meet at port {config.port} of this host: {error.strerror or error}; "
        "choose another --port, or none for a free one"
    )
