"""Flags made from configuration dataclasses: a field is a flag, with its help, choices and default."""

import argparse
from dataclasses import field as _field
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from requant.errors import ConfigError


def option(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field with what its flag needs: ``help``, and optionally ``choices``, ``short``, ``metavar``."""
    return _field(default=default, metadata={"help": help, **extra})


def check(accepted: bool, name: str, value: object, what: str) -> None:
    """Refuse the value of an option.

    Args:
        accepted: Whether it is accepted after all.
        name: The field's name.
        value: What was given.
        what: What is accepted.

    Raises:
        ConfigError: It is not accepted.
    """
    if not accepted:
        raise ConfigError(f"--{name.replace('_', '-')} is {value!r}; accepted: {what}")


def add_flags(parser: argparse.ArgumentParser, part: type) -> None:
    """A flag for every field of a dataclass, as a group of its own; only what was given comes into the namespace."""
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
            options |= {"nargs": "+", "metavar": field.metadata.get("metavar", "NAME")}
        else:
            options["type"] = str if kind is Any else kind
            options["choices"] = field.metadata.get("choices")
            if not options["choices"]:
                options["metavar"] = field.metadata.get("metavar", options["type"].__name__.upper())
        group.add_argument(*names, **options)


def values(parsed: argparse.Namespace, *parts: type) -> dict[str, Any]:
    """What was given for the fields of some dataclasses, by name."""
    given = vars(parsed)
    found = {field.name: given[field.name] for part in parts for field in fields(part) if field.name in given}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _help(text: str, default: Any) -> str:
    text = text.replace("%", "%%")
    return text if default in (None, "", (), False) else f"{text} (default: {default})"


def _plain(annotation: Any) -> Any:
    """The type behind ``T | None``; ``tuple`` for ``tuple[T, ...]``."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    return get_origin(annotation) or annotation
