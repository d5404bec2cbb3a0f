"""``per_block_fp8``: FP8 E4M3 weights with one float32 scale per 128 × 128 block; activations 1 × 128 along K."""

import torch
from torch import Tensor

from requant.formats import fp8
from requant.formats.base import Format

BLOCK = 128


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [N, K] → codes float8_e4m3fn [N, K] and scales float32 [⌈N/128⌉, ⌈K/128⌉], one per block."""
    return fp8.quantize_weight(weight, BLOCK, BLOCK)


def dequantize(data: Tensor, scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """float(code) · scale of its block, float32 [N, K]."""
    return fp8.dequantize_weight(data, scale, BLOCK, BLOCK)


FORMAT = Format(
    name="per_block_fp8",
    quant_type="per_1x128",
    quant_dtype="torch.float8_e4m3fn",
    data_dtype=fp8.E4M3,
    scale_dtype=torch.float32,
    group=(BLOCK, BLOCK),
    codes_per_byte=1,
    activation="fp8_1x128",
    quantize=quantize,
    dequantize=dequantize,
    requantizes=True,
)
