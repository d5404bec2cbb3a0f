"""What is read at once: pieces of tensors, and tensors that lie behind each other in one read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm

from requant.loading.plan import Plan, Step
from requant.loading.reader import Extent
from requant.parallel.placement import row_chunks

# Every piece of a chunk begins at a multiple of this, so that it can be seen as values of any dtype.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Piece:
    """Some rows of a step, within a chunk.

    Attributes:
        index: Of the step, in :attr:`Plan.steps` (or :attr:`Plan.scales`).
        start: First row of the matrix (first element of a vector).
        stop: The row behind its last.
        offset: Offset of the first byte in the chunk.
        nbytes: How many bytes.
    """

    index: int
    start: int
    stop: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Chunk:
    """Bytes that are read, and brought to the device, at once.

    Attributes:
        extent: What is read.
        pieces: What it is made of.
        timed: Whether placing it counts as quantization.
        ordered: Whether placing it is something that all ranks do together, and therefore in one order.
    """

    extent: Extent
    pieces: tuple[Piece, ...]
    timed: bool = False
    ordered: bool = False


def scale_chunks(plan: Plan, limit: int) -> list[Chunk]:
    """:attr:`Plan.scales`, in the order of files and offsets: they are small and never cut."""
    chunks = []
    for index, step in enumerate(plan.scales):
        extent = Extent(step.part.tensor, step.part.begin, step.part.nbytes)
        chunks.append(Chunk(extent, (Piece(index, 0, step.part.shape[0], 0, extent.nbytes),)))
    chunks.sort(key=lambda chunk: (str(chunk.extent.tensor.file), chunk.extent.position))
    return list(_together(chunks, limit))


def weight_chunks(plan: Plan, limit: int) -> list[Chunk]:
    """Everything else, in the plan's order, in chunks of at most ``limit`` bytes (or one row, or one block of rows)."""
    return list(_together(_pieces(plan, limit), limit))


def _together(chunks: Iterable[Chunk], limit: int) -> Iterator[Chunk]:
    """Those that lie behind each other as one, of at most ``limit`` bytes."""
    waiting: list[Chunk] = []
    for chunk in chunks:
        if waiting and not _follows(waiting, chunk, limit):
            yield _joined(waiting)
            waiting = []
        waiting.append(chunk)
    if waiting:
        yield _joined(waiting)


def _pieces(plan: Plan, limit: int) -> Iterator[Chunk]:
    """A chunk for every piece."""
    for index, step in enumerate(plan.steps):
        formats = [format for format in (step.source, step.format) if format and step.converts]
        align = lcm(*(format.group[0] for format in formats))
        # What all ranks do together is cut in the same way on all, whatever each has of a row.
        row_bytes = step.row_bytes if step.together else step.run_bytes
        for start, stop in row_chunks(step.rows.start, step.rows.stop, row_bytes, limit, align):
            extent = _extent(step, start, stop)
            yield Chunk(extent, (Piece(index, start, stop, 0, extent.nbytes),), step.converts, step.together)


def _extent(step: Step, start: int, stop: int) -> Extent:
    """The bytes of some rows of a step."""
    if step.cut:
        return Extent(step.tensor, step.offset(start), step.run_bytes, stop - start, step.row_bytes)
    return Extent(step.tensor, step.offset(start), (stop - start) * step.run_bytes)


def _follows(before: list[Chunk], chunk: Chunk, limit: int) -> bool:
    """Whether a chunk can be read with those before it."""
    first, last = before[0].extent, before[-1].extent
    begin, end, own = first.position, last.position + last.run, chunk.extent.position
    return (
        chunk.extent.tensor.file == first.tensor.file
        and own == end
        and (own - begin) % _ALIGNMENT == 0
        and own - begin + chunk.extent.run <= limit
        and chunk.timed == before[0].timed
        and not (chunk.ordered or before[0].ordered)
        and chunk.extent.runs == last.runs == 1
    )


def _joined(chunks: list[Chunk]) -> Chunk:
    """One chunk of several that lie behind each other."""
    if len(chunks) == 1:
        return chunks[0]
    first = chunks[0]
    pieces, offset = [], 0
    for chunk in chunks:
        (piece,) = chunk.pieces
        pieces.append(Piece(piece.index, piece.start, piece.stop, offset, piece.nbytes))
        offset += piece.nbytes
    return Chunk(Extent(first.extent.tensor, first.extent.begin, offset), tuple(pieces), first.timed)
