"""The way of one checkpoint tensor into one model parameter, as data."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Placement:
    """One checkpoint tensor, or a rectangle of it, and the rows of a parameter that it fills.

    ``Placement("model.layers.0.self_attn.k_proj.weight", (192, 576), "weight", offset=576)`` puts the 192
    rows of ``k_proj`` behind the 576 of ``q_proj`` in the fused layer's ``weight``.
    ``Placement("…experts.gate_up_proj", (768, 2048), "w13_weight", 4608, whole=(128, 1536, 2048), start=4608)``
    takes the gate matrix of expert 3 out of a tensor that holds those of all experts.
    ``Placement("…o_proj.weight", (576, 576), columns=range(288, 576))`` is what the second of two ranks has of it.

    Rows are counted over all dimensions but those of ``shape`` behind its first: a parameter [E, 2I, H] has E · 2I
    rows for a matrix [I, H], a parameter [E, 2I] as many for a bias [I].

    Attributes:
        tensor: Name in the checkpoint.
        shape: Shape of what is placed if there is one rank: for a matrix, [N, K] of the whole one, whose scales are
            the same however it is sharded.
        parameter: Name of the parameter within its module (``weight``, ``bias``).
        offset: Row of the parameter where the first row that is placed goes.
        dtype: Of the parameter, where it is not quantized; None: the model's.
        whole: Shape of the checkpoint tensor, where that is more than ``shape``; ``()``: it is ``shape``.
        start: Row of the checkpoint tensor that comes first.
        rows: This rank's rows of ``shape``; None: all.
        columns: This rank's columns, of a matrix; None: all.
    """

    tensor: str
    shape: tuple[int, ...]
    parameter: str = "weight"
    offset: int = 0
    dtype: torch.dtype | None = None
    whole: tuple[int, ...] = ()
    start: int = 0
    rows: range | None = None
    columns: range | None = None

    @cached_property
    def own_rows(self) -> range:
        """This rank's rows of ``shape``."""
        return range(self.shape[0]) if self.rows is None else self.rows

    @cached_property
    def own_columns(self) -> range:
        """This rank's columns of a matrix."""
        return range(self.shape[1]) if self.columns is None else self.columns

    @cached_property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of what this rank has."""
        if len(self.shape) < 2:
            return (len(self.own_rows),)
        return (len(self.own_rows), len(self.own_columns), *self.shape[2:])


def row_chunks(start: int, stop: int, row_bytes: int, limit: int, align: int) -> Iterator[tuple[int, int]]:
    """Cut rows ``start`` to ``stop`` of ``row_bytes`` bytes into (start, stop) runs of at most ``limit`` bytes.

    Every run but the first starts at a multiple of ``align``, so that no quantization block is cut; a run of ``align``
    rows that is larger than ``limit`` is not cut any further.
    """
    step = max(limit // max(row_bytes, 1) // align, 1) * align
    while start < stop:
        end = min((start // align * align) + step, stop)
        yield start, end
        start = end
