"""Quantizing while ``from_pretrained`` loads: the recipe as a ``quantization_config`` of transformers.

Importing this package registers the configuration and the quantizer with transformers under ``"requant"``::

    from requant.integrations.transformers import OnlineQuantConfig

    model = AutoModelForCausalLM.from_pretrained(
        "Qwen/Qwen3-8B", quantization_config=OnlineQuantConfig(global_quant_config="ptpc_fp8")
    )
"""

from requant.integrations.transformers.config import OnlineQuantConfig
from requant.integrations.transformers.experts import QuantizedExperts
from requant.integrations.transformers.linear import QuantizedLinear
from requant.integrations.transformers.merge import accept_quantized_sources
from requant.integrations.transformers.quantizer import OnlineQuantizer

__all__ = ["OnlineQuantConfig", "OnlineQuantizer", "QuantizedExperts", "QuantizedLinear"]

accept_quantized_sources()
