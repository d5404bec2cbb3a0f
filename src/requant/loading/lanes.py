"""Slabs → device: how a slab's bytes reach the device, when the slab is free again, and how long work took.

The host lane works on the slab itself. The CUDA lane copies on a side stream, and the host never waits for the
device unless it has no free slab left.
"""

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class Lane(Protocol):
    """What the stream asks of a device."""

    def chunk(self, slab: Tensor, nbytes: int, timed: bool) -> AbstractContextManager[Tensor]:
        """The first ``nbytes`` of a slab on the device, for work that is issued inside the context.

        The slab is freed once it is no longer read. ``timed`` work counts as quantization.
        """

    def reclaim(self) -> bool:
        """Wait until the oldest slab that the device still reads is free; False if there is none."""

    def finish(self) -> float:
        """Wait for all work; the seconds that the timed work took."""

    def peak_memory(self) -> int:
        """Most bytes of the device's memory in use since the lane was made."""


def make_lane(device: torch.device, free: Callable[[Tensor], None]) -> Lane:
    """The lane of a device; ``free`` is called with each slab that can be filled again.

    Work is ordered behind everything that the device's current stream holds by now.
    """
    return CudaLane(device, free) if device.type == "cuda" else HostLane(free)


class HostLane:
    """The device is the host: nothing to copy or to wait for."""

    def __init__(self, free: Callable[[Tensor], None]) -> None:
        self._free = free
        self._seconds = 0.0

    @contextmanager
    def chunk(self, slab: Tensor, nbytes: int, timed: bool) -> Iterator[Tensor]:
        """See :class:`Lane`."""
        start = time.perf_counter()
        yield slab[:nbytes]
        if timed:
            self._seconds += time.perf_counter() - start
        self._free(slab)

    def reclaim(self) -> bool:
        """See :class:`Lane`."""
        return False

    def finish(self) -> float:
        """See :class:`Lane`."""
        return self._seconds

    def peak_memory(self) -> int:
        """The largest resident set of the process so far, all that it holds included."""
        if sys.platform == "linux":
            # Not from getrusage, which on Linux starts from what the parent process had in use.
            status = Path("/proc/self/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class CudaLane:
    """A side stream of one GPU."""

    def __init__(self, device: torch.device, free: Callable[[Tensor], None]) -> None:
        self._device = device
        self._free = free
        self._main = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(self._main)
        self._read: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._timings: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def chunk(self, slab: Tensor, nbytes: int, timed: bool) -> Iterator[Tensor]:
        """See :class:`Lane`. The copy's memory is the side stream's own, which reuses it in stream order."""
        while self._read and self._read[0][1].query():
            self.reclaim()
        with torch.cuda.stream(self._stream):
            source = slab[:nbytes].to(self._device, non_blocking=True)
            copied = torch.cuda.Event(enable_timing=timed)
            copied.record()
            self._read.append((slab, copied))
            yield source
            if timed:
                done = torch.cuda.Event(enable_timing=True)
                done.record()
                self._timings.append((copied, done))

    def reclaim(self) -> bool:
        """See :class:`Lane`."""
        if not self._read:
            return False
        slab, copied = self._read.popleft()
        copied.synchronize()
        self._free(slab)
        return True

    def finish(self) -> float:
        """See :class:`Lane`. The main stream is ordered behind the side stream as well."""
        self._stream.synchronize()
        self._main.wait_stream(self._stream)
        return sum(start.elapsed_time(end) for start, end in self._timings) / 1000

    def peak_memory(self) -> int:
        """See :class:`Lane`."""
        return torch.cuda.max_memory_allocated(self._device)
