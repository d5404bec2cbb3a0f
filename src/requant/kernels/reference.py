"""Every op of the kernel table in plain torch, for any format and device: the contract, and the CPU's path."""

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from requant.formats import count_nonfinite
from requant.formats.base import Format, QuantizedTensor
from requant.formats.per_block_fp8 import FORMAT as PER_BLOCK
from requant.formats.rows import row_runs
from requant.kernels.activation import dequantize_activation, quantize_activation
from requant.kernels.table import RowMax, lookup


def quantize(format: Format, weight: Tensor, data: Tensor, scale: Tensor) -> None:
    """Quantize ``weight`` [N, K] into ``data`` and ``scale`` with the format's reference."""
    codes, scales = format.quantize(weight)
    data.copy_(codes)
    scale.copy_(scales)


def quantize_many(
    format: Format, weights: Sequence[Tensor], data: Sequence[Tensor], scale: Sequence[Tensor], bad: Sequence[Tensor]
) -> None:
    """:func:`quantize` one matrix after the other, counting values that are not finite."""
    for weight, codes, scales, count in zip(weights, data, scale, bad, strict=True):
        count += count_nonfinite(weight)
        quantize(format, weight, codes, scales)


def requantize(
    format: Format,
    codes: Sequence[Tensor],
    codes_scale: Sequence[Tensor],
    data: Sequence[Tensor],
    scale: Sequence[Tensor],
    bad: Sequence[Tensor],
) -> None:
    """Dequantize ``per_block_fp8`` weights, round them to bfloat16 and quantize that; see the table.

    In runs of whole blocks of rows, so that the temporaries stay small.
    """
    rows, own = PER_BLOCK.group[0], format.group[0]
    for one, one_scale, out, out_scale, count in zip(codes, codes_scale, data, scale, bad, strict=True):
        n, k = one.shape
        for start, stop in row_runs(n, k, rows):
            blocks = one_scale[start // rows : ceil(stop / rows)]
            weight = PER_BLOCK.dequantize(one[start:stop], blocks, (stop - start, k)).to(torch.bfloat16)
            count += count_nonfinite(weight)
            quantize(format, weight, out[start:stop], out_scale[start // own : ceil(stop / own)])


class ReferenceLinear:
    """x [M, K] → y [M, N] with the numbers of the format, and a float32 matrix product, or float64 for such a y.

    Attributes:
        weight: The layout: the dequantized weight, [N, K] in the dtype of the product.
        nbytes: Its bytes, beside those of the quantized tensors.
    """

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype, row_max: RowMax | None = None):
        self.weight = weight.dequantize(torch.float64 if dtype == torch.float64 else torch.float32)
        self.nbytes = self.weight.nbytes
        self._activation = weight.format.activation
        self._row_max = row_max
        self._dtype = dtype
        self._dense = lookup("dense", "*", self.weight.device.type)

    def __call__(self, x: Tensor) -> Tensor:
        """Quantize and dequantize the activations as the format says, multiply, round once to the dtype."""
        if self._activation is not None:
            x = dequantize_activation(*quantize_activation(x, self._activation, self._row_max), self._activation)
        return self._dense(x.to(self.weight.dtype), self.weight).to(self._dtype)


def linear(weight: QuantizedTensor, dtype: torch.dtype, row_max: RowMax | None = None) -> ReferenceLinear:
    """The forward of a linear layer whose weight is ``weight`` (its parts stacked), for inputs of ``dtype``."""
    return ReferenceLinear(weight, dtype, row_max)
