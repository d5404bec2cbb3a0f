"""The command line's flags of engine and server."""

import argparse

from requant.engine.config import PARTS, EngineConfig
from requant.flags import add_flags, values
from requant.server.config import ServerConfig


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Every option of :class:`EngineConfig`, grouped by its part."""
    for part in PARTS.values():
        add_flags(parser, part)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Every option of :class:`ServerConfig`."""
    add_flags(parser, ServerConfig)


def engine_config(parsed: argparse.Namespace) -> EngineConfig:
    """The engine's configuration.

    Raises:
        ConfigError: A value is not accepted.
    """
    return EngineConfig.create(**values(parsed, *PARTS.values()))


def server_config(parsed: argparse.Namespace) -> ServerConfig:
    """The server's configuration.

    Raises:
        ConfigError: A value is not accepted.
    """
    return ServerConfig(**values(parsed, ServerConfig))
