"""The projection out of the latent space of multi-head latent attention, absorbed into queries and outputs.

Legend: T tokens, H heads, R latent size, Dn and Dv sizes of a head's keys (without their rotated part) and values.
"""

import torch
from torch import Tensor

from requant.errors import CheckpointError
from requant.formats import count_nonfinite
from requant.formats.base import Format
from requant.kernels.table import lookup
from requant.layers.linear import Linear, Part
from requant.parallel.split import spread


class LatentProjection(Linear):
    """``kv_b_proj``: for each head a matrix to keys [Dn, R] and one to values [Dv, R], as one [H · (Dn + Dv), R].

    Keys and values are never computed: a query is multiplied with its head's key matrix instead, and the attention's
    output with the value matrix. Both use the weight's values in the model's dtype: of a quantized weight the
    dequantized ones, rounded once, which are made by :meth:`finish` and stand beside it.

    Args:
        name: The module's name.
        num_heads: H.
        latent_size: R.
        key_size: Dn.
        value_size: Dv.
        own: The heads that this rank has; None: all.
    """

    def __init__(
        self,
        name: str,
        num_heads: int,
        latent_size: int,
        key_size: int,
        value_size: int,
        own: range | None = None,
    ) -> None:
        size = key_size + value_size
        rows = spread(own, size) if own is not None else None
        super().__init__(name, latent_size, [Part(name, num_heads * size, own=rows)])
        self._heads = (len(own) if own is not None else num_heads, size, latent_size)
        self._sizes = [key_size, value_size]
        self._to_keys: Tensor | None = None
        self._to_values: Tensor | None = None

    def activation(self, format: Format | None) -> str | None:
        """None: its input is never quantized."""
        return None

    def layout_bytes(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> int:
        """The values of a quantized weight."""
        return self.out_features * self.in_features * dtype.itemsize if format else 0

    def finish(self) -> None:
        """Make the values.

        Raises:
            CheckpointError: Some of them are beyond the range of the model's dtype.
        """
        assert self.weight is not None, "build() comes first"
        values = self.weight.data
        if self._format is not None:
            values = self._quantized(self._format).dequantize(self._dtype)
            if bad := int(count_nonfinite(values)):
                raise CheckpointError(
                    f"{self.names.module}: {bad} of {values.numel()} dequantized values are NaN or Inf "
                    f"(as {str(self._dtype).removeprefix('torch.')})"
                )
        self._to_keys, self._to_values = values.view(self._heads).split(self._sizes, dim=1)

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [T, H, Dn] → [T, H, R], in the latent space."""
        assert self._to_keys is not None, "finish() comes first"
        return _by_head(q, self._to_keys.transpose(1, 2))

    def expand(self, x: Tensor) -> Tensor:
        """The attention's output in the latent space, [T, H, R] → [T, H, Dv]."""
        assert self._to_values is not None, "finish() comes first"
        return _by_head(x, self._to_values)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """X [T, H, K] times each head's ``weight`` [H, N, K], transposed → [T, H, N]."""
    return lookup("dense_heads", "*", x.device.type)(x.transpose(0, 1), weight).transpose(0, 1)
