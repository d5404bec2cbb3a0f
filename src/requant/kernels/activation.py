"""Dynamic quantization of a linear layer's input: the reference, with the same arithmetic as the weights.

Shape legend: M tokens, K input features.
"""

from torch import Tensor

from requant.formats import fp8
from requant.kernels.table import RowMax

# Kind (``Format.activation``) → columns that share a scale; 0: the whole row.
GROUP_COLUMNS = {"fp8_per_token": 0, "fp8_1x128": 128}


def quantize_activation(x: Tensor, kind: str, row_max: RowMax | None = None) -> tuple[Tensor, Tensor]:
    """Quantize each token of [M, K] (floating point).

    Args:
        x: The layer's input; ``fp8_1x128`` counts its groups from column 0.
        kind: ``"fp8_per_token"`` (scale [M, 1]) or ``"fp8_1x128"`` (scale [M, ⌈K/128⌉]).
        row_max: Where ``x`` is a part of a token's features: given the largest magnitudes of its scales' features here,
            returns those of all.

    Returns:
        Codes, float8_e4m3fn [M, K], and scales, float32.
    """
    return fp8.quantize_tiles(x, 1, GROUP_COLUMNS[kind], row_max)


def dequantize_activation(data: Tensor, scale: Tensor, kind: str) -> Tensor:
    """float(code) · scale, float32 [M, K]."""
    return fp8.dequantize_tiles(data, scale, 1, GROUP_COLUMNS[kind])
