"""The recipe: which layer becomes which format. Nothing here knows of tensors.

:meth:`Recipe.parse` reads what the user wrote, :func:`resolve` applies it to the names of a model's layers,
:func:`explain` tells why a layer got its target, :func:`source_quantization` reads what the checkpoint is.
"""

from requant.recipe.explain import explain
from requant.recipe.layer import Decision, LayerNames, Resolution
from requant.recipe.resolve import resolve
from requant.recipe.schema import FORMAT_ALIASES, FORMATS, Recipe, canonical_format
from requant.recipe.source import SourceQuantization, source_quantization

__all__ = [
    "FORMATS",
    "FORMAT_ALIASES",
    "Decision",
    "LayerNames",
    "Recipe",
    "Resolution",
    "SourceQuantization",
    "canonical_format",
    "explain",
    "resolve",
    "source_quantization",
]
