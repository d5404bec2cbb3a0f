"""The way of one checkpoint tensor into one model parameter, as data."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """One checkpoint tensor and the rows of a parameter that it fills.

    ``Placement("model.layers.0.self_attn.k_proj.weight", (192, 576), "weight", offset=576)`` puts the 192
    rows of ``k_proj`` behind the 576 of ``q_proj`` in the fused layer's ``weight``.

    Attributes:
        tensor: Name in the checkpoint.
        shape: Shape of the whole tensor in the checkpoint.
        parameter: Name of the parameter within its module (``weight``, ``bias``).
        offset: Index along dim 0 of the parameter where the tensor's first row goes.
    """

    tensor: str
    shape: tuple[int, ...]
    parameter: str = "weight"
    offset: int = 0


def row_chunks(rows: int, row_bytes: int, limit: int, align: int) -> Iterator[tuple[int, int]]:
    """Cut ``rows`` rows of ``row_bytes`` bytes into (start, stop) runs of at most ``limit`` bytes.

    Every start is a multiple of ``align``, so that no quantization block is cut; a run of ``align`` rows that
    is larger than ``limit`` is not cut any further.
    """
    step = max(limit // max(row_bytes, 1) // align, 1) * align
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
