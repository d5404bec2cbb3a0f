"""What the endpoints share: the engine, the model's names, streams of events, and clients that go away."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from requant.engine.client import AsyncEngine
from requant.server.errors import ApiError, as_api_error

_CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True)
class Serving:
    """A model being served.

    Attributes:
        engine: Started.
        model_names: What requests may call the model; responses use the first one if a request names none.
        root: The checkpoint, as the user named it.
        created: When serving began, in seconds since 1970.
    """

    engine: AsyncEngine
    model_names: tuple[str, ...]
    root: str
    created: int = field(default_factory=lambda: int(time.time()))

    def model_name(self, asked: str | None) -> str:
        """The model's name for the response.

        Raises:
            ApiError: The request asks for another model.
        """
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            names = ", ".join(self.model_names)
            raise ApiError(404, f"there is no model {asked!r}; accepted: {names}", "model", "model_not_found")
        return asked


class EventStream(StreamingResponse):
    """Server-sent events: each object of a generator, then ``[DONE]``.

    An error once the stream has begun is an event of its own. The generator is closed with the response, so that
    what it runs ends when the client goes away.
    """

    def __init__(self, objects: AsyncGenerator[BaseModel, None]) -> None:
        self._events = _events(objects)
        super().__init__(self._events, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the generator is closed however that ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _events(objects: AsyncGenerator[BaseModel, None]) -> AsyncGenerator[str, None]:
    try:
        async for item in objects:
            yield f"data: {item.model_dump_json()}\n\n"
    except Exception as error:
        yield f"data: {json.dumps(as_api_error(error).body())}\n\n"
    finally:
        await objects.aclose()
    yield "data: [DONE]\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, BaseModel]) -> Response:
    """Answer with what ``work`` gives; cancel it if the client goes away meanwhile."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return Response(task.result().model_dump_json(), media_type="application/json")
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait({task, gone})


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
