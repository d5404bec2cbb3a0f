"""A recipe for a checkpoint that is quantized already.

transformers takes the checkpoint's own ``quantization_config`` before one that is passed, and refuses a pair of
different classes; its registries have no say in that. So the one function that compares them is wrapped: pairs with an
:class:`OnlineQuantConfig` are answered here, all others as before.
"""

from functools import wraps
from typing import Any

from transformers.quantizers.auto import AutoHfQuantizer

from requant.integrations.transformers.config import OnlineQuantConfig


def accept_quantized_sources() -> None:
    """Let ``from_pretrained`` take an :class:`OnlineQuantConfig` for checkpoints that have a config of their own."""
    original = AutoHfQuantizer.merge_quantization_configs

    @wraps(original)
    def merge(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        if not isinstance(quantization_config_from_args, OnlineQuantConfig):
            return original(quantization_config, quantization_config_from_args)
        own = quantization_config
        return quantization_config_from_args.for_source(own if isinstance(own, dict) else own.to_dict())

    AutoHfQuantizer.merge_quantization_configs = staticmethod(merge)
