"""The small routes: models, health, version, metrics."""

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from requant import __version__
from requant.server.errors import ApiError
from requant.server.metrics import Metrics
from requant.server.serving import Serving

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The model, once under each of its names."""
    serving: Serving = request.app.state.serving
    return {"object": "list", "data": [_card(serving, name) for name in serving.model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """The model under one of its names."""
    serving: Serving = request.app.state.serving
    return _card(serving, serving.model_name(name))


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine lives, 503 from then on."""
    serving: Serving = request.app.state.serving
    if serving.engine.dead is not None:
        raise ApiError(503, f"the engine failed: {serving.engine.dead}", code="engine_dead")
    return Response(status_code=200)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of requant."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    found: Metrics = request.app.state.metrics
    return Response(found.render(request.app.state.serving.engine.stats), media_type=CONTENT_TYPE_LATEST)


def _card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "requant",
        "root": serving.root,
        "parent": None,
        "max_model_len": serving.engine.facts.max_model_len,
    }
