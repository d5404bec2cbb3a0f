"""Causal attention over a paged KV cache: of keys and values per head, and of one latent vector for all heads."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from requant.kernels.attention_batch import AttentionBatch
from requant.kernels.table import lookup


class CachedAttention(nn.Module):
    """Attention that keeps something of every token.

    Attributes:
        kv_cache: The cache, of :meth:`kv_cache_shape` in the model's dtype, bound by whoever owns the memory; None
            until then. It must be allocated finite (zeros), and the reference's ``kv_write`` keeps it so: it reads
            and masks slots behind a sequence's end, which the GPU's kernels never read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache: Tensor | None = None

    @abstractmethod
    def kv_cache_shape(self, num_pages: int, block_size: int) -> tuple[int, ...]:
        """Shape of ``kv_cache`` for ``num_pages`` usable pages.

        The page behind the usable ones takes what is written nowhere: slot -1 is the last slot of the cache, so
        that padding needs neither a mask nor a look at the slots' values, which a CUDA graph could not take.
        """

    @abstractmethod
    def kv_cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in this layer."""


class Attention(CachedAttention):
    """Writes a step's keys and values into the cache, and attends over it.

    Args:
        num_heads: Hq, heads of the queries.
        num_kv_heads: Hk, which divides Hq.
        head_dim: D.
        scale: Factor on the scores.
        sliding_window: A query sees this many tokens, itself included; None: all before it.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, sliding_window: int | None = None
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.sliding_window = sliding_window

    def kv_cache_shape(self, num_pages: int, block_size: int) -> tuple[int, ...]:
        """[2, num_pages + 1, block_size, Hk, D]; see :meth:`CachedAttention.kv_cache_shape`."""
        return 2, num_pages + 1, block_size, self.num_kv_heads, self.head_dim

    def kv_cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of key and value of one token in this layer."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        """Attend with this step's queries.

        Args:
            q: [T, Hq, D].
            k: [T, Hk, D].
            v: [T, Hk, D].
            batch: Which tokens belong to which sequence, and where the cache has them.

        Returns:
            [T, Hq · D].
        """
        k_cache, v_cache = self._caches()
        lookup("kv_write", "*", q.device.type)(k, v, k_cache, v_cache, batch.slots)
        return self._attend(q, k_cache, v_cache, batch)

    def from_projection(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rope: tuple[Tensor, Tensor],
        batch: AttentionBatch,
    ) -> Tensor:
        """As :meth:`forward`, of what the layer's projection gave: queries, keys and values, [T, Hq + 2 Hk, D].

        Args:
            qkv: The heads, neither normalized nor rotated yet.
            norms: Weights [D] of the norms of queries and of keys; None: there are none.
            eps: Of the norms.
            rope: (cos, sin) of the positions.
            batch: As for :meth:`forward`.
        """
        k_cache, v_cache = self._caches()
        prepare = lookup("heads", "*", qkv.device.type)
        q = prepare(qkv, self.num_heads, norms, eps, rope, k_cache, v_cache, batch.slots)
        return self._attend(q, k_cache, v_cache, batch)

    def _caches(self) -> tuple[Tensor, Tensor]:
        assert self.kv_cache is not None, "no kv_cache is bound"
        keys, values = self.kv_cache.unbind(0)
        return keys, values

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> Tensor:
        attend = lookup("attention", "*", q.device.type)
        return attend(q, k_cache, v_cache, batch, self.scale, self.sliding_window).flatten(1)


class LatentAttention(CachedAttention):
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, https://arxiv.org/abs/2405.04434, §2.1).

    The cache holds one latent vector and one rotated key a token, for all heads. Queries come projected into the
    latent space, where the latent vector is key and value at once.

    Args:
        num_heads: Hq.
        latent_size: R, size of the latent vector.
        rope_size: P, size of the rotated part.
        scale: Factor on the scores.
    """

    def __init__(self, num_heads: int, latent_size: int, rope_size: int, scale: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.latent_size = latent_size
        self.rope_size = rope_size
        self.scale = scale

    def kv_cache_shape(self, num_pages: int, block_size: int) -> tuple[int, ...]:
        """[num_pages + 1, block_size, 1, R + P]; see :meth:`CachedAttention.kv_cache_shape`."""
        return num_pages + 1, block_size, 1, self.latent_size + self.rope_size

    def kv_cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's latent vector and rotated key."""
        return (self.latent_size + self.rope_size) * dtype.itemsize

    def forward(self, q: Tensor, latent: Tensor, rope: Tensor, batch: AttentionBatch) -> Tensor:
        """Attend with this step's queries.

        Args:
            q: [T, Hq, R + P], the part in the latent space first.
            latent: [T, R].
            rope: [T, P].
            batch: Which tokens belong to which sequence, and where the cache has them.

        Returns:
            [T, Hq, R], in the latent space.
        """
        assert self.kv_cache is not None, "no kv_cache is bound"
        cache, device = self.kv_cache, q.device.type
        values, keys = cache.split([self.latent_size, self.rope_size], dim=-1)
        lookup("kv_write", "*", device)(latent[:, None], rope[:, None], values, keys, batch.slots)
        return lookup("attention", "*", device)(q, cache, values, batch, self.scale, None)
