"""A format is data: one frozen descriptor, from which shapes, sizes and reports are derived.

Shape legend: N output features (rows), K input features (columns), of one checkpoint matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """One way to store a weight matrix [N, K].

    Attributes:
        name: Canonical name, as recipes spell it.
        quant_type: The report's ``quant_type`` (``per_Token``, ``per_1x128``, ``per_1x32``).
        quant_dtype: The report's ``quant_dtype`` (``torch.float8_e4m3fn``, ``torch.uint8``).
        data_dtype: dtype of the stored codes.
        scale_dtype: dtype of the stored scales.
        group: (rows, columns) that share one scale; 0 stands for the whole extent. ``(1, 0)`` is per
            row, ``(128, 128)`` per block, ``(1, 32)`` per group along K.
        codes_per_byte: How many codes one element of ``data`` holds (2 for FP4 in uint8).
        activation: How a linear layer quantizes its input, dynamically, on every device:
            ``"fp8_per_token"``, ``"fp8_1x128"``, or None for the model's dtype.
        quantize: The reference: weight [N, K] (bf16, fp16 or fp32) → (data, scale).
        dequantize: The reference: (data, scale, (N, K)) → float32 [N, K].
        requantizes: Whether a checkpoint's weight in this format may become one in another: dequantized, rounded to
            bfloat16 and quantized anew. Else it is passed through as it is.
    """

    name: str
    quant_type: str
    quant_dtype: str
    data_dtype: torch.dtype
    scale_dtype: torch.dtype
    group: tuple[int, int]
    codes_per_byte: int
    activation: str | None
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    dequantize: Callable[[Tensor, Tensor, tuple[int, int]], Tensor]
    requantizes: bool = False

    def data_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the stored codes: K is padded to whole groups where several codes share a byte."""
        if self.codes_per_byte == 1:
            return n, k
        group = self.group[1]
        return n, ceil(k / group) * group // self.codes_per_byte

    def scale_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the stored scales: one for every (ragged edge included) group."""
        rows, cols = self.group
        return (ceil(n / rows) if rows else 1), (ceil(k / cols) if cols else 1)

    def nbytes(self, n: int, k: int) -> int:
        """Bytes that one [N, K] matrix takes, scales included."""
        data = prod(self.data_shape(n, k)) * self.data_dtype.itemsize
        return data + prod(self.scale_shape(n, k)) * self.scale_dtype.itemsize


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized matrix, or several stacked along N (the parts of a fused layer).

    Attributes:
        data: Codes, ``format.data_shape(N, K)``; parts are stacked along dim 0.
        scale: Scales; each part's ``format.scale_shape(n, K)`` stacked along dim 0, so that a part always
            begins a new row of scales, whatever its number of rows.
        format: The descriptor.
        shape: (N, K) of the dequantized matrix.
        parts: Rows of each part, summing to N; ``()`` means one part of N rows.
    """

    data: Tensor
    scale: Tensor
    format: Format
    shape: tuple[int, int]
    parts: tuple[int, ...] = ()

    def split(self) -> list["QuantizedTensor"]:
        """The parts, as views."""
        n, k = self.shape
        rows = self.parts or (n,)
        data = self.data.split(list(rows))
        scale = self.scale.split([self.format.scale_shape(r, k)[0] for r in rows])
        return [QuantizedTensor(d, s, self.format, (r, k)) for d, s, r in zip(data, scale, rows, strict=True)]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [N, K]: float(code) · scale in float32, rounded once to ``dtype``."""
        parts = [p.format.dequantize(p.data, p.scale, p.shape) for p in self.split()]
        return torch.cat(parts).to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + self.scale.nbytes


@dataclass(frozen=True)
class QuantizedStack:
    """E quantized matrices of one shape, each by itself: the experts of a layer.

    Attributes:
        data: Codes, [E, …] with ``format.data_shape(N, K)`` behind.
        scale: Scales, [E, …] with those of one matrix behind; see :class:`QuantizedTensor`.
        format: The descriptor.
        shape: (N, K) of one dequantized matrix.
        parts: Rows of each part of one matrix (gate and up), summing to N; ``()`` means one part of N rows.
    """

    data: Tensor
    scale: Tensor
    format: Format
    shape: tuple[int, int]
    parts: tuple[int, ...] = ()

    def __len__(self) -> int:
        """E."""
        return self.data.shape[0]

    def __getitem__(self, index: int) -> QuantizedTensor:
        """One matrix, as a view."""
        return QuantizedTensor(self.data[index], self.scale[index], self.format, self.shape, self.parts)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All matrices, [E, N, K]: see :meth:`QuantizedTensor.dequantize`."""
        out = torch.empty((len(self), *self.shape), dtype=dtype, device=self.data.device)
        for index in range(len(self)):
            out[index] = self[index].dequantize(dtype)
        return out
