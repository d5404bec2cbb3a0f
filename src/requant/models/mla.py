"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, §2.1), absorbed.

Legend: T tokens, H heads, R latent size, P size of the rotated part, Dn and Dv sizes of a head's keys without it and of
its values.
"""

from math import log

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from requant.kernels.attention_batch import AttentionBatch
from requant.kernels.rotary_reference import rotate, rotate_pairs
from requant.layers.attention import LatentAttention
from requant.layers.latent import LatentProjection
from requant.layers.linear import merged_linear, plain_linear
from requant.layers.norm import RMSNorm
from requant.layers.row_linear import RowLinear
from requant.parallel import ALONE, Ranks
from requant.parallel.split import spread

# The norms of the compressed queries and latents do not follow the configuration's epsilon.
_EPS = 1e-6


class LatentSelfAttention(nn.Module):
    """Projections, rotation and attention of one layer.

    Args:
        name: The module's name.
        config: The transformers configuration.
        interleaved: Whether features 2i and 2i + 1 are rotated together, not those of two halves.
        ranks: The ranks, which share the heads; the projections into the latent space are the same on all.

    Raises:
        ConfigError: There are more ranks than heads.
    """

    def __init__(self, name: str, config: PreTrainedConfig, interleaved: bool, ranks: Ranks = ALONE) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        heads = config.num_attention_heads
        shares = ranks.shares(heads, "num_attention_heads")
        own = shares[ranks.rank] if ranks.size > 1 else None
        self.num_heads, self.latent_size = len(shares[ranks.rank]), config.kv_lora_rank
        self.rope_size, self.key_size = config.qk_rope_head_dim, config.qk_nope_head_dim
        self.query_size = config.q_lora_rank
        compressed = self.latent_size + self.rope_size
        query_rows = self.key_size + self.rope_size
        queries, own_queries = heads * query_rows, spread(own, query_rows) if own else None
        if self.query_size is None:
            self.q_proj = plain_linear(f"{name}.q_proj", hidden, queries, own=own_queries)
            self.kv_a_proj_with_mqa = plain_linear(f"{name}.kv_a_proj_with_mqa", hidden, compressed, bias)
        else:
            rows = {"q_a_proj": self.query_size, "kv_a_proj_with_mqa": compressed}
            self.fused_qkv_a_proj = merged_linear(f"{name}.fused_qkv_a_proj", hidden, rows, bias)
            self.q_a_layernorm = RMSNorm(f"{name}.q_a_layernorm", self.query_size, _EPS)
            self.q_b_proj = plain_linear(f"{name}.q_b_proj", self.query_size, queries, own=own_queries)
        self.kv_a_layernorm = RMSNorm(f"{name}.kv_a_layernorm", self.latent_size, _EPS)
        value_size = config.v_head_dim
        self.kv_b_proj = LatentProjection(f"{name}.kv_b_proj", heads, self.latent_size, self.key_size, value_size, own)
        columns = [spread(share, value_size) for share in shares]
        self.o_proj = RowLinear(f"{name}.o_proj", heads * value_size, hidden, ranks, columns, bias)
        self.attn = LatentAttention(self.num_heads, self.latent_size, self.rope_size, _scale(config))
        self._rotate = rotate_pairs if interleaved else rotate

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        """Hidden states [T, H] → [T, H]; ``rope`` is (cos, sin) of the positions."""
        q, latent, k_rope = self._project(hidden)
        q_nope, q_rope = q.split([self.key_size, self.rope_size], dim=-1)
        latent = self.kv_a_layernorm(latent)
        k_rope = self._rotate(k_rope[:, None], *rope)[:, 0]
        q = torch.cat([self.kv_b_proj.absorb(q_nope), self._rotate(q_rope, *rope)], dim=-1)
        out = self.attn(q, latent, k_rope, batch)
        return self.o_proj(self.kv_b_proj.expand(out).flatten(1))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H] → queries [T, H, Dn + P], latents [T, R] and keys to be rotated [T, P]."""
        sizes = [self.latent_size, self.rope_size]
        if self.query_size is None:
            q, (latent, k_rope) = self.q_proj(hidden), self.kv_a_proj_with_mqa(hidden).split(sizes, dim=-1)
        else:
            q, latent, k_rope = self.fused_qkv_a_proj(hidden).split([self.query_size, *sizes], dim=-1)
            q = self.q_b_proj(self.q_a_layernorm(q))
        return q.unflatten(-1, (self.num_heads, -1)), latent, k_rope


def _scale(config: PreTrainedConfig) -> float:
    """Factor on the scores: 1 / sqrt(Dn + P), and under YaRN the square of its attention factor ``mscale_all_dim``.

    YaRN: https://arxiv.org/abs/2309.00071, §3.4, with the weight on the logarithm that DeepSeek adds.
    """
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    parameters = getattr(config, "rope_parameters", None) or {}
    weight, factor = parameters.get("mscale_all_dim", 0), parameters.get("factor", 1.0)
    if parameters.get("rope_type", "default") == "default" or not weight or factor <= 1:
        return scale
    return scale * (0.1 * weight * log(factor) + 1.0) ** 2
