"""Why a layer gets its target: the rules in the order in which they were tried."""

from collections.abc import Mapping, Sequence

from requant.errors import RecipeError
from requant.recipe.layer import LayerNames
from requant.recipe.nearest import nearest_names
from requant.recipe.patterns import strip_weight
from requant.recipe.resolve import decide
from requant.recipe.rules import Rule, rules_of
from requant.recipe.schema import Recipe


def explain(recipe: Recipe, layers: Sequence[LayerNames], name: str, kept: Mapping[str, str] | None = None) -> str:
    """Tell which rules were tried on a layer, in what order, and which decided.

    Args:
        recipe: The recipe.
        layers: The model's layers, as :func:`requant.recipe.resolve` takes them.
        name: A module's name or the checkpoint name of one of its parts, with or without ``.weight``.
        kept: Why layers keep what the checkpoint has, by module name: beside the recipe's own reasons, what is
            quantized already may be passed through whatever its target.

    Returns:
        Several lines: the layer, one line per rule tried, the outcome for the layer.

    Raises:
        RecipeError: No layer has that name.
    """
    wanted = strip_weight(name)
    layer = next((layer for layer in layers if wanted == layer.module), None)
    layer = layer or next((layer for layer in layers if wanted in layer.parts), None)
    if layer is None:
        raise RecipeError(f"no layer is named {name!r}; nearest names: {', '.join(nearest_names(wanted, layers))}")
    asked = range(len(layer.parts)) if wanted == layer.module else [layer.parts.index(wanted)]
    rules = rules_of(recipe)
    title = layer.module if wanted == layer.module else f"{wanted} (a part of {layer.module})"
    steps = [] if layer.fixed or layer.not_loaded else _steps(layer, rules, asked)
    return "\n".join([title, *(f"  {step}" for step in steps), f"  => {_outcome(layer, rules, kept or {})}"])


def _steps(layer: LayerNames, rules: Sequence[Rule], asked: Sequence[int]) -> list[str]:
    steps = []
    open_parts = list(asked)
    for rule in rules:
        hits = rule.hits(layer)
        matched = [i for i in open_parts if hits[i]]
        target = f" -> {rule.format}" if rule.format else ""
        head = f"{rule.label}{target}: "
        if not matched:
            steps.append(head + "does not match")
            continue
        name = rule.pattern.matched_name(layer.module, layer.parts[matched[0]]) if rule.pattern else None
        how = f"matches {name}" if name else "applies"
        if len(matched) < len(open_parts):
            how += f" ({len(matched)} of {len(open_parts)} parts)"
        if not rule.reaches(layer):
            steps.append(f"{head}{how}, but does not reach a protected layer ({layer.protected})")
            continue
        steps.append(f"{head}{how}, and decides")
        open_parts = [i for i in open_parts if not hits[i]]
        if not open_parts:
            break
    return steps


def _outcome(layer: LayerNames, rules: Sequence[Rule], kept: Mapping[str, str]) -> str:
    try:
        decision = decide(layer, rules, [rule.hits(layer) for rule in rules])
    except RecipeError as error:
        return f"error: {error}"
    reason = kept.get(layer.module, decision.reason)
    return f"kept: {reason}" if reason else decision.format or ""
