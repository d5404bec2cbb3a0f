"""Errors as OpenAI's API has them: ``{"error": {"message", "type", "param", "code"}}`` with the fitting status."""

import json
import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from requant.engine.interface import EngineDeadError
from requant.engine.prompts import ContextLengthError
from requant.errors import RequestError

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An error that is answered as it is."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON object to answer with."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """How an error is answered; one that nobody expected is answered without its details, and logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(500, f"no answer from the engine: {error}", code="engine_dead")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log says more", code="internal_error")


def install_handlers(app: FastAPI) -> None:
    """Have every error of ``app`` answered in one shape, those of the framework too."""

    async def on_error(request: Request, error: Exception) -> Response:
        return _response(as_api_error(error))

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _response(_explain(error))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _response(_http_error(request, error), error.headers)

    for kind in (ApiError, RequestError, EngineDeadError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


def _response(error: ApiError, headers: Any = None) -> Response:
    # json.dumps escapes whatever is not ASCII, so that no text of a request can break the answer.
    return Response(json.dumps(error.body()), error.status, headers, media_type="application/json")


def _http_error(request: Request, error: HTTPException) -> ApiError:
    route = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return ApiError(404, f"there is no route {route}", code="unknown_url")
    if error.status_code == 405:
        return ApiError(405, f"{route} is not a method of this route", code="method_not_allowed")
    if error.status_code == 400:  # the framework could not read the body, and says no more than that
        return ApiError(400, "the body cannot be read as JSON; accepted: a JSON object in UTF-8, not nested deeply")
    return ApiError(error.status_code, str(error.detail))


def _explain(error: RequestValidationError) -> ApiError:
    """One line for what pydantic found: the first field that is wrong, and all that would be accepted there."""
    found = error.errors()
    first = found[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    path = [part for part in first["loc"] if part != "body"]
    if not path:
        return ApiError(400, "the body is not a JSON object sent as content-type application/json")
    same = [entry for entry in found if entry["loc"][: len(first["loc"]) - len(path) + 1] == ("body", path[0])]
    reasons = dict.fromkeys(_reason(entry) for entry in same)
    return ApiError(400, f"{path[0]}: {', or '.join(reasons)}", param=str(path[0]))


def _reason(entry: Any) -> str:
    """One of pydantic's messages, with the place inside the field, where that is an item of a list."""
    place = "".join(f"[{part}]" for part in entry["loc"] if isinstance(part, int))
    message = entry["msg"].removeprefix("Value error, ")
    return f"{place} {message}".strip() if place else message
