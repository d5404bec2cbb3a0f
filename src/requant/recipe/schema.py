"""The recipe as the user writes it: one JSON object, parsed into a frozen :class:`Recipe`."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from requant.errors import RecipeError
from requant.recipe.patterns import Pattern

FORMATS = ("ptpc_fp8", "per_block_fp8", "mxfp4")
"""Canonical names of the target formats."""

FORMAT_ALIASES: Mapping[str, str] = {"per_block128_fp8": "per_block_fp8"}
"""Other spellings that a recipe may use, and the canonical name of each."""

GLOBAL_FIELD = "global_quant_config"
OVERRIDES_FIELD = "layer_quant_config"
EXCLUDE_FIELD = "exclude_layer"

_FLAG = "online_quant_config"
_FIELDS = (GLOBAL_FIELD, OVERRIDES_FIELD, EXCLUDE_FIELD)
_ACCEPTED_FORMATS = ", ".join((*FORMATS, *(f"{alias} (= {name})" for alias, name in FORMAT_ALIASES.items())))
_JSON_KINDS = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class Recipe:
    """Which layers become which format. :meth:`parse` reads and validates what a user wrote.

    Attributes:
        global_format: Canonical format of every layer that no other rule decides; None: they are kept.
        overrides: (pattern, canonical format), the first match wins.
        exclude: Patterns of the layers that keep the source's precision.
    """

    global_format: str | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def parse(cls, value: str | os.PathLike[str] | Mapping[str, Any] | None) -> "Recipe":
        """Read a recipe.

        Args:
            value: JSON text, the path of a JSON file, or the object itself. A string that starts with ``{`` or
                ``[``, or is JSON in any other way, is JSON; any other string is a path. None, an empty string
                and an empty object are the empty recipe.

        Raises:
            RecipeError: Unreadable file, malformed JSON, unknown field, wrong type, unknown format, bad
                regular expression or a key that appears twice; the message names the field.
        """
        if value is None or (isinstance(value, str) and not value.strip()):
            return cls()
        given: object = value
        if isinstance(value, str):
            given = _load_text(value)
        elif isinstance(value, os.PathLike):
            given = _load_file(value)
        if not isinstance(given, Mapping):
            raise RecipeError(
                f"{_FLAG} is {_show(given)}; accepted: a JSON object with the fields {', '.join(_FIELDS)}"
            )
        for key in given:
            if key not in _FIELDS:
                raise RecipeError(f"{_FLAG} has the unknown field {key!r}; accepted fields: {', '.join(_FIELDS)}")
        return cls(
            global_format=_parse_global(given.get(GLOBAL_FIELD, "")),
            overrides=_parse_overrides(given.get(OVERRIDES_FIELD, {})),
            exclude=_parse_exclude(given.get(EXCLUDE_FIELD, [])),
        )

    @property
    def is_empty(self) -> bool:
        """Whether the recipe has no rule at all."""
        return self == Recipe()

    def __bool__(self) -> bool:
        return not self.is_empty

    def to_dict(self) -> dict[str, Any]:
        """The canonical JSON object: fields without content are absent, formats have their canonical names."""
        result: dict[str, Any] = {}
        if self.global_format is not None:
            result[GLOBAL_FIELD] = self.global_format
        if self.overrides:
            result[OVERRIDES_FIELD] = dict(self.overrides)
        if self.exclude:
            result[EXCLUDE_FIELD] = list(self.exclude)
        return result

    def digest(self) -> str:
        """SHA-256 (hex) that is equal for recipes with the same effect on every model.

        The order of the overrides counts, since the first match wins; that of the excludes does not.
        """
        canonical = [self.global_format, self.overrides, sorted(set(self.exclude))]
        return hashlib.sha256(json.dumps(canonical).encode()).hexdigest()


def canonical_format(name: str) -> str:
    """The canonical name of a format: case and surrounding blanks do not count, aliases are replaced.

    Raises:
        RecipeError: No such format; the message lists the accepted ones.
    """
    folded = name.strip().lower()
    folded = FORMAT_ALIASES.get(folded, folded)
    if folded not in FORMATS:
        raise RecipeError(f"unknown format {name!r}; accepted: {_ACCEPTED_FORMATS}")
    return folded


def _parse_global(value: object) -> str | None:
    if isinstance(value, str) and not value.strip():
        return None
    return _parse_format(GLOBAL_FIELD, value, f'{_ACCEPTED_FORMATS}, or "" for none')


def _parse_overrides(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise RecipeError(f"{OVERRIDES_FIELD} is {_show(value)}; accepted: an object of patterns and their formats")
    return tuple(
        (_parse_pattern(OVERRIDES_FIELD, pattern), _parse_format(f"{OVERRIDES_FIELD}[{pattern!r}]", target))
        for pattern, target in value.items()
    )


def _parse_exclude(value: object) -> tuple[str, ...]:
    if value == "":
        return ()
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple):
        raise RecipeError(f"{EXCLUDE_FIELD} is {_show(value)}; accepted: a pattern or a list of patterns")
    return tuple(dict.fromkeys(_parse_pattern(EXCLUDE_FIELD, pattern) for pattern in patterns))


def _parse_format(where: str, value: object, accepted: str = _ACCEPTED_FORMATS) -> str:
    if not isinstance(value, str):
        raise RecipeError(f"{where} is {_show(value)}; accepted: {accepted}")
    try:
        return canonical_format(value)
    except RecipeError:
        raise RecipeError(f"{where} is the unknown format {value!r}; accepted: {accepted}") from None


def _parse_pattern(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise RecipeError(f"{where} has a pattern that is {_show(value)}; accepted: strings")
    try:
        return Pattern(value).text
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _load_text(text: str) -> object:
    try:
        return _load_json(text)
    except ValueError as error:
        if text.lstrip().startswith(("{", "[")):
            raise RecipeError(f"{_FLAG} is not valid JSON: {error}") from None
        if not os.path.exists(text):
            raise RecipeError(f"{_FLAG} is {_clip(text)}; it is no file, and not valid JSON: {error}") from None
    return _load_file(text)


def _load_file(path: str | os.PathLike[str]) -> object:
    name = f"{_FLAG} file {os.fspath(path)!r}"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RecipeError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecipeError(f"{name} cannot be read: {error}") from None
    try:
        return _load_json(text)
    except ValueError as error:
        raise RecipeError(f"{name} is not valid JSON: {error}") from None


def _load_json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise RecipeError(f"{_FLAG} is nested too deeply; accepted: an object of at most two levels") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RecipeError(f"{_FLAG} has {twice!r} twice in one JSON object; accepted: each field and pattern once")
    return result


def _show(value: object) -> str:
    if value is None:
        return "null"
    kind = _JSON_KINDS.get(type(value), f"of type {type(value).__name__}")
    return f"{_clip(value)} ({kind})"


def _clip(value: object) -> str:
    """One line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
