"""The rules of a recipe, in the order in which they are tried."""

from dataclasses import dataclass
from itertools import chain

from requant.recipe.layer import LayerNames
from requant.recipe.patterns import Pattern, last_component
from requant.recipe.schema import EXCLUDE_FIELD, GLOBAL_FIELD, OVERRIDES_FIELD, Recipe


@dataclass(frozen=True)
class Rule:
    """One rule: the parts it matches get its target.

    Attributes:
        field: The recipe's field that it stands in.
        pattern: What it matches; None: every layer (the global target).
        format: The target; None: the source's precision.
    """

    field: str
    pattern: Pattern | None
    format: str | None

    @property
    def name(self) -> str:
        """The pattern as the user wrote it; the field's name for the global target."""
        return self.pattern.text if self.pattern else self.field

    @property
    def label(self) -> str:
        """Field and pattern, as messages name the rule."""
        return f"{self.field} {self.pattern.text!r}" if self.pattern else self.field

    @property
    def is_override(self) -> bool:
        """Whether the rule is one of ``layer_quant_config``."""
        return self.field == OVERRIDES_FIELD

    def hits(self, layer: LayerNames) -> list[bool]:
        """Which parts of ``layer`` the rule matches, by any of their names."""
        if self.pattern is None:
            return [True] * len(layer.parts)
        hits = self.pattern.hits(layer.module, layer.parts)
        for names in layer.aliases:
            hits = [a or b for a, b in zip(hits, self.pattern.hits(layer.module, names), strict=True)]
        return hits

    def reaches(self, layer: LayerNames) -> bool:
        """Whether the rule has a say on ``layer`` where it matches.

        An exclude always has. A target reaches a protected layer only from an override whose last component
        is literally the layer's own name.
        """
        if layer.protected is None or self.format is None:
            return True
        own = {last_component(name) for name in (layer.module, *layer.parts, *chain(*layer.aliases))}
        return self.pattern is not None and self.pattern.last_component in own


def rules_of(recipe: Recipe) -> list[Rule]:
    """Excludes, then overrides, then the global target: the first that matches and reaches a part decides."""
    rules = [Rule(EXCLUDE_FIELD, Pattern(text), None) for text in recipe.exclude]
    rules += [Rule(OVERRIDES_FIELD, Pattern(text), target) for text, target in recipe.overrides]
    if recipe.global_format is not None:
        rules.append(Rule(GLOBAL_FIELD, None, recipe.global_format))
    return rules


def own_spelling(module: str) -> str:
    """The pattern that names ``module`` in every layer of a model.

    ``*.mlp.gate`` for ``model.layers.0.mlp.gate``, ``*.eh_proj`` for ``model.layers.61.eh_proj``, ``lm_head``.
    """
    *rest, last = module.split(".")
    if not rest:
        return last
    return f"*.{last}" if rest[-1].isdigit() else f"*.{rest[-1]}.{last}"
