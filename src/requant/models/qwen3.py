"""Qwen3, dense (https://arxiv.org/abs/2505.09388)."""

from transformers import PreTrainedConfig

from requant.models.decoder import DecoderOptions, DenseCausalLM
from requant.parallel import ALONE, Ranks


class Qwen3ForCausalLM(DenseCausalLM):
    """Queries and keys are normalized; no biases unless ``attention_bias`` asks; sliding layers as in Qwen2."""

    def __init__(self, config: PreTrainedConfig, ranks: Ranks = ALONE) -> None:
        bias = config.attention_bias
        super().__init__(config, DecoderOptions(qkv_bias=bias, output_bias=bias, qk_norm=True), ranks)
