"""Running the server: the port first, then the engine, then HTTP, and an end that leaves nothing behind."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from requant.engine.client import AsyncEngine
from requant.engine.config import EngineConfig
from requant.engine.interface import BUILD_CORE, CoreFactory, EngineDeadError
from requant.engine.tokenizer import load_tokenizer
from requant.errors import ConfigError
from requant.server.app import create_app
from requant.server.config import ServerConfig
from requant.server.metrics import Metrics
from requant.server.serving import Serving

logger = logging.getLogger(__name__)

# Seconds that open requests may take to end once the server is told to stop; then they are answered with an error.
_GRACE = 2
_KEEP_ALIVE = 60
_BACKLOG = 2048


class EngineFailure(Exception):
    """The engine's process failed, while starting or later."""


def serve(engine: EngineConfig, server: ServerConfig, core_factory: CoreFactory = BUILD_CORE) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        RequantError: The port is taken, or model or recipe are not acceptable; nothing was served.
        EngineFailure: The engine failed; open requests were answered with an error.
        KeyboardInterrupt: A signal came before anything was served.
    """
    with _bind(server) as listener:
        asyncio.run(_serve(engine, server, core_factory, listener))


def _bind(server: ServerConfig) -> socket.socket:
    """Take the port, without listening yet: until the model is there, clients are refused, not kept waiting."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    # The protocol is named, since only then asyncio sets TCP_NODELAY, without which a first token waits for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((server.host, server.server_port))
    except (OSError, TypeError, ValueError) as error:  # the latter two: the host cannot be encoded as a name
        listener.close()
        raise _port_error(server, error) from error
    return listener


def _port_error(server: ServerConfig, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(
        f"cannot listen on {server.host} port {server.server_port}: {reason}; "
        "choose another --server-port, or --server-port 0 for a free one"
    )


async def _serve(config: EngineConfig, server: ServerConfig, factory: CoreFactory, listener: socket.socket) -> None:
    metrics = Metrics()
    http: _Http | None = None
    failure: EngineDeadError | None = None
    loading: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]

    def stop() -> None:
        if http is None:
            loading.cancel()
        else:
            http.should_exit = True
            asyncio.get_running_loop().call_later(_GRACE, engine.stop)

    def died(error: EngineDeadError) -> None:
        nonlocal failure
        failure = error
        stop()

    for kind in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(kind, stop)
    engine = AsyncEngine(
        config,
        lambda: load_tokenizer(config.model, server.chat_template),
        factory,
        server.log_level,
        on_finished=metrics.observe,
        on_death=died,
    )
    try:
        await engine.start()
        names = server.served_model_name or (config.model.model,)
        http = _Http(create_app(Serving(engine, names, config.model.model), metrics), server)
        await http.listen_and_serve(listener, engine)
    except EngineDeadError as error:
        raise EngineFailure(f"the engine failed while starting: {error}") from error
    except asyncio.CancelledError:
        if failure is None:
            raise KeyboardInterrupt from None
    finally:
        engine.stop()
    if failure is not None:
        raise EngineFailure(f"the engine failed: {failure}")


class _Http(uvicorn.Server):
    """uvicorn, with the signals left to the caller: its own way ends the process by the signal once more."""

    def __init__(self, app: FastAPI, server: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_GRACE + 2,
            )
        )
        self._server = server

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def listen_and_serve(self, listener: socket.socket, engine: AsyncEngine) -> None:
        try:
            listener.listen(_BACKLOG)
        except OSError as error:
            raise _port_error(self._server, error) from error
        host, port = listener.getsockname()[:2]
        where = f"[{host}]" if ":" in host else host
        logger.info("serving at http://%s:%d (context: %d tokens)", where, port, engine.facts.max_model_len)
        await self.serve(sockets=[listener])
