"""Writing an entry, from the finished parameters, while the model already runs.

Nothing of the load waits for it. Each rank writes what it has of every matrix to where that lies in the whole one;
what several have is the same in all of them.
"""

import fcntl
import json
import logging
import mmap
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import torch
from torch import Tensor, nn

from requant.host import cores
from requant.loading.cache.entry import DESCRIPTION
from requant.loading.cache.identity import Identity
from requant.loading.cache.layout import EntryFile, Stored, arrange, total_bytes
from requant.loading.cache.store import LOCK, Store, sync_folder
from requant.loading.plan import Conversion, Plan
from requant.loading.units import show_bytes
from requant.loading.views import follows, joined

logger = logging.getLogger(__name__)

_SLAB_BYTES = 32 * 1024**2
# One does not use what a disk can take, and more take cores from the model that runs meanwhile.
_THREADS = 4
_POLL_SECONDS = 0.02
# Left by a rank that could not write what it has.
_FAILED = "failed"


class _Stopped(Exception):
    """Nobody wants the entry any more."""


@dataclass(frozen=True)
class _Run:
    """Bytes of a parameter on their way into a file.

    Attributes:
        source: uint8 [rows, bytes], a view of a parameter; flat where they lie without holes here and there.
        position: Of the first byte, in the file.
        stride: From a row to the next in the file; 0: flat.
    """

    source: Tensor
    position: int
    stride: int = 0


def make_writer(store: Store, identity: Identity, plan: Plan, model: nn.Module, nonce: int) -> "Writer | None":
    """What will write an entry of a loaded model; None if nothing was quantized.

    Args:
        store: Where to.
        identity: What for.
        plan: What the model was loaded by.
        model: It; its quantized parameters no longer change.
        nonce: A number that all ranks of this load have, and no other load; see :func:`new_nonce`.
    """
    if not plan.conversions:
        return None
    return Writer(store, identity, plan, model, nonce)


def new_nonce() -> int:
    """A number for one load: 48 bits."""
    return secrets.randbits(48)


class Writer:
    """Threads that write an entry in the background; see :func:`make_writer`."""

    def __init__(self, store: Store, identity: Identity, plan: Plan, model: nn.Module, nonce: int) -> None:
        self._store, self._identity, self._ranks = store, identity, plan.ranks
        self._device = plan.device
        self._files = arrange(plan.conversions)
        self._modules = dict(model.named_modules())
        self._folder = store.partial(identity, nonce)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="requant-cache", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait(self) -> None:
        """Until it has been written, or could not be."""
        if self._thread.is_alive():
            logger.info("waiting until the quantized weights have been written to %s", self._store.folder)
            self._thread.join()

    def stop(self) -> None:
        """Drop what is not yet complete."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            with self._locked():
                if any(_shares_bytes(conversion) for file in self._files for conversion, *_ in file.matrices):
                    raise ValueError("two ranks share a byte of a row")  # which neither can write alone
                self._write_files()
                if self._ranks.rank:
                    while self._folder.exists() and not self._given_up:
                        time.sleep(_POLL_SECONDS)  # the folder stays locked
                    return
                self._await_others()
                self._describe()
                if self._store.commit(self._folder, self._identity):
                    size = show_bytes(total_bytes(self._files))
                    seconds = time.perf_counter() - begin
                    logger.info("%s of quantized weights cached in %.1f seconds: %s", size, seconds, self._store.folder)
        except _Stopped:
            self._give_up()
        except Exception as error:  # the model runs nevertheless
            self._give_up()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{error}"
            logger.warning("the quantized weights are not cached: %s", reason)
        finally:
            self._modules = {}

    def _give_up(self) -> None:
        """Remove what is there; ranks that come later find the mark that there is nothing to wait for."""
        if self._ranks.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._ranks.size > 1:
            with suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / _FAILED).touch()

    @property
    def _given_up(self) -> bool:
        return self._stop.is_set() or (self._folder / _FAILED).exists()

    def _locked(self) -> "_Lock":
        """The folder, made by whichever rank comes first, and marked as being written."""
        if not self._ranks.rank:
            self._store.remove_leftovers(but=self._folder)  # another rank may have made it already
        self._folder.mkdir(parents=True, exist_ok=True)
        needed, free = total_bytes(self._files), shutil.disk_usage(self._folder).free
        if needed > free:
            raise OSError(0, f"{show_bytes(needed)} needed in {self._store.folder}, {show_bytes(free)} free")
        return _Lock(self._folder / LOCK)

    def _write_files(self) -> None:
        waiting: SimpleQueue[EntryFile] = SimpleQueue()
        for file in self._files:
            waiting.put(file)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                with _Sink(self._device, self._stop) as sink:
                    while not errors:
                        self._write_file(waiting.get_nowait(), sink)
            except Empty:
                pass
            except BaseException as error:  # raised again where all of them are waited for
                errors.append(error)

        count = min(_THREADS, max(cores() // (2 * self._ranks.size), 1), len(self._files))
        threads = [threading.Thread(target=work, name=f"requant-cache-{i}", daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        _mark(self._folder, self._ranks.rank)

    def _write_file(self, file: EntryFile, sink: "_Sink") -> None:
        descriptor = os.open(self._folder / file.name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if self._ranks.size == 1:
                os.ftruncate(descriptor, file.size)
            else:
                # Rows of which every rank has a piece are written through a mapping, which must not meet a full disk.
                os.posix_fallocate(descriptor, 0, file.size)
            _write(descriptor, memoryview(file.header), 0)
            for run in _merged(_runs(file, self._modules)):
                sink.write(descriptor, file.size, run)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _await_others(self) -> None:
        for rank in range(self._ranks.size):
            while not (self._folder / f"rank-{rank}").exists():
                if self._given_up:
                    raise _Stopped
                time.sleep(_POLL_SECONDS)
            (self._folder / f"rank-{rank}").unlink()

    def _describe(self) -> None:
        description = {
            "identity": self._identity.to_dict(),
            "created": int(time.time()),
            "files": {file.name: file.size for file in self._files},
        }
        descriptor = os.open(self._folder / DESCRIPTION, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write(descriptor, memoryview(json.dumps(description, indent=2).encode()), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Lock:
    """A file that is there and locked (shared) while the context lasts."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)


