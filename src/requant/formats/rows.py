"""Large matrices in runs of rows, so that the float32 temporaries of the references stay small."""

from collections.abc import Iterator

# Elements of one run: 4 MiB in float32, a few of which still fit a CPU's last cache level.
_RUN = 1 << 20


def row_runs(n: int, k: int, align: int = 1) -> Iterator[tuple[int, int]]:
    """Cut N rows of K elements into (start, stop) runs of about a million elements.

    Every start is a multiple of ``align``, so that no tile of ``align`` rows is cut.
    """
    step = max(_RUN // max(k, 1) // align, 1) * align
    for start in range(0, n, step):
        yield start, min(start + step, n)
