"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and DeepSeek-V3 with R1 (https://arxiv.org/abs/2412.19437)."""

from torch import Tensor, nn
from transformers import PreTrainedConfig

from requant.errors import ModelError
from requant.kernels.attention_batch import AttentionBatch
from requant.layers.experts import Experts
from requant.layers.router import Router
from requant.layers.routing import Routing
from requant.models.decoder import DecoderCausalLM, DecoderLayer, MakeLayer
from requant.models.mla import LatentSelfAttention
from requant.models.mlp import Mlp, check_activation
from requant.models.moe import SparseMlp
from requant.models.mtp import MtpLayer, names_not_loaded
from requant.parallel import ALONE, Ranks

_MTP = "an MTP layer, which only speculative decoding uses"
_MTP_NOT_FIRST = "an MTP layer behind the first, which drafts all tokens"


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

    Args:
        config: The transformers configuration.
        ranks: See :class:`CausalLM`.
        mtp: Have the first of those layers, to draft tokens with.

    Raises:
        ModelError: The configuration asks for something that requant does not run, or there is no such layer.
    """

    def __init__(self, config: PreTrainedConfig, ranks: Ranks = ALONE, *, mtp: bool = False) -> None:
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
        first = config.num_hidden_layers
        names = [f"model.layers.{first + i}" for i in range(getattr(config, "num_nextn_predict_layers", 0) or 0)]
        if mtp:
            if not names:
                raise ModelError("the model has no MTP layer: num_nextn_predict_layers in its config.json is 0")
            self.draft_layer, self.copies = names[0], (f"{names[0]}.embed_tokens.weight",)
            self.model.layers.append(MtpLayer(names[0], config, make_layer(names[0], first), self.lm_head, ranks))
        self.not_loaded = tuple(
            layer
            for index, name in enumerate(names)
            if index or not mtp
            for layer in names_not_loaded(name, make_layer(name, first + index), _MTP_NOT_FIRST if mtp else _MTP)
        )

    def draft(self, following: Tensor, hidden: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See :meth:`CausalLM.draft`."""
        rope = self.model.rotary_emb(positions, hidden.dtype)
        return self._mtp_layer.draft(self.model.embed_tokens(following), hidden, rope, batch)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`CausalLM.draft_logits`."""
        return self._mtp_layer.shared_head.head(hidden).float()

    @property
    def _mtp_layer(self) -> MtpLayer:
        layer = self.model.layers[-1]
        assert isinstance(layer, MtpLayer)
        return layer


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


def _check(field: str, value: object, *accepted: str) -> None:
    if value not in accepted:
        raise ModelError(f"{field} is {value!r}; accepted: {', '.join(accepted)}")


def _given(config: PreTrainedConfig, field: str) -> int:
    value = getattr(config, field)
    if value is None:
        raise ModelError(f"{field} is not given in config.json; accepted: a number")
    return value
