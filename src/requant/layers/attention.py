"""Causal attention over a paged KV cache."""

import torch
from torch import Tensor, nn

from requant.kernels.attention_batch import AttentionBatch
from requant.kernels.table import lookup


class Attention(nn.Module):
    """Writes a step's keys and values into the cache, and attends over it.

    Args:
        num_heads: Hq, heads of the queries.
        num_kv_heads: Hk, which divides Hq.
        head_dim: D.
        scale: Factor on the scores.
        sliding_window: A query sees this many tokens, itself included; None: all before it.

    Attributes:
        kv_cache: Keys and values of :meth:`kv_cache_shape`, in the model's dtype, bound by whoever owns the
            memory; None until then. It must be allocated finite (zeros), and the reference's ``kv_write``
            keeps it so: it reads and masks slots behind a sequence's end, which the GPU's kernels never read.
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
        self.kv_cache: Tensor | None = None

    def kv_cache_shape(self, num_pages: int, block_size: int) -> tuple[int, ...]:
        """Shape of ``kv_cache`` for ``num_pages`` usable pages: [2, num_pages + 1, block_size, Hk, D].

        The page behind the usable ones takes what is written nowhere: slot -1 is the last slot of the cache, so
        that padding needs neither a mask nor a look at the slots' values, which a CUDA graph could not take.
        """
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
        assert self.kv_cache is not None, "no kv_cache is bound"
        k_cache, v_cache = self.kv_cache.unbind(0)
        device = q.device.type
        lookup("kv_write", "*", device)(k, v, k_cache, v_cache, batch.slots)
        attend = lookup("attention", "*", device)
        return attend(q, k_cache, v_cache, batch, self.scale, self.sliding_window).flatten(1)
