"""Tensors as the tests compare and make them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from requant.formats import FORMATS, QuantizedStack


def bits(tensor: Tensor) -> Tensor:
    """Its bytes, on the CPU: what "bit for bit" compares, whatever the dtype."""
    return tensor.cpu().contiguous().view(torch.uint8)


def quantize_stack(weights: Tensor, parts: Sequence[int], name: str) -> QuantizedStack:
    """Matrices [E, N, K], each quantized part by part with the format's reference, as a layer of experts holds them."""
    format = FORMATS[name]
    pairs = [[format.quantize(part) for part in matrix.split(list(parts))] for matrix in weights]
    data = torch.stack([torch.cat([data for data, _ in matrix]) for matrix in pairs])
    scale = torch.stack([torch.cat([scale for _, scale in matrix]) for matrix in pairs])
    _, n, k = weights.shape
    return QuantizedStack(data, scale, format, (n, k), tuple(parts))
