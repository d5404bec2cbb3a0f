"""The decoder that every family here is: attention and MLP behind norms and beside residuals, over and over.

A family says what stands in a layer; the dense ones of Llama and Qwen say it as :class:`DecoderOptions`.

Legend: T tokens of a step, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedConfig

from requant.kernels.attention_batch import AttentionBatch
from requant.layers.embedding import Embedding, OutputHead
from requant.layers.norm import RMSNorm
from requant.layers.rotary import RotaryEmbedding
from requant.models.attention import SelfAttention, head_size, sliding_windows
from requant.models.base import CausalLM
from requant.models.mlp import Mlp
from requant.parallel import ALONE, Ranks


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual.

    Args:
        name: The module's name (``model.layers.0``).
        config: The transformers configuration.
        self_attn: (hidden [T, H], (cos, sin), batch) → [T, H].
        mlp: [T, H] → [T, H].
    """

    def __init__(self, name: str, config: PreTrainedConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(
            f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps
        )
        self.mlp = mlp

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


MakeLayer = Callable[[str, int], DecoderLayer]
"""(name, index) → the layer."""


class DecoderModel(nn.Module):
    """Embedding, layers and final norm: everything but the head.

    Attributes:
        depth: How many of the layers a token runs through; one that drafts tokens may stand behind them.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        name: str,
        make_layer: MakeLayer,
        rotary_emb: RotaryEmbedding,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(f"{name}.embed_tokens", config.vocab_size, config.hidden_size, ranks)
        self.rotary_emb = rotary_emb
        self.depth = int(config.num_hidden_layers)
        self.layers = nn.ModuleList(make_layer(f"{name}.layers.{i}", i) for i in range(self.depth))
        self.norm = RMSNorm(f"{name}.norm", config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See :meth:`CausalLM.forward`."""
        hidden, residual = self.embed_tokens(input_ids), None
        rope = self.rotary_emb(positions, hidden.dtype)
        for layer in self.layers[: self.depth]:
            hidden, residual = layer(hidden, residual, rope, batch)
        return self.norm(hidden, residual)[0]


class DecoderCausalLM(CausalLM):
    """A decoder with an output head, which may be tied to the embedding.

    Args:
        config: The transformers configuration.
        make_layer: What stands in a layer.
        rope_size: Size of the heads that are rotated.
        ranks: See :class:`CausalLM`.

    Raises:
        ModelError: The configuration asks for something that requant does not run.
    """

    def __init__(self, config: PreTrainedConfig, make_layer: MakeLayer, rope_size: int, ranks: Ranks = ALONE) -> None:
        super().__init__(config, ranks)
        self.model = DecoderModel(config, "model", make_layer, RotaryEmbedding(config, rope_size), ranks)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = OutputHead("lm_head", config.vocab_size, config.hidden_size, tied_to, ranks)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See :meth:`CausalLM.forward`."""
        return self.model(input_ids, positions, batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`CausalLM.compute_logits`."""
        return self.lm_head(hidden).float()


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


class DenseCausalLM(DecoderCausalLM):
    """A dense decoder with grouped-query attention.

    Args:
        config: The transformers configuration.
        options: What is particular to the family.
        ranks: See :class:`CausalLM`.

    Raises:
        ModelError: The configuration asks for something that requant does not run.
    """

    def __init__(self, config: PreTrainedConfig, options: DecoderOptions, ranks: Ranks = ALONE) -> None:
        windows = sliding_windows(config, options.attention)

        def make_layer(name: str, index: int) -> DecoderLayer:
            attention = SelfAttention(
                f"{name}.self_attn",
                config,
                qkv_bias=options.qkv_bias,
                output_bias=options.output_bias,
                qk_norm=options.qk_norm,
                window=windows[index],
                ranks=ranks,
            )
            sizes = config.hidden_size, config.intermediate_size
            mlp = Mlp(f"{name}.mlp", *sizes, config.hidden_act, options.mlp_bias, ranks)
            return DecoderLayer(name, config, attention, mlp)

        super().__init__(config, make_layer, head_size(config), ranks)
