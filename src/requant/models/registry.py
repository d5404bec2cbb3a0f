"""Which class runs which architecture; a family's module is imported when it is first asked for."""

from collections.abc import Sequence
from importlib import import_module

from requant.errors import ModelError
from requant.models.base import CausalLM

# The architecture's name in config.json → "module:class".
_MODELS: dict[str, str] = {
    "LlamaForCausalLM": "requant.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "requant.models.llama:MistralForCausalLM",
    "Qwen2ForCausalLM": "requant.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "requant.models.qwen3:Qwen3ForCausalLM",
}


def model_class(architectures: Sequence[str] | None) -> type[CausalLM]:
    """The class for the first known name of a configuration's ``architectures``.

    Raises:
        ModelError: None of them is known; the message lists those that are.
    """
    for name in architectures or ():
        if name in _MODELS:
            module, cls = _MODELS[name].split(":")
            return getattr(import_module(module), cls)
    given = ", ".join(architectures or ()) or "none given"
    raise ModelError(f"unknown architecture ({given}); known: {', '.join(sorted(_MODELS))}")
