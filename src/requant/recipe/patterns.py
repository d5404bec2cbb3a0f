"""Patterns over the names of a layer's parts: exact names, globs and regular expressions."""

import fnmatch
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import eq

from requant.errors import RecipeError

_REGEX_PREFIX = "re:"
_GLOB_CHARACTERS = frozenset("*?[")
_WEIGHT = ".weight"


@dataclass(frozen=True)
class Pattern:
    """One pattern of a recipe, compiled.

    With ``*``, ``?`` or ``[`` it is a case-sensitive glob over a whole name (``*`` crosses dots); without, it
    equals a name; with ``re:`` in front it is a regular expression that is searched in a name.

    A part goes by its module's name, its own checkpoint name, each of those with ``.weight`` appended, and
    every parent of them; a regular expression sees the module's and the checkpoint name only.

    Attributes:
        text: The pattern as the user wrote it.

    Raises:
        RecipeError: ``text`` holds a regular expression that does not compile.
    """

    text: str
    _test: Callable[[str], object] = field(init=False, repr=False, compare=False)
    # Parents are shared by many parts, so their answers are kept: 256 experts × 3 matrices ask for one layer.
    _lineages: dict[str, bool] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_test", _compile(self.text))

    @property
    def is_regex(self) -> bool:
        """Whether the pattern is a regular expression."""
        return self.text.startswith(_REGEX_PREFIX)

    @property
    def last_component(self) -> str | None:
        """What stands behind the last dot once ``.weight`` is stripped; None for a regular expression."""
        return None if self.is_regex else last_component(self.text.removesuffix(_WEIGHT))

    def hits(self, module: str, parts: Sequence[str]) -> list[bool]:
        """Which of the parts of one layer the pattern matches.

        Args:
            module: The module's name.
            parts: The parts' checkpoint names, without ``.weight``.

        Returns:
            One answer per part, in their order.
        """
        if self._matches_or_parent(module):
            return [True] * len(parts)
        return [part != module and self._matches_or_parent(part) for part in parts]

    def matched_name(self, module: str, part: str) -> str | None:
        """The first of a part's names that the pattern matches, None if there is none."""
        for own in (module, part):
            for name in (own,) if self.is_regex else _names(own):
                if self._test(name):
                    return name
        return None

    def _matches_or_parent(self, name: str) -> bool:
        if self.is_regex:
            return bool(self._test(name))
        return bool(self._test(name)) or bool(self._test(name + _WEIGHT)) or self._parent_matches(name)

    def _parent_matches(self, name: str) -> bool:
        parent = name.rpartition(".")[0]
        if not parent:
            return False
        known = self._lineages.get(parent)
        if known is None:
            known = self._lineages[parent] = bool(self._test(parent)) or self._parent_matches(parent)
        return known


def last_component(name: str) -> str:
    """``gate`` of ``model.layers.0.mlp.gate``."""
    return name.rpartition(".")[2]


def strip_weight(name: str) -> str:
    """``name`` without a ``.weight`` at its end."""
    return name.removesuffix(_WEIGHT)


def parents(name: str) -> Iterator[str]:
    """Every parent of a dotted name, the nearest first."""
    while name := name.rpartition(".")[0]:
        yield name


def _names(own: str) -> Iterator[str]:
    yield own
    yield own + _WEIGHT
    yield from parents(own)


def _compile(text: str) -> Callable[[str], object]:
    if text.startswith(_REGEX_PREFIX):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what may mean something else in a later Python
                return re.compile(text.removeprefix(_REGEX_PREFIX)).search
        except (re.error, OverflowError, RecursionError) as error:
            raise RecipeError(f"{text!r} is not a valid regular expression: {error}") from None
    if _GLOB_CHARACTERS.intersection(text):
        return re.compile(fnmatch.translate(text)).match
    return partial(eq, text)
