"""The dense decoder that Llama, Mistral and Qwen share; a family says what differs, as data.

Legend: T tokens of a step, H hidden size, Hq and Hk query and key/value heads, D head size.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from requant.errors import ModelError
from requant.layers.attention import Attention
from requant.layers.attention_batch import AttentionBatch
from requant.layers.embedding import Embedding, OutputHead
from requant.layers.linear import merged_linear, plain_linear, qkv_linear
from requant.layers.norm import RMSNorm
from requant.layers.rotary import RotaryEmbedding, rotate
from requant.models.base import CausalLM


@dataclass(frozen=True)
class DecoderOptions:
    """What one family of dense decoders does differently from another.

    Attributes:
        qkv_bias: The query, key and value projections have a bias.
        output_bias: The attention's output projection has one.
        mlp_bias: The three projections of the MLP have one.
        qk_norm: Queries and keys are normalized head by head, before the rotation.
        attention: Kind of all layers where the configuration has no ``layer_types``: ``"full_attention"`` or
            ``"sliding_attention"``, which means full attention if the configuration gives no ``sliding_window``.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention: str = "full_attention"


class SelfAttention(nn.Module):
    """Projections, rotation and attention of one layer."""

    def __init__(self, config: PreTrainedConfig, options: DecoderOptions, name: str, window: int | None) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, head_size(config)
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        self.qkv_proj = qkv_linear(
            f"{name}.qkv_proj", hidden, self.num_heads, self.num_kv_heads, self.head_dim, options.qkv_bias
        )
        self.o_proj = plain_linear(f"{name}.o_proj", self.num_heads * self.head_dim, hidden, options.output_bias)
        self.q_norm = self.k_norm = None
        if options.qk_norm:
            self.q_norm = RMSNorm(f"{name}.q_norm", self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(f"{name}.k_norm", self.head_dim, config.rms_norm_eps)
        self.attn = Attention(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5, window)

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        """Hidden states [T, H] → [T, H]; ``rope`` is (cos, sin) of the positions."""
        qkv = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(self.attn(rotate(q, *rope), rotate(k, *rope), v, batch))


class Mlp(nn.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, config: PreTrainedConfig, options: DecoderOptions, name: str) -> None:
        super().__init__()
        if config.hidden_act not in ACT2FN:
            raise ModelError(f"hidden_act {config.hidden_act!r} is not known; accepted: {', '.join(sorted(ACT2FN))}")
        hidden, inner = config.hidden_size, config.intermediate_size
        rows = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = merged_linear(f"{name}.gate_up_proj", hidden, rows, options.mlp_bias)
        self.down_proj = plain_linear(f"{name}.down_proj", inner, hidden, options.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: PreTrainedConfig, options: DecoderOptions, name: str, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, options, f"{name}.self_attn", window)
        self.post_attention_layernorm = RMSNorm(
            f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps
        )
        self.mlp = Mlp(config, options, f"{name}.mlp")

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rope: tuple[Tensor, Tensor], batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """(output of the last layer, what it is to be added to) → the same of this layer, each [T, H].

        The addition is left to the next norm, which does both at once; the first layer has no ``residual``.
        """
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, rope, batch)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class DecoderModel(nn.Module):
    """Embedding, layers and final norm: everything but the head."""

    def __init__(self, config: PreTrainedConfig, options: DecoderOptions, name: str) -> None:
        super().__init__()
        self.embed_tokens = Embedding(f"{name}.embed_tokens", config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config, head_size(config))
        windows = sliding_windows(config, options.attention)
        self.layers = nn.ModuleList(
            DecoderLayer(config, options, f"{name}.layers.{i}", window) for i, window in enumerate(windows)
        )
        self.norm = RMSNorm(f"{name}.norm", config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See :meth:`CausalLM.forward`."""
        hidden, residual = self.embed_tokens(input_ids), None
        rope = self.rotary_emb(positions, hidden.dtype)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rope, batch)
        return self.norm(hidden, residual)[0]


class DenseCausalLM(CausalLM):
    """A dense decoder with an output head, which may be tied to the embedding.

    Args:
        config: The transformers configuration.
        options: What is particular to the family.

    Raises:
        ModelError: The configuration asks for something that requant does not run.
    """

    def __init__(self, config: PreTrainedConfig, options: DecoderOptions) -> None:
        super().__init__(config)
        self.model = DecoderModel(config, options, "model")
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = OutputHead("lm_head", config.vocab_size, config.hidden_size, tied_to)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See :meth:`CausalLM.forward`."""
        return self.model(input_ids, positions, batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`CausalLM.compute_logits`."""
        return self.lm_head(hidden).float()


def head_size(config: PreTrainedConfig) -> int:
    """D: the configuration's ``head_dim``, else an even share of the hidden size."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def sliding_windows(config: PreTrainedConfig, default: str) -> list[int | None]:
    """For each layer the sliding window that its queries see, None for full attention.

    Args:
        config: ``layer_types`` decides if the configuration has it, and ``sliding_window`` is the size.
        default: Kind of all layers otherwise.

    Raises:
        ModelError: A layer is of another kind than full or sliding attention, or slides without a window.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window if default == "sliding_attention" else None] * config.num_hidden_layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"layer_types has {', '.join(unknown)}; accepted: full_attention, sliding_attention")
    if len(kinds) != config.num_hidden_layers:
        raise ModelError(f"layer_types has {len(kinds)} entries for num_hidden_layers {config.num_hidden_layers}")
    if "sliding_attention" in kinds and not window:
        raise ModelError("layer_types has sliding_attention, but sliding_window is not given")
    return [window if kind == "sliding_attention" else None for kind in kinds]
