"""Serving a model, for both command lines that do it."""

import argparse

from requant.console import EngineFailed
from requant.engine.interface import BUILD_CORE, CoreFactory
from requant.engine.logs import configure_logging
from requant.entrypoints.arguments import add_engine_flags, add_server_flags, engine_config, server_config

DESCRIPTION = "Serve a model over the OpenAI API, quantized while it loads."


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of engine and server."""
    add_engine_flags(parser)
    add_server_flags(parser)


def serve(parsed: argparse.Namespace, core_factory: CoreFactory = BUILD_CORE) -> None:
    """Serve until told to stop.

    Raises:
        RequantError: Something the user gave is not acceptable; nothing was served.
        EngineFailed: The engine failed.
    """
    engine, server = engine_config(parsed), server_config(parsed)
    configure_logging(server.log_level)
    # Imported now, so that help and a wrong flag are answered at once.
    from requant.server import launch

    try:
        launch.serve(engine, server, core_factory)
    except launch.EngineFailure as error:
        raise EngineFailed(str(error)) from error
