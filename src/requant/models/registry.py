"""Which class runs which architecture; a family's module is imported when it is first asked for."""

from importlib import import_module

from requant.errors import ModelError
from requant.models.base import CausalLM

# The architecture's name in config.json → "module:class".
_MODELS: dict[str, str] = {
    "DeepseekV2ForCausalLM": "requant.models.deepseek:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "requant.models.deepseek:DeepseekV3ForCausalLM",
    "LlamaForCausalLM": "requant.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "requant.models.llama:MistralForCausalLM",
    "Qwen2ForCausalLM": "requant.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "requant.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "requant.models.qwen3_moe:Qwen3MoeForCausalLM",
}


def model_class(architectures: object) -> type[CausalLM]:
    """The class for the first known name of a configuration's ``architectures``: a list of names, if all is well.

    Raises:
        ModelError: None of them is known; the message lists those that are.
    """
    names = architectures if isinstance(architectures, list | tuple) else [architectures] if architectures else []
    for name in map(str, names):
        if name in _MODELS:
            module, cls = _MODELS[name].split(":")
            return getattr(import_module(module), cls)
    given = ", ".join(map(str, names)) or "none given"
    raise ModelError(f"unknown architecture ({given}); known: {', '.join(sorted(_MODELS))}")
