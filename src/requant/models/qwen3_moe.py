"""Qwen3-MoE (https://arxiv.org/abs/2505.09388): Qwen3's attention, and experts in place of some or all MLPs."""

from torch import nn
from transformers import PreTrainedConfig

from requant.errors import ModelError
from requant.layers.experts import Experts
from requant.layers.router import Router
from requant.layers.routing import Routing
from requant.models.attention import SelfAttention, head_size, sliding_windows
from requant.models.decoder import DecoderCausalLM, DecoderLayer
from requant.models.mlp import Mlp, check_activation
from requant.models.moe import SparseMlp
from requant.parallel import ALONE, Ranks


class Qwen3MoeForCausalLM(DecoderCausalLM):
    """Every ``decoder_sparse_step``-th layer has experts, but for those that ``mlp_only_layers`` names."""

    def __init__(self, config: PreTrainedConfig, ranks: Ranks = ALONE) -> None:
        windows = sliding_windows(config, "sliding_attention")
        check_activation(config.hidden_act)
        if config.decoder_sparse_step < 1:
            raise ModelError(f"decoder_sparse_step is {config.decoder_sparse_step}; accepted: 1 or more")

        def make_layer(name: str, index: int) -> DecoderLayer:
            bias = config.attention_bias
            attention = SelfAttention(
                f"{name}.self_attn",
                config,
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=True,
                window=windows[index],
                ranks=ranks,
            )
            return DecoderLayer(name, config, attention, _mlp(f"{name}.mlp", config, index, ranks))

        super().__init__(config, make_layer, head_size(config), ranks)


def _mlp(name: str, config: PreTrainedConfig, index: int, ranks: Ranks) -> nn.Module:
    hidden, experts = config.hidden_size, config.num_experts
    if index in config.mlp_only_layers or not experts or (index + 1) % config.decoder_sparse_step:
        return Mlp(name, hidden, config.intermediate_size, config.hidden_act, ranks=ranks)
    return SparseMlp(
        Router(f"{name}.gate", hidden, experts),
        Routing(experts, config.num_experts_per_tok, renormalize=config.norm_topk_prob),
        Experts(f"{name}.experts", experts, hidden, config.moe_intermediate_size, config.hidden_act, ranks=ranks),
        ranks=ranks,
    )
