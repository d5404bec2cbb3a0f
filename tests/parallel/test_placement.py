import pytest

from requant.parallel.placement import row_chunks


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 1000])
@pytest.mark.parametrize("align", [1, 128])
@pytest.mark.parametrize("limit", [1, 999, 5_000, 10**9])
def test_chunks_cover_the_rows_once_and_cut_no_block(rows, align, limit):
    chunks = list(row_chunks(0, rows, 10, limit, align))
    assert [row for start, stop in chunks for row in range(start, stop)] == list(range(rows))
    assert all(start % align == 0 for start, _ in chunks)
    assert all((stop - start) * 10 <= max(limit, align * 10) for start, stop in chunks)


def test_chunks_are_as_large_as_the_limit_allows():
    assert list(row_chunks(0, 300, 10, 2600, 128)) == [(0, 256), (256, 300)]


def test_chunks_that_begin_within_a_block_go_on_at_the_next_one():
    assert list(row_chunks(100, 400, 10, 1300, 128)) == [(100, 128), (128, 256), (256, 384), (384, 400)]
