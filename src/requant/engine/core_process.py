"""The engine core in a process of its own: what runs there, and what is said over the pipe.

Nothing here imports the HTTP server or the tokenizer, and the core itself is imported by the factory, in the
process that runs it.
"""

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from requant.engine.config import EngineConfig
from requant.engine.interface import Core, CoreFactory, ModelFacts, resolve
from requant.engine.logs import configure_logging
from requant.engine.messages import CoreRequest, StepResult
from requant.engine.seat import Seat
from requant.errors import RequantError, RequestError, one_line

if TYPE_CHECKING:
    from requant.engine.team import Team

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Add:
    """To the core: run these."""

    requests: tuple[CoreRequest, ...]


@dataclass(frozen=True)
class Abort:
    """To the core: end these."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Ready:
    """From the core, once: it takes requests."""

    facts: ModelFacts


@dataclass(frozen=True)
class Refused:
    """From the core: a request cannot be run."""

    request_id: str
    message: str


@dataclass(frozen=True)
class Failed:
    """From the core, as its last word.

    Attributes:
        message: One line.
        for_user: It could not be built, for a reason that the user can mend (a :class:`RequantError`).
        consequence: It failed because another rank did, which knows better why.
    """

    message: str
    for_user: bool
    consequence: bool = False


# How gloo, NCCL, the store they meet at and the pipes between the ranks say that the other side is no longer there.
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "remote process exited",
    "NCCL",
    "TCPStore",
)

ToCore = Add | Abort
FromCore = Ready | StepResult | Refused | Failed


def run_core(
    connection: Connection, config: EngineConfig, factory: CoreFactory, log_level: str, seat: Seat | None = None
) -> None:
    """Main function of the engine's process: build, then serve the pipe until its other end closes.

    An interrupt from the terminal is left to the parent, which then closes the pipe.

    Args:
        connection: Takes requests, gives what comes of them.
        config: What to build.
        factory: Builds it.
        log_level: Of the process's log.
        seat: Of rank 0, where there are several; it leads the others.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(log_level)
    inbox: SimpleQueue[ToCore] = SimpleQueue()
    threading.Thread(target=exit_with_parent, args=(connection, inbox.put), daemon=True).start()
    try:
        build = resolve(factory)
        with _joined(seat, config) as team:
            built = build(config, team) if team else build(config)
            gc.freeze()  # what is there now stays: no collection shall look at it while tokens are made
            connection.send(Ready(ModelFacts.of(built)))
            if team:
                team.counts = True
            _serve(built.core, connection, inbox)
    except BrokenPipeError:
        return
    except Exception as error:
        give_up(connection, error)


def _joined(seat: Seat | None, config: EngineConfig) -> "AbstractContextManager[Team | None]":
    if seat is None:
        return nullcontext()
    # Imported now: a process without peers needs nothing of it before it builds its core.
    from requant.engine.team import join

    seat.pulse.live(seat.rank)  # not before: libraries are loaded with Python's lock held, from a slow disk for long
    return join(seat, config.parallel)


def give_up(connection: Connection, error: Exception) -> NoReturn:
    """Say the last word of a process that failed, and end it: with exit code 2 where the user can mend it, else 1.

    The log has the traceback of a defect, unless it failed only because a peer is gone.
    """
    if isinstance(error, RequantError):
        connection.send(Failed(str(error), for_user=True))
        sys.exit(2)
    connection.send(_failed(error))
    sys.exit(1)


def _failed(error: Exception) -> Failed:
    if isinstance(error, EOFError):
        return Failed("rank 0 is gone", for_user=False, consequence=True)
    message = f"{type(error).__name__}: {one_line(error)}"
    consequence = isinstance(error, OSError | RuntimeError) and any(sign in str(error) for sign in _PEER_GONE)
    if consequence:
        logger.debug("a peer is gone", exc_info=True)
    else:
        logger.exception("the engine failed")
    return Failed(message, for_user=False, consequence=consequence)


def exit_with_parent(connection: Connection, take: Callable[[Any], None] = lambda message: None) -> None:
    """Hand messages on; when the parent has closed the pipe or is gone, end the process, whatever it is doing."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        take(message)


def _serve(core: Core, connection: Connection, inbox: "SimpleQueue[ToCore]") -> None:
    while True:
        # An idle core waits for the next message; a busy one takes what has come in between two steps.
        while not core.has_unfinished() or not inbox.empty():
            for refused in _apply(core, inbox.get()):
                connection.send(refused)
        connection.send(core.step())


def _apply(core: Core, message: ToCore) -> list[Refused]:
    if isinstance(message, Abort):
        core.abort(message.request_ids)
        return []
    refused = []
    for request in message.requests:
        try:
            core.add_request(request)
        except RequestError as error:
            refused.append(Refused(request.request_id, str(error)))
    return refused
