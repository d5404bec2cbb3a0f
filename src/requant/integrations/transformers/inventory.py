"""What a recipe can see of a transformers model: its layers, with the names of checkpoint, module and fused layer."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from requant.integrations.transformers.routes import Routes
from requant.integrations.transformers.sources import Source
from requant.recipe import LayerNames

FUSED = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj",
    ("q_a_proj", "kv_proj"): "fused_wqa_wkv",
}
"""Linears that are one layer in the engines, and so in a recipe: its name there (vLLM's)."""

_ABSENT = "the checkpoint does not have it"
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.")
_MTP_PROTECTED = {"eh_proj": "MTP eh_proj", "shared_head.head": "MTP shared_head.head"}


@dataclass(frozen=True)
class Layer:
    """One layer of a recipe.

    Attributes:
        names: Its names.
        modules: The transformers modules that it is: several Linears, one Linear or one module of experts.
    """

    names: LayerNames
    modules: tuple[str, ...] = ()


def weights_of(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a Linear or of experts that a format could store, by their names in the module."""
    if isinstance(module, nn.Linear):
        return ("weight",)
    return tuple(name for name, value in module._parameters.items() if value is not None and value.ndim == 3)


def find_layers(model: PreTrainedModel, routes: Routes, tied_head: str | None = None) -> list[Layer]:
    """All layers that a recipe could reach, loaded or not.

    Args:
        model: The model, on no device.
        routes: What feeds its parameters.
        tied_head: The parameter that an output head without weights of its own shares; None: it has its own.
    """
    survey = _Survey(model, routes, tied_head)
    layers = list(survey.layers())
    known = {layer.names.module for layer in layers}
    return layers + [layer for layer in _unused(routes.unused) if layer.names.module not in known]


class _Survey:
    def __init__(self, model: PreTrainedModel, routes: Routes, tied_head: str | None) -> None:
        self._modules = dict(model.named_modules())
        self._routes = routes
        self._tied_head = tied_head
        head = model.get_output_embeddings()
        self._head = next((name for name, module in self._modules.items() if head is not None and module is head), None)
        self._experts = {name: module for name, module in self._modules.items() if is_experts(module)}
        self._routers = dict(_routers(self._modules, self._experts))
        self._kept = _kept_in_float32(model)

    def layers(self) -> Iterator[Layer]:
        fused = self._fused()
        inside = tuple(f"{name}." for name in self._experts)
        for name, module in self._modules.items():
            if name in fused:
                group = fused[name]
                if group:
                    yield self._layer(f"{name.rpartition('.')[0]}.{group[1]}".lstrip("."), group[0])
            elif name in self._experts or (isinstance(module, nn.Linear) and not name.startswith(inside)):
                yield self._layer(name, (name,))
            elif name in self._routers:
                yield self._layer(name, (name,), f"{type(module).__name__} is no Linear")

    def _fused(self) -> dict[str, tuple[tuple[str, ...], str] | None]:
        """Linears of one fused layer: the first → all and the layer's name, the others → None."""
        out: dict[str, tuple[tuple[str, ...], str] | None] = {}
        for parent in self._modules:
            for children, fused in FUSED.items():
                names = tuple(f"{parent}.{child}".lstrip(".") for child in children)
                if not all(self._is_plain(name) for name in names) or any(name in out for name in names):
                    continue
                out.update(dict.fromkeys(names[1:]))
                out[names[0]] = names, fused
        return out

    def _is_plain(self, name: str) -> bool:
        module = self._modules.get(name)
        return isinstance(module, nn.Linear) and self._fixed(name, module) is None and name not in self._routers

    def _layer(self, name: str, modules: tuple[str, ...], fixed: str | None = None) -> Layer:
        parts: list[str] = []
        own: list[str] = []
        absent = False
        for module_name in modules:
            module = self._modules[module_name]
            for weight in weights_of(module) or ("weight",):
                feeds = self._routes.feeds.get(f"{module_name}.{weight}", [])
                alias = module_name if weight == "weight" else f"{module_name}.{weight}"
                parts += [feed.source.owner for feed in feeds] or [alias]
                own += [alias] * max(len(feeds), 1)
                absent = absent or not (feeds or (module_name == self._head and self._tied_head in self._routes.feeds))
            fixed = fixed or self._fixed(module_name, module)
        protected = "lm_head" if name == self._head else self._routers.get(name)
        return Layer(
            LayerNames(name, tuple(parts), protected, fixed, _ABSENT if absent else None, _aliases(name, parts, own)),
            modules,
        )

    def _fixed(self, name: str, module: nn.Module) -> str | None:
        if self._kept.search(name):
            return "transformers keeps it unquantized in this architecture"
        kind = type(module)
        if isinstance(module, nn.Linear) and kind.forward is not nn.Linear.forward:
            return f"{kind.__name__} is not a plain product"
        exchangeable = hasattr(module, "is_transposed") and not getattr(module, "has_post_expert_norm", False)
        if name in self._experts and not exchangeable:
            return f"{kind.__name__} has no exchangeable experts in transformers"
        return None


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the stacked matrices of experts."""
    return not isinstance(module, nn.Linear) and {"down_proj"} < {*weights_of(module)}


def _routers(modules: dict[str, nn.Module], experts: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Modules beside experts that have a row of weights for each; a projection could by chance."""
    for name, module in experts.items():
        count = len(getattr(module, weights_of(module)[0]))
        parent = name.rpartition(".")[0]
        for other, candidate in modules.items():
            if not other.startswith(f"{parent}.") or other.startswith(name) or other.endswith("_proj"):
                continue
            weight = getattr(candidate, "weight", None)
            if weight is not None and weight.ndim == 2 and weight.shape[0] == count:
                yield other, "MoE router"


def _kept_in_float32(model: PreTrainedModel) -> re.Pattern[str]:
    """Of names that transformers does not quantize either, whatever the method."""
    names = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    return re.compile("|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in sorted(names)) or r"(?!)")


def _aliases(name: str, parts: Sequence[str], own: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return () if all(alias in (name, part) for part, alias in zip(parts, own, strict=True)) else (tuple(own),)


def _unused(sources: Sequence[Source]) -> Iterator[Layer]:
    """What else the checkpoint has: the layers of multi-token prediction, which transformers does not run."""
    grouped: dict[str, list[str]] = {}
    for source in sources:
        owner = source.owner
        if len(source.shape) != 2 or owner == source.name or "embed" in owner or "norm" in owner:
            continue
        expert = _EXPERT.match(owner)
        grouped.setdefault(expert.group(1) if expert else owner, []).append(owner)
    for name, parts in grouped.items():
        protected = next((kind for last, kind in _MTP_PROTECTED.items() if name.endswith(f".{last}")), None)
        yield Layer(LayerNames(name, tuple(parts), protected, not_loaded="transformers' model does not have it"))
