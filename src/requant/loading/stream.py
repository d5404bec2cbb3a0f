"""Executing a plan: bytes stream from the files through a few slabs into the model's final parameters."""

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from requant.errors import ConfigError, RequantError
from requant.host import without_collections
from requant.loading.chunks import Chunk, Piece, scale_chunks, weight_chunks
from requant.loading.headers import TensorInfo
from requant.loading.lanes import Lane, make_lane
from requant.loading.plan import Plan
from requant.loading.progress import Progress
from requant.loading.protocols import PlainModule, QuantizableModule
from requant.loading.reader import Reader
from requant.loading.slabs import SlabPool, Staging
from requant.loading.targets import Targets

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadResult:
    """What loading cost.

    Attributes:
        elapsed_seconds: Time spent quantizing, the layout step of quantized layers included.
        load_seconds: Time of everything, from building the parameters to the last layout step.
        peak_device_memory: Most bytes in use on the device; on the CPU the process's largest resident set.
        bytes_read: Bytes read from the checkpoint, by this rank.
        staged_bytes: Most bytes of host memory that were staged at once.
        bytes_sent: Bytes that this rank gave to the others.
    """

    elapsed_seconds: float
    load_seconds: float
    peak_device_memory: int
    bytes_read: int
    staged_bytes: int
    bytes_sent: int = 0


def load(
    plan: Plan,
    model: nn.Module,
    *,
    progress: Progress | None = None,
    staging: Staging | None = None,
    pool: SlabPool | None = None,
) -> LoadResult:
    """Build the model's parameters, fill them as the plan says and lay them out; the model is then ready to run.

    Beside the finished weights, no more is ever held than the slabs and, on the device, one chunk with the
    temporaries of quantizing it.

    Args:
        plan: From :func:`~requant.loading.planner.make_plan` for this very model.
        model: The model; its modules own no parameter yet.
        progress: Entered, and told of every chunk that is in place.
        staging: Default: :meth:`Staging.of` the plan's device and ranks.
        pool: Slabs that are being made ahead, with a staging of their own; discarded in the end.

    Raises:
        CheckpointError: A file cannot be read or is truncated, or a tensor holds a NaN or an Inf.
        ConfigError: Memory ran out.
        Exception: Whatever else stops it, the model has no parameter then, and no memory is held for it.
    """
    try:
        with torch.no_grad(), without_collections():
            return _load(plan, model, progress, staging, pool)
    except BaseException as error:
        _forget(model, error)
        raise


def _load(
    plan: Plan, model: nn.Module, progress: Progress | None, staging: Staging | None, pool: SlabPool | None
) -> LoadResult:
    begin = time.perf_counter()
    staging = pool.staging if pool else staging or Staging.of(plan.device, plan.ranks.size)
    for warning in plan.warnings if plan.ranks.rank == 0 else ():
        logger.warning("%s", warning)
    with _memory_runs_out(plan, "while the model's parameters were made"):
        _build(plan, model)
        targets = Targets(plan, model)
    phases = scale_chunks(plan, staging.slab_bytes), weight_chunks(plan, staging.slab_bytes)
    largest = max((chunk.extent.nbytes for chunks in phases for chunk in chunks), default=0)
    if pool and pool.slab_bytes < largest:
        pool.discard()
        pool = None
    pool = pool or SlabPool(staging, plan.device, largest)
    lane = make_lane(plan.device, pool.release)
    try:
        with progress or nullcontext():
            for chunks, place in zip(phases, (targets.fill_scales, targets.fill), strict=True):
                with Reader([chunk.extent for chunk in chunks], pool, staging.threads) as reader:
                    _fill(plan, chunks, place, reader, lane, progress)
    finally:
        elapsed = lane.finish()
        pool.discard()
    targets.check_finite()
    elapsed += _finish(plan, model)
    return LoadResult(
        elapsed_seconds=elapsed,
        load_seconds=time.perf_counter() - begin,
        peak_device_memory=lane.peak_memory(),
        bytes_read=plan.bytes_to_read,
        staged_bytes=pool.high_water,
        bytes_sent=targets.bytes_sent,
    )


