"""Llama and what is built like it (SmolLM, SmolLM2, Yi, …), and Mistral, which adds a sliding window."""

from transformers import PreTrainedConfig

from requant.models.decoder import DecoderOptions, DenseCausalLM
from requant.parallel import ALONE, Ranks


class LlamaForCausalLM(DenseCausalLM):
    """Llama (https://arxiv.org/abs/2302.13971); biases where ``attention_bias`` and ``mlp_bias`` ask for them."""

    def __init__(self, config: PreTrainedConfig, ranks: Ranks = ALONE) -> None:
        bias = config.attention_bias
        super().__init__(config, DecoderOptions(qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias), ranks)


class MistralForCausalLM(DenseCausalLM):
    """Mistral (https://arxiv.org/abs/2310.06825): every layer sees a ``sliding_window``, if one is given."""

    def __init__(self, config: PreTrainedConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(config, DecoderOptions(attention="sliding_attention"), ranks)
