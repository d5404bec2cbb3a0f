"""A format is data: one frozen descriptor, from which shapes, sizes and reports are derived.

Shape legend: N output features (rows), K input features (columns), of one checkpoint matrix.
"""

from collections.abc import Callable, Iterator
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

    def row_window(self, rows: range, n: int) -> range:
        """The rows of an [N, K] matrix that share scales with ``rows``: whole blocks of it."""
        return _window(rows, self.group[0], n)

    def column_window(self, columns: range, k: int) -> range:
        """The columns that a shard with ``columns`` of an [N, K] matrix is stored with: whole groups of it.

        A format with one scale for the whole row stores the columns themselves.
        """
        return _window(columns, self.group[1] or 1, k)

    def nbytes(self, n: int, k: int) -> int:
        """Bytes that one [N, K] matrix takes, scales included."""
        data = prod(self.data_shape(n, k)) * self.data_dtype.itemsize
        return data + prod(self.scale_shape(n, k)) * self.scale_dtype.itemsize


def _window(run: range, group: int, size: int) -> range:
    return range(run.start // group * group, min(ceil(run.stop / group) * group, size))


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized matrix, or several stacked along N (the parts of a fused layer).

    Attributes:
        data: Codes, ``format.data_shape(N, K)``; parts are stacked along dim 0.
        scale: Scales; each part's ``format.scale_shape(skipped + n, K)`` stacked along dim 0, so that a part always
            begins a new row of scales, whatever its number of rows.
        format: The descriptor.
        shape: (N, K) of the dequantized matrix.
        parts: Rows of each part, summing to N; ``()`` means one part of N rows.
        skipped: For each part, how many rows its first block has before it: a shard may begin within a block, whose
            scale it has nevertheless. ``()`` means none.
    """

    data: Tensor
    scale: Tensor
    format: Format
    shape: tuple[int, int]
    parts: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()

    def split(self) -> list["QuantizedTensor"]:
        """The parts, as views."""
        n, k = self.shape
        rows = self.parts or (n,)
        skipped = self.skipped or (0,) * len(rows)
        data = self.data.split(list(rows))
        scale = self.scale.split([self.format.scale_shape(s + r, k)[0] for s, r in zip(skipped, rows, strict=True)])
        return [
            QuantizedTensor(d, s, self.format, (r, k), skipped=(skip,) if skip else ())
            for d, s, r, skip in zip(data, scale, rows, skipped, strict=True)
        ]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [N, K]: float(code) · scale in float32, rounded once to ``dtype``."""
        return torch.cat([values for part in self.split() for values in part._dequantize()]).to(dtype)

    def _dequantize(self) -> Iterator[Tensor]:
        """The rows of one part: those that share a block with rows before it, and all others."""
        n, k = self.shape
        first = min(self.format.group[0] - self.skipped[0], n) if self.skipped else 0
        if first:
            yield self.format.dequantize(self.data[:first], self.scale[:1], (first, k))
        if n > first or not n:
            yield self.format.dequantize(self.data[first:], self.scale[1 if first else 0 :], (n - first, k))

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
        skipped: See :class:`QuantizedTensor`.
    """

    data: Tensor
    scale: Tensor
    format: Format
    shape: tuple[int, int]
    parts: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()

    def __len__(self) -> int:
        """E."""
        return self.data.shape[0]

    def __getitem__(self, index: int) -> QuantizedTensor:
        """One matrix, as a view."""
        return QuantizedTensor(self.data[index], self.scale[index], self.format, self.shape, self.parts, self.skipped)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All matrices, [E, N, K]: see :meth:`QuantizedTensor.dequantize`."""
        out = torch.empty((len(self), *self.shape), dtype=dtype, device=self.data.device)
        for index in range(len(self)):
            out[index] = self[index].dequantize(dtype)
        return out
