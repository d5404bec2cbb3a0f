"""The collectives of real processes, over gloo."""

import multiprocessing

import pytest
import torch
from requant_ranks import collectives

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
            assert torch.equal(summed, torch.arange(6.0).view(2, 3) * sum(range(1, size + 1)))
            assert torch.equal(largest, torch.tensor([size - 1.0, 0.0]))
            expected = torch.cat([torch.full((2, r + 1), float(r)) for r in range(size)], 1)
            assert torch.equal(gathered, expected)
            assert empty == (0, expected.shape[1])
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    assert [process.exitcode for process in processes] == [0] * size


def test_a_port_that_is_taken() -> None:
    with listen(None) as first, pytest.raises(OSError, match="in use"):
        listen(first.getsockname()[1])
