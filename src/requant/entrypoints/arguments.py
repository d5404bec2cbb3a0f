"""Flags made from configuration dataclasses: a field is a flag, with its help, choices and default."""

import argparse
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from requant.engine.config import PARTS, EngineConfig
from requant.server.config import ServerConfig


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Every option of :class:`EngineConfig`, grouped by its part."""
    for part in PARTS.values():
        _add_flags(parser, part)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Every option of :class:`ServerConfig`."""
    _add_flags(parser, ServerConfig)


def engine_config(parsed: argparse.Namespace) -> EngineConfig:
    """The engine's configuration.

    Raises:
        ConfigError: A value is not accepted.
    """
    return EngineConfig.create(**_values(parsed, *PARTS.values()))


def server_config(parsed: argparse.Namespace) -> ServerConfig:
    """The server's configuration.

    Raises:
        ConfigError: A value is not accepted.
    """
    return ServerConfig(**_values(parsed, ServerConfig))


def _add_flags(parser: argparse.ArgumentParser, part: type) -> None:
    group = parser.add_argument_group(part.__name__.removesuffix("Config").lower(), (part.__doc__ or "").strip())
    types = get_type_hints(part)
    for field in fields(part):
        names = [f"-{field.metadata['short']}"] if "short" in field.metadata else []
        names.append(f"--{field.name.replace('_', '-')}")
        # Only what was given is in the namespace: the dataclasses alone know the defaults.
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        options["help"] = _help(field.metadata["help"], field.default)
        kind = _plain(types[field.name])
        if kind is bool:
            options["action"] = "store_true"
        elif kind is tuple:
            options |= {"nargs": "+", "metavar": "NAME"}
        else:
            options["type"] = str if kind is Any else kind
            options["choices"] = field.metadata.get("choices")
            if not options["choices"]:
                options["metavar"] = field.metadata.get("metavar", options["type"].__name__.upper())
        group.add_argument(*names, **options)


def _help(text: str, default: Any) -> str:
    text = text.replace("%", "%%")
    return text if default in (None, "", (), False) else f"{text} (default: {default})"


def _plain(annotation: Any) -> Any:
    """The type behind ``T | None``; ``tuple`` for ``tuple[T, ...]``."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    return get_origin(annotation) or annotation


def _values(parsed: argparse.Namespace, *parts: type) -> dict[str, Any]:
    given = vars(parsed)
    values = {field.name: given[field.name] for part in parts for field in fields(part) if field.name in given}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