def _forget(model: nn.Module, error: BaseException) -> None:
    """Free what a load took: also what the error's frames hold, and it is with whoever catches it for a while."""
    for module in model.modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            delattr(module, name)
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


@contextmanager
def _memory_runs_out(plan: Plan, where: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the memory of {plan.device} ran out {where}") from error


def _build(plan: Plan, model: nn.Module) -> None:
    formats = {layer.name: layer.format for layer in plan.layers}
    for module in model.modules():
        if isinstance(module, QuantizableModule):
            module.build(formats[module.names.module], plan.dtype, plan.device)
        elif isinstance(module, PlainModule):
            module.build(plan.dtype, plan.device)


def _fill(
    plan: Plan,
    chunks: Sequence[Chunk],
    place: Callable[[Sequence[Piece], Tensor], None],
    reader: Reader,
    lane: Lane,
    progress: Progress | None,
) -> None:
    """Let ``place`` take every chunk as it arrives: its pieces, and its bytes on the device."""
    info: TensorInfo | None = None
    try:
        for chunk, slab in _arrivals(chunks, reader, lane):
            info = chunk.extent.tensor
            with lane.chunk(slab, chunk.extent.nbytes, timed=chunk.timed) as source:
                place(chunk.pieces, source)
            del source  # its memory on the device takes the next chunk
            if progress:
                progress.advance(chunk.extent.nbytes, _what(plan, chunk))
    except RequantError:
        raise
    except BaseException as error:
        where = f"at tensor {info.name} of {info.file}" if info else "before the first tensor"
        if isinstance(error, torch.OutOfMemoryError):
            raise ConfigError(f"the memory of {plan.device} ran out while loading, {where}") from error
        error.add_note(f"loading stopped {where}")
        raise


def _what(plan: Plan, chunk: Chunk) -> str:
    """The first tensor of a chunk, and what it becomes."""
    name = chunk.extent.tensor.name
    if not chunk.timed:
        return name
    format = plan.steps[chunk.pieces[0].index].format
    return f"{name} → {format.name}" if format else name


def _arrivals(chunks: Sequence[Chunk], reader: Reader, lane: Lane) -> Iterator[tuple[Chunk, Tensor]]:
    """Chunks with their slabs, in whatever order they arrive, but the ordered ones among them in theirs.

    One that comes too early keeps its slab meanwhile; the one that it waits for has a slab, too, or is placed already:
    the reader gives them out in order.
    """
    ordered = deque(index for index, chunk in enumerate(chunks) if chunk.ordered)
    early: dict[int, Tensor] = {}
    for _ in chunks:
        if ordered and ordered[0] in early:
            index = ordered.popleft()
            yield chunks[index], early.pop(index)
            continue
        index, slab = _next_slab(reader, lane)
        while chunks[index].ordered and index != ordered[0]:
            early[index] = slab
            index, slab = _next_slab(reader, lane)
        if chunks[index].ordered:
            ordered.popleft()
        yield chunks[index], slab


def _next_slab(reader: Reader, lane: Lane) -> tuple[int, Tensor]:
    arrived = reader.poll()
    while arrived is None and lane.reclaim():
        arrived = reader.poll()
    return arrived or reader.wait()


def _finish(plan: Plan, model: nn.Module) -> float:
    """The layout step of every layer; the seconds that the quantized ones took."""
    quantized = {layer.name for layer in plan.quantized}
    seconds = 0.0
    for module in model.modules():
        if isinstance(module, QuantizableModule):
            start = time.perf_counter()
            with _memory_runs_out(plan, f"in the layout step of {module.names.module}"):
                module.finish()
            if module.names.module in quantized:
                seconds += time.perf_counter() - start
    if plan.device.type == "cuda":
        start = time.perf_counter()
        torch.cuda.synchronize(plan.device)
        seconds += time.perf_counter() - start
    return seconds
