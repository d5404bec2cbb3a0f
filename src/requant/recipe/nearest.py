"""The names of a model that come nearest to a pattern that matches none of them."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from itertools import chain

from requant.recipe.layer import LayerNames
from requant.recipe.patterns import parents, strip_weight

_NUMBER = re.compile(r"\d+")
_WHOLE_STAR = re.compile(r"(?<=\.)\*(?=\.)")
_NOT_A_NAME = re.compile(r"[^\w.]+")


def nearest_names(text: str, layers: Iterable[LayerNames], count: int = 3) -> list[str]:
    """Names of ``layers`` (modules, parts or their parents) that look most like ``text``, the best first.

    Names that differ in numbers only count as one; the one whose numbers come nearest to those in ``text``
    stands for them.

    Args:
        text: A pattern or a name.
        layers: The model's layers.
        count: How many names at most.
    """
    wanted = _NOT_A_NAME.sub("", _WHOLE_STAR.sub("0", text.removeprefix("re:")))
    wanted = strip_weight(_NUMBER.sub("0", wanted)).strip(".")
    depth = wanted.count(".") + 1

    def likeness(shape: str) -> float:
        # A pattern is mostly the end of a name; the parents among the names stand for their middles.
        return SequenceMatcher(None, wanted, ".".join(shape.split(".")[-depth:])).ratio()

    numbers = [int(digits) for digits in _NUMBER.findall(text)]

    def distance(name: str) -> int:
        return sum(abs(a - int(b)) for a, b in zip(numbers, _NUMBER.findall(name), strict=False))

    shapes: dict[str, list[str]] = {}
    for name in _all_names(layers):
        shapes.setdefault(_NUMBER.sub("0", name), []).append(name)
    best = sorted(shapes, key=likeness, reverse=True)[:count]
    return [min(shapes[shape], key=distance) for shape in best]


def _all_names(layers: Iterable[LayerNames]) -> Iterable[str]:
    names: dict[str, None] = {}
    for layer in layers:
        for own in (layer.module, *layer.parts, *chain(*layer.aliases)):
            names[own] = None
            names.update(dict.fromkeys(parents(own)))
    return names
