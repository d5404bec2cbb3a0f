"""Grouped-query attention as Llama and Qwen have it.

Legend: T tokens, H hidden size, Hq and Hk query and key/value heads, D head size.
"""

from torch import Tensor, nn
from transformers import PreTrainedConfig

from requant.errors import ConfigError, ModelError
from requant.kernels.attention_batch import AttentionBatch
from requant.layers.attention import Attention
from requant.layers.linear import qkv_linear
from requant.layers.norm import RMSNorm
from requant.layers.row_linear import RowLinear
from requant.parallel import ALONE, Ranks
from requant.parallel.split import grouped_split, spread


class SelfAttention(nn.Module):
    """Projections, rotation and attention of one layer.

    Args:
        name: The module's name.
        config: The transformers configuration.
        qkv_bias: The query, key and value projections have a bias.
        output_bias: The output projection has one.
        qk_norm: Queries and keys are normalized head by head, before the rotation.
        window: The sliding window; None for full attention.
        ranks: The ranks, which share the heads; where they are more than the key/value heads, several have the same.

    Raises:
        ModelError: The heads cannot be grouped.
        ConfigError: The heads cannot be shared by this many ranks.
    """

    def __init__(
        self,
        name: str,
        config: PreTrainedConfig,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, head_size(config)
        heads = config.num_attention_heads
        shares = head_shares(heads, config.num_key_value_heads, ranks)
        key_heads, query_heads = shares[ranks.rank]
        self.num_heads, self.num_kv_heads = len(query_heads), len(key_heads)
        own = (key_heads, query_heads) if ranks.size > 1 else None
        self.qkv_proj = qkv_linear(
            f"{name}.qkv_proj", hidden, heads, config.num_key_value_heads, self.head_dim, qkv_bias, own
        )
        columns = [spread(query_heads, self.head_dim) for _, query_heads in shares]
        self.o_proj = RowLinear(f"{name}.o_proj", heads * self.head_dim, hidden, ranks, columns, output_bias)
        self.q_norm = self.k_norm = None
        self._eps = config.rms_norm_eps
        if qk_norm:
            self.q_norm = RMSNorm(f"{name}.q_norm", self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(f"{name}.k_norm", self.head_dim, config.rms_norm_eps)
        self.attn = Attention(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5, window)

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        """Hidden states [T, H] → [T, H]; ``rope`` is (cos, sin) of the positions."""
        qkv = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        norms = (self.q_norm.weight, self.k_norm.weight) if self.q_norm and self.k_norm else None
        return self.o_proj(self.attn.from_projection(qkv, norms, self._eps, rope, batch))


def head_shares(num_heads: int, num_kv_heads: int, ranks: Ranks) -> list[tuple[range, range]]:
    """For every rank its key/value heads and its query heads.

    Raises:
        ModelError: The heads cannot be grouped.
        ConfigError: The heads cannot be shared by this many ranks; the message has the numbers that can.
    """
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    each = num_heads // num_kv_heads
    try:
        return [grouped_split(num_kv_heads, each, ranks.size, rank) for rank in range(ranks.size)]
    except ValueError:
        multiples = [f"{n * num_kv_heads}" for n in range(2, each + 1)]
        accepted = ", ".join([f"1 to {num_kv_heads}", *multiples])
        raise ConfigError(
            f"-tp is {ranks.size}; accepted for {num_heads} heads on {num_kv_heads} key/value heads: {accepted}"
        ) from None


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
