"""Qwen2 and Qwen2.5, dense (https://arxiv.org/abs/2407.10671)."""

from transformers import PreTrainedConfig

from requant.models.decoder import DecoderOptions, DenseCausalLM
from requant.parallel import ALONE, Ranks


class Qwen2ForCausalLM(DenseCausalLM):
    """Biases on query, key and value; layers behind ``max_window_layers`` may slide (``use_sliding_window``).

    Which layers slide is read from ``layer_types``, which transformers derives from those two.
    """

    def __init__(self, config: PreTrainedConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(config, DecoderOptions(qkv_bias=True), ranks)
