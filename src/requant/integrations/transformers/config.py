"""The recipe as transformers takes it: a quantization config."""

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from requant.recipe import Recipe, SourceQuantization, source_quantization

METHOD = "requant"
"""The ``quant_method`` under which transformers knows this."""


@register_quantization_config(METHOD)
class OnlineQuantConfig(QuantizationConfigMixin):
    """A recipe, with the fields that it has everywhere in requant.

    Args:
        global_quant_config: Format of every Linear and fused-MoE layer; None or ``""``: none.
        layer_quant_config: Pattern → format, the first match wins.
        exclude_layer: Pattern or patterns of layers that keep the checkpoint's precision.
        quant_method: As transformers writes it into a dictionary; always ``"requant"``.
        unknown: Anything else, which is refused.

    Attributes:
        source: How the checkpoint that is being loaded declares its own quantization; None: it does not.

    Raises:
        RecipeError: An unknown field or format, a wrong type, a bad pattern; before anything is read.
    """

    def __init__(
        self,
        global_quant_config: str | None = None,
        layer_quant_config: Mapping[str, str] | None = None,
        exclude_layer: str | Sequence[str] | None = None,
        quant_method: str = METHOD,
        **unknown: object,
    ) -> None:
        given = {
            "global_quant_config": global_quant_config,
            "layer_quant_config": layer_quant_config,
            "exclude_layer": exclude_layer,
        }
        recipe = Recipe.parse({**{field: value for field, value in given.items() if value is not None}, **unknown})
        self._set(recipe)

    @classmethod
    def from_recipe(cls, recipe: str | os.PathLike[str] | Mapping[str, Any]) -> "OnlineQuantConfig":
        """A recipe as ``--online_quant_config`` takes it: JSON text, the path of a JSON file, or the object itself.

        Raises:
            RecipeError: It cannot be read, or is none.
        """
        config = cls()
        config._set(Recipe.parse(recipe))
        return config

    def for_source(self, section: Mapping[str, Any]) -> "OnlineQuantConfig":
        """This recipe for a checkpoint that is quantized already.

        Args:
            section: The ``quantization_config`` of its ``config.json``.

        Raises:
            CheckpointError: It is quantized in a way that does not load.
        """
        config = copy.copy(self)
        config.source = source_quantization({"quantization_config": dict(section)})
        return config

    def to_dict(self) -> dict[str, Any]:
        """The recipe in its canonical spelling, and the method."""
        return {**self.recipe.to_dict(), "quant_method": METHOD}

    def _set(self, recipe: Recipe) -> None:
        self.quant_method = METHOD
        self.recipe = recipe
        self.source: SourceQuantization | None = None
