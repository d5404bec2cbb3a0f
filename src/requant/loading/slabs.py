"""Host memory that files are read into: a bounded number of slabs, pinned where a GPU copies from them."""

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from requant.host import cores

_MIB = 1024**2


@dataclass(frozen=True)
class Staging:
    """How much host memory the stream reads into.

    Attributes:
        slab_bytes: Size of one slab; larger only where a row or a block of a format, which is never cut, is.
        slabs: Most slabs at a time.
        threads: Reader threads.
    """

    slab_bytes: int
    slabs: int
    threads: int

    @classmethod
    def of(cls, device: torch.device, ranks: int = 1) -> "Staging":
        """The default for one of ``ranks`` ranks of a host: two slabs a thread, 16 MiB in all for the CPU.

        For a GPU up to 14 threads, which move 33 GB/s from the page cache (16 cores, one H200; 8 move 25 GB/s), and
        with them 1.75 GiB: as many as the cores leave room for. The CPU reads from the page cache and quantizes on
        the same cores, so more would only miss its own caches.
        """
        if device.type != "cuda":
            return cls(4 * _MIB, 4, 2)
        threads = max(2, min(14, cores() // ranks - 2))
        return cls(64 * _MIB, 2 * threads, threads)


class SlabPool:
    """At most ``count`` pieces of host memory of ``slab_bytes`` each, made when first needed.

    As a context manager, for a GPU, a thread makes them ahead: the system takes its time to pin memory, and there are
    headers to read and a plan to make meanwhile. Leaving the context ends that, and closes the pool.

    Args:
        staging: How many slabs, and how large.
        device: Where they are copied to.
        slab_bytes: Another size, where a chunk is larger, or all are smaller.

    Attributes:
        staging: As given.
        slab_bytes: Size of a slab.
        high_water: Most bytes that were ever in use at once, for tests of the memory bound.
    """

    def __init__(self, staging: Staging, device: torch.device, slab_bytes: int | None = None) -> None:
        self.staging = staging
        self.slab_bytes = slab_bytes or staging.slab_bytes
        self.high_water = 0
        self._device = device
        self._count = self._wanted = staging.slabs
        self._made = 0
        self._in_use = 0
        self._free: list[Tensor] = []
        self._closed = False
        self._changed = threading.Condition()
        self._ahead: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            self._ahead = threading.Thread(target=self._make_ahead, name="requant-slabs", daemon=True)
            self._ahead.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    def expect(self, nbytes: int) -> None:
        """Tell how much there is to read, once that is known: no more than that is made ahead."""
        with self._changed:
            self._wanted = min(self._wanted, -(-nbytes // self.slab_bytes))

    def reserve(self) -> bool:
        """Wait until a slab is free and keep it for the caller, who then takes it; False once the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._in_use < self._count)
            if self._closed:
                return False
            self._in_use += 1
            self.high_water = max(self.high_water, self._in_use * self.slab_bytes)
            return True

    def take(self) -> Tensor:
        """The slab that was reserved, uint8 [slab_bytes].

        Raises:
            RuntimeError, MemoryError: The host has no memory for it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._made < self._count)
            if self._free:
                return self._free.pop()
            self._made += 1
        return self._make_counted()

    def release(self, slab: Tensor) -> None:
        """Give a slab back."""
        with self._changed:
            self._free.append(slab)
            self._in_use -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Wake whoever waits for a slab: there will be none."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def discard(self) -> None:
        """Close the pool and forget its slabs."""
        self.close()
        if self._ahead is not None:
            self._ahead.join()
        self._free.clear()

    def _make_ahead(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                if self._closed or self._made >= self._wanted:
                    return
                self._made += 1
            try:
                slab = self._make_counted()
            except (RuntimeError, MemoryError):  # whoever needs it will meet this, too, and can say where
                return
            with self._changed:
                self._free.append(slab)
                self._changed.notify_all()

    def _make_counted(self) -> Tensor:
        """One that has been counted already; if it cannot be made, whoever waits for one has a try."""
        try:
            return self._make()
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify_all()
            raise

    def _make(self) -> Tensor:
        return torch.empty(self.slab_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
