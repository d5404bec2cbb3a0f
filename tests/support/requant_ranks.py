"""Several ranks as threads of one process: the collectives that loading and layers ask for, without any network.

And what a process does that is one of several ranks, for the test of real collectives.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import Tensor

from requant.parallel import Ranks
from requant.parallel.distributed import connected

T = TypeVar("T")


@dataclass
class _Meeting:
    """Where the ranks lay down what they have; ``sent`` are the bytes that rank 0 gave, by collective."""

    size: int
    barrier: threading.Barrier
    given: list[Tensor | None]
    sent: dict[str, int] = field(default_factory=dict)


class ThreadGroup:
    """One rank of a :class:`requant.parallel.Group` whose others are threads."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def all_reduce_sum(self, x: Tensor, /) -> Tensor:
        return x.copy_(self._exchange("sum", x, lambda parts: sum(parts[1:], start=parts[0])))

    def all_reduce_max(self, x: Tensor, /) -> Tensor:
        return x.copy_(self._exchange("max", x, lambda parts: torch.stack(parts).amax(0)))

    def all_gather(self, x: Tensor, sizes: Sequence[int], /) -> Tensor:
        def gather(parts: list[Tensor]) -> Tensor:
            assert [part.shape[1] for part in parts] == list(sizes)
            return torch.cat(parts, dim=1)

        return self._exchange("gather", x, gather)

    def _exchange(self, what: str, x: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        assert x.is_contiguous()
        meeting = self._meeting
        meeting.given[self.rank] = x.clone()
        _wait(x)
        if self.rank == 0:
            meeting.sent[what] = meeting.sent.get(what, 0) + x.nbytes
        meeting.barrier.wait()
        given = [part for part in meeting.given if part is not None]
        assert len({(part.dtype, part.shape[0]) for part in given}) == 1, "the ranks are not at the same place"
        joined = join(given)
        _wait(x)
        meeting.barrier.wait()
        return joined


def _wait(x: Tensor) -> None:
    """Until what this thread has issued is done: each has a stream of its own on a GPU."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()


def run_ranks(
    size: int, run: Callable[[Ranks], T], expert_parallel: bool = False, deterministic: bool = False
) -> tuple[list[T], dict[str, int]]:
    """Call ``run`` for every rank at once.

    Returns:
        What each returned, and the bytes that rank 0 gave to each kind of collective.
    """
    meeting = _Meeting(size, threading.Barrier(size, timeout=60), [None] * size)

    def one(rank: int) -> T:
        try:
            return run(Ranks(ThreadGroup(rank, meeting), expert_parallel, deterministic))
        except BaseException:
            meeting.barrier.abort()  # the others would wait for a rank that is gone
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(one, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures], meeting.sent


def collectives(rank: int, size: int, port: int, listener: Any, result: Connection) -> None:
    """One of several processes: every collective once; what came of them goes to ``result``."""
    calls = []
    with connected(rank, size, port, torch.device("cpu"), listener, lambda: calls.append(rank)) as group:
        x = torch.arange(6.0).view(2, 3) * (rank + 1)
        summed = group.all_reduce_sum(x)
        assert summed is x
        largest = group.all_reduce_max(torch.tensor([float(rank), -float(rank)]))
        # As many columns as the rank's number and one more, each with the rank's number.
        gathered = group.all_gather(torch.full((2, rank + 1), float(rank)), [r + 1 for r in range(size)])
        empty = group.all_gather(torch.zeros(0, rank + 1), [r + 1 for r in range(size)])
        # As numbers: a tensor would be shared by a process that may be gone before it is looked at.
        values = summed.tolist(), largest.tolist(), gathered.tolist(), tuple(empty.shape)
        result.send((group.rank, group.size, len(calls), *values))


def collectives_in_a_graph(port: int, listener: Any, result: Connection) -> None:
    """The only rank of a GPU: every collective of NCCL captured in a CUDA graph, and replayed on new values."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with connected(0, 1, port, device, listener) as group:
        x, y, z = (torch.ones(4, 6, device=device) for _ in range(3))
        wide = torch.ones(4, 6, device=device, dtype=torch.float64)

        def step() -> tuple[Tensor, ...]:
            return (
                group.all_reduce_sum(x * 2),
                group.all_reduce_max(y + 1),
                group.all_gather(z * 3, [6]),
                group.all_reduce_sum(wide * 5),
            )

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = step()
        for tensor in (x, y, z, wide):
            tensor.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        result.send([float(output.unique().item()) for output in outputs])
