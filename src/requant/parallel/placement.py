"""The way of one checkpoint tensor into one model parameter, as data."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """One checkpoint tensor, or some of its rows, and the rows of a parameter that it fills.

    ``Placement("model.layers.0.self_attn.k_proj.weight", (192, 576), "weight", offset=576)`` puts the 192
    rows of ``k_proj`` behind the 576 of ``q_proj`` in the fused layer's ``weight``.
    ``Placement("…experts.gate_up_proj", (768, 2048), "w13_weight", 4608, whole=(128, 1536, 2048), start=4608)``
    takes the gate matrix of expert 3 out of a tensor that holds those of all experts.

    Rows are counted over all dimensions but those of ``shape`` behind its first: a parameter [E, 2I, H] has E · 2I
    rows for a matrix [I, H], a parameter [E, 2I] as many for a bias [I].

    Attributes:
        tensor: Name in the checkpoint.
        shape: Shape of what is placed.
        parameter: Name of the parameter within its module (``weight``, ``bias``).
        offset: Row of the parameter where the first row goes.
        dtype: Of the parameter, where it is not quantized; None: the model's.
        whole: Shape of the checkpoint tensor, where that is more than ``shape``; ``()``: it is ``shape``.
        start: Row of the checkpoint tensor that comes first.
    """

    tensor: str
    shape: tuple[int, ...]
    parameter: str = "weight"
    offset: int = 0
    dtype: torch.dtype | None = None
    whole: tuple[int, ...] = ()
    start: int = 0


def row_chunks(rows: int, row_bytes: int, limit: int, align: int) -> Iterator[tuple[int, int]]:
    """Cut ``rows`` rows of ``row_bytes`` bytes into (start, stop) runs of at most ``limit`` bytes.

    Every start is a multiple of ``align``, so that no quantization block is cut; a run of ``align`` rows that
    is larger than ``limit`` is not cut any further.
    """
    step = max(limit // max(row_bytes, 1) // align, 1) * align
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
