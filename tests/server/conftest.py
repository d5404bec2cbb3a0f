import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import requant_fakes
import uvicorn

from requant.engine.client import AsyncEngine
from requant.engine.config import EngineConfig
from requant.engine.tokenizer import Tokenizer, load_tokenizer
from requant.server.app import create_app
from requant.server.metrics import Metrics
from requant.server.serving import Serving


@dataclass
class Running:
    """A server on a loopback port, its engine in a process of its own, and clients for it."""

    url: str
    tokenizer: Tokenizer

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)


class Host:
    """Runs a server on a thread of its own."""

    def __init__(self, model: Path, factory: str) -> None:
        self._config = EngineConfig.create(model=str(model))
        self._tokenizer = load_tokenizer(self._config.model)
        self._metrics = Metrics()
        self._engine = AsyncEngine(self._config, lambda: self._tokenizer, factory, on_finished=self._metrics.observe)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._ready.wait(60)
        return Running(f"http://127.0.0.1:{self._socket.getsockname()[1]}", self._tokenizer)

    def __exit__(self, *_: object) -> None:
        self._http.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        await self._engine.start()
        app = create_app(Serving(self._engine, ("tiny", "tiny-alias"), "the/root"), self._metrics)
        self._http = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
        self._ready.set()
        try:
            await self._http.serve(sockets=[self._socket])
        finally:
            self._engine.stop()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return requant_fakes.make_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[Running]:
    with Host(tiny_model, "requant_fakes:build") as running:
        yield running


@pytest.fixture
def doomed(tiny_model: Path) -> Iterator[Running]:
    """A server of one's own, to be broken."""
    with Host(tiny_model, "requant_fakes:build") as running:
        yield running


@pytest.fixture(scope="session")
def server_without_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = requant_fakes.make_tokenizer(tmp_path_factory.mktemp("plain"), chat_template=None)
    with Host(model, "requant_fakes:build_three_a_step") as running:
        yield running
