"""``ptpc_fp8``: FP8 E4M3 weights with one float32 scale per output channel; activations per token."""

import torch
from torch import Tensor

from requant.formats import fp8
from requant.formats.base import Format


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [N, K] → codes float8_e4m3fn [N, K] and scales float32 [N, 1], one per row."""
    return fp8.quantize_weight(weight, 1, 0)


def dequantize(data: Tensor, scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """float(code) · scale, float32 [N, K]."""
    return fp8.dequantize_weight(data, scale, 1, 0)


FORMAT = Format(
    name="ptpc_fp8",
    quant_type="per_Token",
    quant_dtype="torch.float8_e4m3fn",
    data_dtype=fp8.E4M3,
    scale_dtype=torch.float32,
    group=(1, 0),
    codes_per_byte=1,
    activation="fp8_per_token",
    quantize=quantize,
    dequantize=dequantize,
)
