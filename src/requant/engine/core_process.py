"""The engine core in a process of its own: what runs there, and what is said over the pipe.

Nothing here imports the HTTP server or the tokenizer, and the core itself is imported by the factory, in the
process that runs it.
"""

import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue

from requant.engine.config import EngineConfig
from requant.engine.interface import Core, CoreFactory, ModelFacts, resolve
from requant.engine.logs import configure_logging
from requant.engine.messages import CoreRequest, StepResult
from requant.errors import RequantError, RequestError

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
    """

    message: str
    for_user: bool


ToCore = Add | Abort
FromCore = Ready | StepResult | Refused | Failed


def run_core(connection: Connection, config: EngineConfig, factory: CoreFactory, log_level: str) -> None:
    """Main function of the engine's process: build, then serve the pipe until its other end closes.

    An interrupt from the terminal is left to the parent, which then closes the pipe.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(log_level)
    inbox: SimpleQueue[ToCore] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    try:
        built = resolve(factory)(config)
        connection.send(Ready(ModelFacts.of(built)))
        _serve(built.core, connection, inbox)
    except BrokenPipeError:
        return
    except RequantError as error:
        connection.send(Failed(str(error), for_user=True))
        sys.exit(2)
    except Exception as error:
        logger.exception("the engine failed")
        connection.send(Failed(f"{type(error).__name__}: {error}", for_user=False))
        sys.exit(1)


def _receive(connection: Connection, inbox: "SimpleQueue[ToCore]") -> None:
    """Hand messages on; when the parent has closed the pipe or is gone, end the process, whatever it is doing."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        inbox.put(message)


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
