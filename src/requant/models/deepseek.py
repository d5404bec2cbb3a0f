"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and DeepSeek-V3 with R1 (https://arxiv.org/abs/2412.19437)."""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from transformers import PreTrainedConfig

from requant.errors import ModelError
from requant.layers.base import QuantizableLayer
from requant.layers.experts import Experts
from requant.layers.router import Router
from requant.layers.routing import Routing
from requant.models.decoder import DecoderCausalLM, DecoderLayer, MakeLayer
from requant.models.mla import LatentSelfAttention
from requant.models.mlp import Mlp, check_activation
from requant.models.moe import SparseMlp
from requant.parallel import ALONE, Ranks
from requant.recipe.layer import LayerNames

_MTP = "an MTP layer, which only speculative decoding uses"


class DeepseekV2ForCausalLM(DecoderCausalLM):
    """Latent attention; behind the first dense layers a softmax over experts, of the best groups or of all."""

    def __init__(self, config: PreTrainedConfig, ranks: Ranks = ALONE) -> None:
        method = config.topk_method
        _check("topk_method", method, "greedy", "group_limited_greedy")
        _check("scoring_func", getattr(config, "scoring_func", "softmax"), "softmax")
        if config.norm_topk_prob:
            raise ModelError(
                "norm_topk_prob is true; of DeepSeek-V2 accepted: false, as its public checkpoints have it"
            )
        grouped = method == "group_limited_greedy"
        routing = Routing(
            config.n_routed_experts,
            _given(config, "num_experts_per_tok"),
            scaling=config.routed_scaling_factor,
            groups=_given(config, "n_group") if grouped else 1,
            top_groups=_given(config, "topk_group") if grouped else 1,
        )
        super().__init__(
            config, _layers(config, routing, True, config.mlp_bias, ranks=ranks), config.qk_rope_head_dim, ranks
        )


class DeepseekV3ForCausalLM(DecoderCausalLM):
    """Latent attention; behind the first dense layers a sigmoid for each expert, with a bias on the choice.

    Checkpoints have ``num_nextn_predict_layers`` more layers behind the last one, for multi-token prediction.
    """

    def __init__(self, config: PreTrainedConfig, ranks: Ranks = ALONE) -> None:
        _check("topk_method", getattr(config, "topk_method", "noaux_tc"), "noaux_tc")
        _check("scoring_func", getattr(config, "scoring_func", "sigmoid"), "sigmoid")
        routing = Routing(
            config.n_routed_experts,
            _given(config, "num_experts_per_tok"),
            scoring="sigmoid",
            renormalize=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
            groups=_given(config, "n_group"),
            top_groups=_given(config, "topk_group"),
            group_score=2,
        )
        make_layer = _layers(config, routing, config.rope_interleave, False, correction_bias=True, ranks=ranks)
        super().__init__(config, make_layer, config.qk_rope_head_dim, ranks)
        self.not_loaded = tuple(_mtp_layers(config, make_layer))


def _layers(
    config: PreTrainedConfig,
    routing: Routing,
    interleaved: bool,
    mlp_bias: bool,
    correction_bias: bool = False,
    ranks: Ranks = ALONE,
) -> MakeLayer:
    check_activation(config.hidden_act)
    # DeepSeek's own code reads moe_layer_freq, transformers does not; the public checkpoints say 1.
    first_sparse, step = _given(config, "first_k_dense_replace"), getattr(config, "moe_layer_freq", 1)
    if not isinstance(step, int) or step < 1:
        raise ModelError(f"moe_layer_freq is {step!r}; accepted: a number from 1")

    def make_layer(name: str, index: int) -> DecoderLayer:
        attention = LatentSelfAttention(f"{name}.self_attn", config, interleaved, ranks)
        return DecoderLayer(name, config, attention, make_mlp(f"{name}.mlp", index))

    def make_mlp(name: str, index: int) -> nn.Module:
        hidden, inner, act = config.hidden_size, config.moe_intermediate_size, config.hidden_act
        if index < first_sparse or index % step:
            return Mlp(name, hidden, config.intermediate_size, act, mlp_bias, ranks)
        shared = config.n_shared_experts
        return SparseMlp(
            Router(f"{name}.gate", hidden, routing.num_experts, float32=True, correction_bias=correction_bias),
            routing,
            Experts(f"{name}.experts", routing.num_experts, hidden, inner, act, ranks=ranks),
            Mlp(f"{name}.shared_experts", hidden, inner * shared, act, mlp_bias, ranks, reduce=False)
            if shared
            else None,
            ranks,
        )

    return make_layer


def _mtp_layers(config: PreTrainedConfig, make_layer: MakeLayer) -> Iterator[LayerNames]:
    """What a recipe sees of the layers behind the last one: a decoder layer each, a projection into it and a head."""
    first = config.num_hidden_layers
    for index in range(first, first + (getattr(config, "num_nextn_predict_layers", 0) or 0)):
        name = f"model.layers.{index}"
        projection, head = f"{name}.eh_proj", f"{name}.shared_head.head"
        yield LayerNames(projection, (projection,), protected="MTP eh_proj", not_loaded=_MTP)
        for module in make_layer(name, index).modules():
            if isinstance(module, QuantizableLayer):
                yield replace(module.names, not_loaded=_MTP)
        yield LayerNames(head, (head,), protected="MTP shared_head.head", not_loaded=_MTP)


def _check(field: str, value: object, *accepted: str) -> None:
    if value not in accepted:
        raise ModelError(f"{field} is {value!r}; accepted: {', '.join(accepted)}")


def _given(config: PreTrainedConfig, field: str) -> int:
    value = getattr(config, field)
    if value is None:
        raise ModelError(f"{field} is not given in config.json; accepted: a number")
    return value
