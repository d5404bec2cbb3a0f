"""Files → slabs: threads that read extents of checkpoint files into a bounded pool of host memory."""

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from requant.errors import CheckpointError, ConfigError
from requant.loading.headers import TensorInfo
from requant.loading.slabs import SlabPool


@dataclass(frozen=True)
class Extent:
    """Some bytes of one tensor: consecutive ones, or runs of the same length at the same distance.

    Attributes:
        tensor: The tensor; of several behind each other, the first one.
        begin: Offset of the first byte within the tensor.
        run: Bytes of a run.
        runs: How many runs.
        stride: From the beginning of a run to that of the next one.
    """

    tensor: TensorInfo
    begin: int
    run: int
    runs: int = 1
    stride: int = 0

    @property
    def position(self) -> int:
        """Offset of the first byte within the file."""
        return self.tensor.start + self.begin

    @property
    def what(self) -> str:
        """What is read, for messages."""
        more = self.runs == 1 and self.begin + self.run > self.tensor.nbytes
        return f"tensor {self.tensor.name}{' or those behind it' if more else ''}"

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.run * self.runs


class Reader:
    """Reads extents in their order, with several threads; used as a context manager.

    Leaving the context stops and joins every thread and closes every file, however it is left. Left before every
    extent was taken, it closes the pool, too: a thread may be waiting for a slab.

    Args:
        extents: What to read; none larger than a slab.
        pool: Where to. Whoever takes a slab from :meth:`poll` or :meth:`wait` gives it back to the pool.
        threads: How many threads.
    """

    def __init__(self, extents: Sequence[Extent], pool: SlabPool, threads: int) -> None:
        self._extents = extents
        self._pool = pool
        self._threads = [
            threading.Thread(target=self._work, name=f"requant-reader-{i}", daemon=True)
            for i in range(min(threads, len(extents)))
        ]
        self._cursor = 0
        self._taken = 0
        self._files: dict[Path, int] = {}
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._done: deque[tuple[int, Tensor] | Exception] = deque()
        self._arrived = threading.Condition()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._taken < len(self._extents):
            self._pool.close()
        for thread in self._threads:
            thread.join()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def poll(self) -> tuple[int, Tensor] | None:
        """An extent that has been read, as (its index, the slab); None if there is none right now.

        Raises:
            CheckpointError: A file could not be read; the message names file and tensor.
            ConfigError: There is no memory for a slab.
        """
        with self._arrived:
            arrived = self._done.popleft() if self._done else None
        if isinstance(arrived, Exception):
            raise arrived
        self._taken += arrived is not None
        return arrived

    def wait(self) -> tuple[int, Tensor]:
        """The next extent that has been read; one must still be outstanding, and a slab free to read it into.

        Raises:
            CheckpointError, ConfigError: See :meth:`poll`.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._done)
        arrived = self.poll()
        assert arrived is not None, "there is one consumer"
        return arrived

    def _work(self) -> None:
        while (index := self._next()) is not None:
            try:
                slab = self._slab(self._extents[index])
                self._read(self._extents[index], slab)
            except Exception as error:  # handed to the consumer, which raises it
                self._put(error)
                return
            self._put((index, slab))

    def _next(self) -> int | None:
        """The next extent, and a slab that is reserved for it.

        One thread at a time: slabs are given out in the order of the extents, so that a consumer who wants some of
        them in order may hold those that come too early, and the one it waits for still has its slab.
        """
        with self._turn:
            if self._cursor == len(self._extents) or not self._pool.reserve():
                return None
            self._cursor += 1
            return self._cursor - 1

    def _slab(self, extent: Extent) -> Tensor:
        try:
            return self._pool.take()
        except (RuntimeError, MemoryError) as error:  # torch has no narrower one for the host's memory
            raise ConfigError(
                f"the host's memory ran out before {extent.what} of {extent.tensor.file}: "
                f"there is none for a slab of {self._pool.slab_bytes} bytes"
            ) from error

    def _put(self, item: tuple[int, Tensor] | Exception) -> None:
        with self._arrived:
            self._done.append(item)
            self._arrived.notify()

    def _read(self, extent: Extent, slab: Tensor) -> None:
        info, memory = extent.tensor, slab.numpy().data
        try:
            descriptor = self._open(info.file)
            for run in range(extent.runs):
                target = memory[run * extent.run : (run + 1) * extent.run]
                position = extent.position + run * extent.stride
                while target:
                    count = os.preadv(descriptor, [target], position)
                    if count == 0:
                        raise CheckpointError(f"{info.file} is truncated: it ends within {extent.what}")
                    target, position = target[count:], position + count
        except OSError as error:
            raise CheckpointError(f"cannot read {extent.what} of {info.file}: {error.strerror or error}") from error

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY)
            return self._files[file]