class _Sink:
    """One thread's way from parameters to files: of a GPU through a piece of pinned memory, on a stream of its own."""

    def __init__(self, device: torch.device, stop: threading.Event) -> None:
        self._stop = stop
        self._slab = self._stream = None
        if device.type == "cuda":
            self._slab = torch.empty(_SLAB_BYTES, dtype=torch.uint8, pin_memory=True)
            self._stream = torch.cuda.Stream(device)

    def __enter__(self) -> "_Sink":
        return self

    def __exit__(self, *exception: object) -> None:
        self._slab = None

    def write(self, descriptor: int, size: int, run: _Run) -> None:
        """Write one run to a file of ``size`` bytes."""
        source, width = run.source, run.source.shape[-1] if run.stride else 1
        rows = max(_SLAB_BYTES // max(width, 1), 1)
        for first in range(0, source.shape[0], rows):
            if self._stop.is_set():
                raise _Stopped
            host = self._fetch(source[first : first + rows])
            position = run.position + first * (run.stride or 1)
            if run.stride:
                with mmap.mmap(descriptor, size) as memory:
                    target = np.ndarray(host.shape, np.uint8, memory, position, (run.stride, 1))
                    target[...] = host
                    del target
            else:
                _write(descriptor, memoryview(host.data), position)

    def _fetch(self, source: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        if self._slab is None or self._stream is None:
            return source.numpy()
        if source.numel() > self._slab.numel():
            return source.cpu().numpy()
        host = self._slab[: source.numel()].view(source.shape)
        with torch.cuda.stream(self._stream):
            host.copy_(source, non_blocking=True)
        self._stream.synchronize()
        return host.numpy()


def _write(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count


def _mark(folder: Path, rank: int) -> None:
    """Tell rank 0 that this one has written all that it has."""
    os.close(os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT, 0o644))
    sync_folder(folder)


def _shares_bytes(conversion: Conversion) -> bool:
    per_byte, own = conversion.format.codes_per_byte, conversion.placement.own_columns
    return bool(own.start % per_byte or (own.stop % per_byte and own.stop != conversion.placement.shape[1]))


def _runs(file: EntryFile, modules: dict[str, nn.Module]) -> Iterator[_Run]:
    """What this rank has of a file, in the file's order."""
    for which in (1, 0):
        for conversion, *stored in file.matrices:
            if conversion.placement.own_rows:
                yield (_scale_run if which else _code_run)(conversion, stored[which], modules[conversion.module])


def _code_run(conversion: Conversion, stored: Stored, module: nn.Module) -> _Run:
    placement, shard, format = conversion.placement, conversion.shard, conversion.format
    codes = _bytes(module, placement.parameter)[placement.offset : placement.offset + len(placement.own_rows)]
    per_byte, item = format.codes_per_byte, format.data_dtype.itemsize
    own, whole = placement.own_columns, placement.shape[1]
    first = own.start // per_byte * item
    last = stored.row_bytes if own.stop == whole else own.stop // per_byte * item
    skipped = first - shard.window.start // per_byte * item
    position = stored.start + placement.own_rows.start * stored.row_bytes + first
    return _run(codes[:, skipped : skipped + last - first], position, stored.row_bytes)


def _scale_run(conversion: Conversion, stored: Stored, module: nn.Module) -> _Run:
    shard, item = conversion.shard, conversion.format.scale_dtype.itemsize
    first = conversion.scale_offset
    scales = _bytes(module, f"{conversion.placement.parameter}_scale")[first : first + len(shard.scale_rows)]
    position = stored.start + shard.scale_rows.start * stored.row_bytes + shard.scale_columns.start * item
    return _run(scales, position, stored.row_bytes)


def _bytes(module: nn.Module, parameter: str) -> Tensor:
    values = module.get_parameter(parameter).data
    return values.view(-1, values.shape[-1]).view(torch.uint8)


def _run(source: Tensor, position: int, row_bytes: int) -> _Run:
    if source.shape[1] == row_bytes and source.is_contiguous():
        return _Run(source.reshape(-1), position)
    return _Run(source, position, row_bytes)


def _merged(runs: Iterator[_Run]) -> Iterator[_Run]:
    """Runs that lie behind each other, here and there, as one."""
    waiting: list[_Run] = []
    for run in runs:
        if waiting and not _continues(waiting[-1], run):
            yield _join(waiting)
            waiting = []
        waiting.append(run)
    if waiting:
        yield _join(waiting)


def _continues(before: _Run, run: _Run) -> bool:
    if before.stride or run.stride or before.position + before.source.numel() != run.position:
        return False
    return follows(before.source, run.source)


def _join(runs: Sequence[_Run]) -> _Run:
    return runs[0] if len(runs) == 1 else _Run(joined([run.source for run in runs]), runs[0].position)
