"""A recipe applied to the layers of a model: one target, and what decided it, for each."""

from collections.abc import Sequence

from requant.errors import RecipeError
from requant.recipe.layer import Decision, LayerNames, Resolution
from requant.recipe.nearest import nearest_names
from requant.recipe.rules import Rule, own_spelling, rules_of
from requant.recipe.schema import Recipe

_UNREACHABLE = "norms, embeddings, biases and convolutions are never quantized"


def resolve(recipe: Recipe, layers: Sequence[LayerNames]) -> Resolution:
    """Decide every layer.

    For each part: excluded → kept; else the first override that matches; else the global target; else kept.
    An override that matches a protected layer without the right to reach it is passed over there. Layers that
    are fixed or not loaded are matched like any other, and kept.

    Args:
        recipe: What the user wrote.
        layers: All layers that a recipe could reach, of the main model and its MTP layers, loaded or not;
            ``lm_head`` also where its weight is tied to the embedding.

    Raises:
        RecipeError: An override matches no layer, or protected ones that it can't reach and no other; the parts
            of a fused layer get different targets.
    """
    rules = rules_of(recipe)
    hits = [[rule.hits(layer) for layer in layers] for rule in rules]
    unmatched: list[str] = []
    warnings: list[str] = []
    for rule, by_layer in zip(rules, hits, strict=True):
        matched = [layer for layer, parts in zip(layers, by_layer, strict=True) if any(parts)]
        if rule.is_override:
            warnings += _check_override(rule, matched, layers)
        elif rule.pattern is not None and not matched:
            unmatched.append(rule.name)
            warnings.append(_matches_nothing(rule, layers))
    decisions = {
        layer.module: decide(layer, rules, [by_layer[i] for by_layer in hits]) for i, layer in enumerate(layers)
    }
    warnings += _protected_warnings(rules, layers, decisions)
    return Resolution(decisions, tuple(unmatched), tuple(warnings))


def decide(layer: LayerNames, rules: Sequence[Rule], hits: Sequence[Sequence[bool]]) -> Decision:
    """Decide one layer.

    Args:
        layer: The layer.
        rules: The recipe's rules in their order.
        hits: For each rule, which of the layer's parts it matches.

    Raises:
        RecipeError: The parts get different targets.
    """
    if layer.not_loaded is not None:
        return Decision(layer.module, None, "", f"not loaded: {layer.not_loaded}")
    if layer.fixed is not None:
        return Decision(layer.module, None, "", f"cannot be quantized: {layer.fixed}")
    deciding: list[Rule | None] = [None] * len(layer.parts)
    for rule, parts in zip(rules, hits, strict=True):
        if rule.reaches(layer):
            deciding = [known or (rule if hit else None) for known, hit in zip(deciding, parts, strict=True)]
    targets = [rule.format if rule else None for rule in deciding]
    if len(set(targets)) > 1:
        other = next(i for i, target in enumerate(targets) if target != targets[0])
        raise RecipeError(
            f"{layer.module} is one fused layer, but its parts get different targets: "
            f"{_outcome(layer, 0, deciding[0])}; {_outcome(layer, other, deciding[other])}; "
            f"name the whole layer, e.g. {own_spelling(layer.module)!r}, instead of its parts"
        )
    # Some parts may be excluded and the others met by no rule: the exclude is what the user wants to read.
    decider = next((rule for rule in deciding if rule), None)
    if decider is None:
        return Decision(
            layer.module, None, "", f"protected: {layer.protected}" if layer.protected else "no rule matches"
        )
    reason = f"excluded by {decider.name!r}" if decider.format is None else ""
    return Decision(layer.module, decider.format, decider.name, reason)


def _outcome(layer: LayerNames, index: int, rule: Rule | None) -> str:
    part = layer.parts[index].removeprefix(layer.module.rpartition(".")[0] + ".")
    if rule is None:
        return f"{part} is kept, no rule matches it"
    return f"{part} is kept by {rule.label}" if rule.format is None else f"{part} {rule.format} by {rule.label}"


def _check_override(rule: Rule, matched: Sequence[LayerNames], layers: Sequence[LayerNames]) -> list[str]:
    """Refuse an override that can never do anything; warn about one that meets fixed or unloaded layers only."""
    if not matched:
        raise RecipeError(_matches_nothing(rule, layers))
    reached = [layer for layer in matched if rule.reaches(layer)]
    if any(layer.fixed is None and layer.not_loaded is None for layer in reached):
        return []
    if reached:
        first = reached[0]
        state = "cannot be quantized" if first.fixed is not None else "are not loaded"
        why = f"{first.module}: {first.fixed or first.not_loaded}"
        return [f"{rule.label} has no effect: it matches only layers that {state} ({why})"]
    spellings = dict.fromkeys(repr(own_spelling(layer.module)) for layer in matched)
    kinds = dict.fromkeys(layer.protected or "" for layer in matched)
    raise RecipeError(
        f"{rule.label} matches only protected layers ({', '.join(kinds)}), which an override reaches only by their "
        f"own name; accepted: {' or '.join(spellings)}"
    )


def _matches_nothing(rule: Rule, layers: Sequence[LayerNames]) -> str:
    nearest = ", ".join(nearest_names(rule.name, layers))
    return f"{rule.label} matches no layer that a recipe can reach ({_UNREACHABLE}); nearest names: {nearest}"


def _protected_warnings(
    rules: Sequence[Rule], layers: Sequence[LayerNames], decisions: dict[str, Decision]
) -> list[str]:
    """One line for each override that quantizes protected layers, however many they are."""
    warnings = []
    for rule in rules:
        reached = [
            layer
            for layer in layers
            if layer.protected is not None
            and decisions[layer.module].format is not None
            and decisions[layer.module].pattern == rule.name
        ]
        if reached:
            kinds = ", ".join(dict.fromkeys(layer.protected or "" for layer in reached))
            count = f"{len(reached)} protected layer{'s' if len(reached) > 1 else ''} ({kinds})"
            example = f", {reached[0].module} first" if len(reached) > 1 else f": {reached[0].module}"
            warnings.append(f"{rule.label} quantizes {count} to {rule.format}{example}; this can cost accuracy")
    return warnings
