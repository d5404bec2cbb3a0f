import threading

import pytest
import torch

from requant.errors import CheckpointError
from requant.loading.headers import TensorInfo
from requant.loading.reader import Extent, Reader
from requant.loading.slabs import SlabPool, Staging

CPU = torch.device("cpu")


@pytest.fixture
def tensor(tmp_path):
    content = torch.arange(1000, dtype=torch.int32).view(torch.uint8)
    file = tmp_path / "file"
    file.write_bytes(b"header" + content.numpy().tobytes())
    return TensorInfo("a", "I32", (1000,), file, 6, 4000), content


def test_every_extent_arrives_once_with_its_bytes(tensor):
    info, content = tensor
    extents = [Extent(info, begin, min(130, 4000 - begin)) for begin in range(0, 4000, 130)]
    pool = SlabPool(Staging(130, 2, 1), CPU)
    seen = set()
    with Reader(extents, pool, threads=4) as reader:
        for _ in extents:
            index, slab = reader.wait()
            extent = extents[index]
            assert torch.equal(slab[: extent.nbytes], content[extent.begin : extent.begin + extent.nbytes])
            seen.add(index)
            pool.release(slab)
        assert reader.poll() is None
    assert seen == set(range(len(extents)))
    assert pool.high_water <= 2 * 130


def test_readers_wait_for_slabs_and_leave_when_told(tensor):
    info, _ = tensor
    pool = SlabPool(Staging(100, 2, 1), CPU)
    with Reader([Extent(info, begin, 100) for begin in range(0, 4000, 100)], pool, threads=4) as reader:
        reader.wait()
        reader.wait()
        assert reader.poll() is None, "both slabs are taken, so nothing more can have arrived"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("requant-reader")]
    assert not pool.reserve()


def test_an_error_reaches_the_consumer_behind_what_was_read(tensor):
    info, _ = tensor
    behind = TensorInfo("b", "I32", (10,), info.file, 4006, 40)
    pool = SlabPool(Staging(40, 4, 1), CPU)
    with Reader([Extent(info, 0, 40), Extent(behind, 0, 40)], pool, threads=1) as reader:
        assert reader.wait()[0] == 0
        with pytest.raises(CheckpointError, match="is truncated: it ends within tensor b"):
            reader.wait()
