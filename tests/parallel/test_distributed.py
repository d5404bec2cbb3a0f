"""The collectives of real processes, over gloo."""

import multiprocessing

import pytest
import torch
from requant_ranks import collectives, collectives_in_a_graph

from requant.engine.seat import listen


@pytest.mark.parametrize("size", [2, 3])
def test_the_collectives(size: int) -> None:
    context = multiprocessing.get_context("spawn")
    listener = listen(None)
    port = listener.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(
            target=collectives, args=(r, size, port, listener if r == 0 else None, pipes[r][1]), daemon=True
        )
        for r in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for rank, (receiver, _) in enumerate(pipes):
            assert receiver.poll(60), "a rank does not answer"
            number, count, calls, summed, largest, gathered, empty = receiver.recv()
            assert (number, count, calls) == (rank, size, 4)
            assert summed == (torch.arange(6.0).view(2, 3) * sum(range(1, size + 1))).tolist()
            assert largest == [size - 1.0, 0.0]
            assert gathered == torch.cat([torch.full((2, r + 1), float(r)) for r in range(size)], 1).tolist()
            assert empty == (0, len(gathered[0]))
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    assert [process.exitcode for process in processes] == [0] * size


def test_a_port_that_is_taken() -> None:
    with listen(None) as first, pytest.raises(OSError, match="in use"):
        listen(first.getsockname()[1])


@pytest.mark.gpu
def test_nccl_in_a_cuda_graph() -> None:
    context = multiprocessing.get_context("spawn")
    listener = listen(None)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=collectives_in_a_graph, args=(listener.getsockname()[1], listener, sender), daemon=True
    )
    process.start()
    try:
        assert receiver.poll(120), "the rank does not answer"
        assert receiver.recv() == [14.0, 8.0, 21.0, 35.0]
    finally:
        process.join(30)
        process.kill()
    assert process.exitcode == 0
