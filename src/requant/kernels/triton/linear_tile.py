"""Block sizes that the GEMM kernels share."""

from typing import NamedTuple

# Programs that keep every multiprocessor of a Hopper GPU (132 of them) busy while weights stream in.
_PROGRAMS = 128


class Tile(NamedTuple):
    """Block sizes of one GEMM program, and how it is compiled.

    Attributes:
        m: Tokens.
        n: Output features.
        k: Input features of one step of the loop.
        warps: Warps of a program.
        stages: Steps whose loads are in flight.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 4


def rows_for(m: int) -> int:
    """The narrowest block of tokens that matrix units take and that holds M of them, at most 64."""
    return 16 if m <= 16 else 32 if m <= 32 else 64


def columns_for(n: int) -> int:
    """The widest block of features that still leaves every multiprocessor some of the N to read.

    With few tokens the weights' bytes are the whole cost, and every idle multiprocessor is bandwidth lost.
    """
    return next((width for width in (128, 64, 32) if n >= width * _PROGRAMS), 16)
