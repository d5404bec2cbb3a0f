"""What is read at once: every row of every step once, tensors that lie behind each other together."""

from itertools import pairwise

import pytest

from requant.loading.chunks import weight_chunks

RECIPE = {"global_quant_config": "mxfp4"}


@pytest.mark.parametrize("limit", [1, 1000, 20_000, 10**9])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_row_is_read_once_from_where_it_lies(make_tiny, shards, limit):
    tiny = make_tiny()
    plan = tiny.plan(RECIPE, tiny.save(shards))
    chunks = weight_chunks(plan, limit)
    rows = {index: [] for index in range(len(plan.steps))}
    for chunk in chunks:
        assert sum(piece.nbytes for piece in chunk.pieces) == chunk.extent.nbytes
        for piece in chunk.pieces:
            step = plan.steps[piece.index]
            assert piece.offset % 16 == 0 or len(chunk.pieces) == 1
            assert chunk.extent.tensor.file == step.tensor.file
            assert chunk.extent.position + piece.offset == step.tensor.start + step.offset(piece.start)
            assert piece.nbytes == (piece.stop - piece.start) * step.run_bytes
            assert chunk.timed == step.converts
            rows[piece.index] += range(piece.start, piece.stop)
        alone = len(chunk.pieces) == 1
        assert chunk.extent.nbytes <= limit or alone
    assert rows == {index: list(step.rows) for index, step in enumerate(plan.steps)}


def test_neighbours_are_read_together(make_tiny):
    tiny = make_tiny()
    plan = tiny.plan(RECIPE, tiny.save(1))
    chunks = weight_chunks(plan, 10**9)
    assert max(len(chunk.pieces) for chunk in chunks) > 2
    for before, after in pairwise(chunks):  # what is not together is of another kind, or does not lie behind
        begin = before.extent.position
        end, own = begin + before.extent.nbytes, after.extent.position
        assert own != end or (own - begin) % 16 or before.timed != after.timed
    assert len(weight_chunks(plan, 1)) > len(chunks)
