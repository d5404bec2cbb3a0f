"""The HTTP application: routes and error bodies around a started engine."""

from fastapi import FastAPI

from requant import __version__
from requant.server import chat, completions, models
from requant.server.errors import install_handlers
from requant.server.metrics import Metrics
from requant.server.serving import Serving


def create_app(serving: Serving, metrics: Metrics) -> FastAPI:
    """The application.

    Args:
        serving: The model; its engine is started.
        metrics: What ``/metrics`` shows; the engine tells it of finished requests.
    """
    app = FastAPI(title="requant", version=__version__)
    app.state.serving = serving
    app.state.metrics = metrics
    install_handlers(app)
    for module in (completions, chat, models):
        app.include_router(module.router)
    return app
