"""How a format stores a rectangle of a matrix, so that its numbers are those of the whole matrix.

A shard has exactly its own rows, and the scales of every block that it touches. Its columns are stored over whole
groups (the window), with code 0 for those of others, since a kernel counts groups from the first column it sees.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

import torch
from torch import Tensor

from requant.formats.base import Format


@dataclass(frozen=True)
class Shard:
    """A rectangle of an [N, K] matrix in a format.

    ``Shard(mxfp4, (64, 192), range(64), range(48, 96))`` is stored as columns 32 to 95, two groups.

    Attributes:
        format: The format.
        shape: (N, K) of the whole matrix.
        rows: The rows of it.
        columns: The columns of it.
    """

    format: Format
    shape: tuple[int, int]
    rows: range
    columns: range

    @cached_property
    def window(self) -> range:
        """The columns that are stored."""
        return self.format.column_window(self.columns, self.shape[1])

    @property
    def lead(self) -> int:
        """How many stored columns lie before the first own one."""
        return self.columns.start - self.window.start

    @property
    def skipped(self) -> int:
        """See :class:`~requant.formats.base.QuantizedTensor`."""
        return self.rows.start % self.format.group[0]

    @cached_property
    def data_shape(self) -> tuple[int, int]:
        """Shape of the stored codes."""
        return self.format.data_shape(len(self.rows), len(self.window))

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the stored scales."""
        return len(self.scale_rows), len(self.scale_columns)

    @cached_property
    def scale_rows(self) -> range:
        """The rows of the whole matrix's scales that are stored."""
        return touched(self.rows, self.format.group[0])

    @cached_property
    def scale_columns(self) -> range:
        """The columns of the whole matrix's scales that are stored."""
        group = self.format.group[1]
        return touched(self.window, group) if group else range(1)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        data = prod(self.data_shape) * self.format.data_dtype.itemsize
        return data + prod(self.scale_shape) * self.format.scale_dtype.itemsize

    def cut_data(self, codes: Tensor, columns: range) -> Tensor:
        """The stored codes, of those of some rows of the whole matrix.

        Args:
            codes: As the format stores ``columns``.
            columns: Whole groups that hold the window.

        Returns:
            The codes of the window, those of others set to 0; maybe a view of ``codes``, which is then changed.
        """
        per_byte, window = self.format.codes_per_byte, self.window
        first = (window.start - columns.start) // per_byte
        codes = codes[:, first : first + self.data_shape[1]]
        own = range(self.lead, self.lead + len(self.columns))
        _clear(codes.view(torch.uint8), own, per_byte, stored=len(window))
        return codes

    def cut_scale(self, scale: Tensor, columns: range) -> Tensor:
        """The stored scales, of those of some rows of scales of the whole matrix over ``columns``: a view."""
        group = self.format.group[1]
        if not group:
            return scale
        first = self.window.start // group - columns.start // group
        return scale[:, first : first + self.scale_shape[1]]


def touched(run: range, group: int) -> range:
    """The groups of ``group`` that a run has a part of: ``touched(range(100, 300), 128)`` is 0 to 2."""
    return range(run.start // group, ceil(run.stop / group) if run else run.start // group)


def _clear(data: Tensor, own: range, per_byte: int, stored: int) -> None:
    """Set the codes of ``data`` (bytes) that are not ``own`` to 0; two codes a byte: the even one in its low nibble."""
    if own.start:
        data[:, : own.start // per_byte] = 0
        if own.start % per_byte:
            data[:, own.start // per_byte] &= 0xF0
    if own.stop < stored:
        data[:, ceil(own.stop / per_byte) :] = 0
        if own.stop % per_byte:
            data[:, own.stop // per_byte] &= 0x0F
