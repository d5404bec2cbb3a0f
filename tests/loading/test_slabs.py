import threading

import pytest
import torch

from requant.loading.slabs import SlabPool, Staging

STAGING = Staging(slab_bytes=100, slabs=4, threads=2)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def makers():
    return [thread for thread in threading.enumerate() if thread.name == "requant-slabs"]


@pytest.fixture
def ahead(monkeypatch):
    """A GPU's pool, on any machine: how many slabs it has made, and a gate before each."""
    made, gate = [], threading.Event()

    def make(pool):
        gate.wait(10)
        made.append(torch.empty(pool.slab_bytes, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(SlabPool, "_make", make)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    gate.set()
    return made, gate


def wait_until_made(pool):
    pool._ahead.join(10)
    assert not pool._ahead.is_alive()


def test_for_a_cpu_nothing_is_made_ahead():
    with SlabPool(STAGING, CPU):
        assert not makers()


def test_all_are_made_ahead_and_used(ahead):
    made, _ = ahead
    with SlabPool(STAGING, CUDA) as pool:
        wait_until_made(pool)
        assert len(made) == 4
        taken = [pool.take() for _ in range(4) if pool.reserve()]
        assert {slab.data_ptr() for slab in taken} == {slab.data_ptr() for slab in made}
    assert len(made) == 4
    assert not makers()


def test_no_more_than_there_is_to_read(ahead):
    made, gate = ahead
    gate.clear()
    with SlabPool(STAGING, CUDA) as pool:
        pool.expect(101)
        gate.set()
        wait_until_made(pool)
        assert len(made) == 2


def test_whoever_needs_one_earlier_makes_it(ahead):
    """Never more than the pool's, whether a thread or a taker makes them."""
    made, _ = ahead
    for _ in range(50):
        made.clear()
        with SlabPool(STAGING, CUDA) as pool:
            taken = [pool.take() for _ in range(4) if pool.reserve()]
            wait_until_made(pool)
        assert len(made) == len(taken) == 4


def test_leaving_ends_the_thread(ahead):
    made, gate = ahead
    gate.clear()
    with SlabPool(Staging(100, 10_000, 2), CUDA):
        gate.set()
    assert not makers()
    assert len(made) < 10_000


def test_memory_that_runs_out_is_told_to_whoever_takes(ahead, monkeypatch):
    def out_of_memory(pool):
        raise RuntimeError("cannot pin")

    monkeypatch.setattr(SlabPool, "_make", out_of_memory)
    with SlabPool(STAGING, CUDA) as pool:
        wait_until_made(pool)
        assert pool.reserve()
        with pytest.raises(RuntimeError, match="cannot pin"):
            pool.take()


def test_every_taker_is_told_when_memory_runs_out(monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def out_of_memory(pool):
        begun.set()
        go.wait(10)
        raise RuntimeError("none left")

    monkeypatch.setattr(SlabPool, "_make", out_of_memory)
    pool, told = SlabPool(Staging(100, 1, 2), CPU), []

    def take():
        with pytest.raises(RuntimeError, match="none left"):
            pool.take()
        told.append(True)

    takers = [threading.Thread(target=take, daemon=True) for _ in range(2)]
    takers[0].start()
    begun.wait(10)
    takers[1].start()  # the pool's only slab is being made
    go.set()
    for taker in takers:
        taker.join(10)
    assert len(told) == 2
