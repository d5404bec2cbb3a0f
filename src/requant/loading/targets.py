"""The end of a weight's way: from bytes on the device into its slice of a final parameter."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from requant.errors import CheckpointError
from requant.formats import Format, count_nan_codes, count_nonfinite
from requant.formats.fp8 import quantize_rows, row_maxima
from requant.formats.mxfp4 import e8m0_to_float32
from requant.formats.shard import Shard, touched
from requant.kernels.table import lookup
from requant.loading.chunks import Piece
from requant.loading.plan import Plan, Step
from requant.loading.sources import SOURCE_DTYPES
from requant.loading.views import follows, joined

_E8M0_NAN = 255
# What the kernel table's ``quantize_many`` asks of columns and addresses.
_MANY = 32
_ALIGNMENT = 16


class _Way(Enum):
    """How a step's rows get to their place: as codes that are there already, several of them by one copy; by a kernel
    that quantizes several matrices at once; or by themselves.
    """

    ALONE = auto()
    COPIED = auto()
    QUANTIZED = auto()


@dataclass(frozen=True)
class _Kind:
    """What pieces have in common that one launch can quantize: formats before and after, dtype, rows and columns."""

    format: Format
    source: Format | None
    dtype: torch.dtype
    rows: int
    columns: int


@dataclass(frozen=True)
class _Target:
    """Where a step's rectangle goes: views of the parameter and of its scales, and the scales it comes with."""

    step: Step
    shard: Shard | None
    data: Tensor
    scale: Tensor | None
    source_scale: Tensor | None
    way: _Way


class Targets:
    """The parameters that a plan's steps fill, and a count of the values that are not finite.

    Args:
        plan: The plan.
        model: Its model, built.

    Attributes:
        bytes_sent: Bytes that this rank gave to the others.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._device = plan.device
        self._group = plan.ranks.group
        self.bytes_sent = 0
        self._scale_steps = plan.scales
        self._scales = _scale_targets(plan, modules)
        # Made when first asked for, while the files are being read: there is one for every tensor.
        self._make = lambda step: _target(step, modules[step.module], self._scales, plan.device)
        self._steps = plan.steps
        self._targets: dict[int, _Target] = {}
        # One counter a step, on the device: they are read once, at the end, instead of waiting for each tensor.
        self._bad = torch.zeros(len(plan.steps), dtype=torch.int64, device=plan.device)
        self._counters = self._bad.unbind()
        self._bad_scales = torch.zeros(len(plan.scales), dtype=torch.int64, device=plan.device)

    def fill_scales(self, pieces: Sequence[Piece], source: Tensor) -> None:
        """Put the scales of some steps of ``plan.scales``, bytes on the device, where they belong."""
        views = [self._scales[piece.index] for piece in pieces]
        for start, stop in _runs(pieces, views, [self._scale_kind(piece.index) for piece in pieces]):
            first, last = pieces[start], pieces[stop - 1]
            raw = source[first.offset : last.offset + last.nbytes]
            step = self._scale_steps[first.index]
            dtype, columns = step.part.tensor.dtype, slice(step.columns.start, step.columns.stop)
            one = stop - start == 1
            target = views[start] if one else joined(views[start:stop])
            if target.dtype == torch.uint8:
                values = raw
            else:
                values = e8m0_to_float32(raw) if dtype == "F8_E8M0" else raw.view(SOURCE_DTYPES[dtype])
            target.copy_(values.view(step.part.shape)[:, columns] if one else values)
            each = target.reshape(stop - start, -1)
            bad = (each == _E8M0_NAN) if target.dtype == torch.uint8 else ~each.isfinite()
            self._add(self._bad_scales, pieces[start:stop], bad.sum(1))

    def fill(self, pieces: Sequence[Piece], source: Tensor) -> None:
        """Put pieces of tensors into their parameters: cast, quantized, as they are, or dequantized first.

        Args:
            pieces: What is there.
            source: Their bytes, of the steps' columns: uint8 on the device, which may be overwritten.
        """
        batches: dict[_Kind, list[Piece]] = defaultdict(list)
        copies: list[Piece] = []
        for piece in pieces:
            target = self._target(piece.index)
            if target.way is _Way.ALONE or not _is_own(target, piece):
                self._fill(piece.index, piece.start, piece.stop, source[piece.offset : piece.offset + piece.nbytes])
            elif target.way is _Way.COPIED:
                copies.append(piece)
            else:
                batches[_kind(target, piece)].append(piece)
        for kind, batch in batches.items():
            # All columns of the result are views, which is what Python's time goes to here.
            sources = [source[p.offset : p.offset + p.nbytes].view(kind.dtype).view(kind.rows, -1) for p in batch]
            data = [self._own_rows(self._target(p.index), p.start, p.stop) for p in batch]
            scale = [self._own_scales(self._target(p.index), p.start, p.stop) for p in batch]
            bad = [self._counters[p.index] for p in batch]
            if kind.source is None:
                self._kernel("quantize_many", kind.format)(kind.format, sources, data, scale, bad)
            else:
                scales = [_source_scale(self._target(p.index), p.start, p.stop) for p in batch]
                self._kernel("requantize", kind.format)(kind.format, sources, scales, data, scale, bad)
        self._copy(copies, source)

    def _copy(self, pieces: Sequence[Piece], source: Tensor) -> None:
        """Put codes where they belong, those of many matrices at once where they lie behind each other."""
        views = [self._own_rows(self._target(piece.index), piece.start, piece.stop) for piece in pieces]
        for start, stop in _runs(pieces, views, [""] * len(pieces)):
            first, last = pieces[start], pieces[stop - 1]
            codes = joined(views[start:stop])
            codes.view(torch.uint8).copy_(source[first.offset : last.offset + last.nbytes])
            self._add(self._bad, pieces[start:stop], count_nan_codes(codes.view(stop - start, -1)))

    def _add(self, counters: Tensor, pieces: Sequence[Piece], counts: Tensor) -> None:
        """Add counts to those of the pieces' steps."""
        indices = torch.tensor([piece.index for piece in pieces])
        if self._device.type == "cuda":
            indices = indices.pin_memory().to(self._device, non_blocking=True)
        counters.index_add_(0, indices, counts)

    def _scale_kind(self, index: int) -> str | None:
        """The dtype of some scales in the checkpoint; None: not all of their columns are kept."""
        step = self._scale_steps[index]
        return step.part.tensor.dtype if len(step.columns) == step.part.shape[1] else None

    def _target(self, index: int) -> _Target:
        target = self._targets.get(index)
        if target is None:
            target = self._targets[index] = self._make(self._steps[index])
        return target

    def _fill(self, index: int, start: int, stop: int, source: Tensor) -> None:
        """Put rows ``start`` to ``stop`` of a step's matrix (elements of a vector) into its parameter."""
        target = self._target(index)
        step = target.step
        if step.source is None and step.format is None:
            written = self._own_rows(target, start, stop)
            # Checked after the cast, which overflows where the model's dtype has less range than the checkpoint's.
            written.copy_(_own(step, start, stop, _values(step, source, start, stop)).view(written.shape))
            self._count(index, written)
        elif step.source is None:
            weight = _values(step, source, start, stop)
            self._count(index, weight)
            if step.together:
                self._quantize_together(target, start, stop, weight)
            else:
                self._place(target, start, stop, partial(self._kernel("quantize", step.format), step.format, weight))
        elif not step.converts:
            assert target.shard is not None
            codes = source.view(step.source.data_dtype).view(stop - start, -1)
            written = self._own_rows(target, start, stop)
            written.copy_(target.shard.cut_data(codes, step.columns))
            self._bad[index : index + 1] += count_nan_codes(written[None])
        else:
            self._convert(index, start, stop, source)

    def check_finite(self) -> None:
        """Refuse weights with a NaN or an Inf, once everything is in place.

        Raises:
            CheckpointError: Names the first such tensor, with the count, and how many others there are.
        """
        bad = [
            (step.part.tensor, prod(step.part.shape), "scales", count)
            for step, count in zip(self._scale_steps, self._bad_scales.tolist(), strict=True)
            if count
        ]
        bad += [
            (step.tensor, len(step.rows) * len(step.columns), _checked_as(self._target(index)), count)
            for index, (step, count) in enumerate(zip(self._steps, self._bad.tolist(), strict=True))
            if count
        ]
        if not bad:
            return
        info, values, shown, count = bad[0]
        more = f"; so are values of {len(bad) - 1} more tensors" if len(bad) > 1 else ""
        raise CheckpointError(
            f"tensor {info.name} of {info.file}: {count} of {values} values are NaN or Inf (as {shown}){more}"
        )

    def _kernel(self, op: str, format: Format | None) -> Callable[..., None]:
        assert format is not None
        return lookup(op, format.name, self._device.type)

    def _own_rows(self, target: _Target, start: int, stop: int) -> Tensor:
        """The rows of the parameter that rows ``start`` to ``stop`` of the matrix fill, those of them that it has."""
        own = target.step.placement.own_rows
        return target.data[max(start, own.start) - own.start : min(stop, own.stop) - own.start]

    def _own_scales(self, target: _Target, start: int, stop: int) -> Tensor:
        """The parameter's rows of scales of the blocks that these rows are in."""
        own, shard = target.step.placement.own_rows, target.shard
        assert shard is not None
        assert target.scale is not None
        blocks = touched(range(max(start, own.start), min(stop, own.stop)), shard.format.group[0])
        return target.scale[blocks.start - shard.scale_rows.start : blocks.stop - shard.scale_rows.start]

    def _convert(self, index: int, start: int, stop: int, source: Tensor) -> None:
        """Dequantize, and quantize anew unless the parameter is unquantized."""
        target = self._target(index)
        step = target.step
        assert step.source is not None
        shape = stop - start, len(step.columns)
        codes = source.view(step.source.data_dtype).view(stop - start, -1)
        scale = _source_scale(target, start, stop)
        if step.format is not None and not step.together:
            bad = self._counters[index]
            requantize = partial(self._kernel("requantize", step.format), step.format, [codes], [scale])
            self._place(target, start, stop, lambda data, out: requantize([data], [out], [bad]))
            return
        weight = step.source.dequantize(codes, scale, shape).to(torch.bfloat16)
        if step.together:
            self._count(index, weight)
            self._quantize_together(target, start, stop, weight)
            return
        written = self._own_rows(target, start, stop)
        written.copy_(_own(step, start, stop, weight))
        self._count(index, written)  # after the cast, as above

    def _place(self, target: _Target, start: int, stop: int, write: Callable[[Tensor, Tensor], None]) -> None:
        """Let ``write`` put codes and scales where they belong, or into memory that what belongs here is cut from.

        Args:
            target: The target.
            start: First row of the matrix that is written.
            stop: The row behind its last; between them whole blocks, or what the matrix has of them.
            write: Takes codes and scales of these rows and of the step's columns.
        """
        step, shard = target.step, target.shard
        assert shard is not None
        own, rows = step.placement.own_rows, shard.format.group[0]
        kept = range(max(start, own.start), min(stop, own.stop))
        blocks = touched(kept, rows)
        data, scale = self._own_rows(target, start, stop), self._own_scales(target, start, stop)
        if kept == range(start, stop) and step.columns == shard.columns:
            write(data, scale)
            return
        format, columns = shard.format, len(step.columns)
        codes = data.new_empty(format.data_shape(stop - start, columns))
        scales = scale.new_empty(format.scale_shape(stop - start, columns))
        write(codes, scales)
        data.copy_(shard.cut_data(codes[kept.start - start : kept.stop - start], step.columns))
        first = start // rows
        scale.copy_(shard.cut_scale(scales[blocks.start - first : blocks.stop - first], step.columns))

    def _quantize_together(self, target: _Target, start: int, stop: int, weight: Tensor) -> None:
        """Quantize some columns of rows whose scales are those of the whole rows: the ranks compare magnitudes."""
        assert target.scale is not None
        weight = _own(target.step, start, stop, weight).contiguous()
        amax = row_maxima(weight)
        if self._group.size > 1:
            self.bytes_sent += amax.nbytes
            amax = self._group.all_reduce_max(amax)
        data, scale = quantize_rows(weight, amax)
        own = target.step.placement.own_rows
        self._own_rows(target, start, stop).copy_(data)
        target.scale[max(start, own.start) - own.start : min(stop, own.stop) - own.start] = scale

    def _count(self, index: int, values: Tensor) -> None:
        if values.device.type == "cpu" and torch.stack(values.aminmax()).isfinite().all():
            return  # minimum and maximum tell it in one pass, twenty times faster than asking each value
        self._bad[index] += count_nonfinite(values.view(1, -1))


def _values(step: Step, source: Tensor, start: int, stop: int) -> Tensor:
    """The bytes of some rows of unquantized values, as such: [rows, columns]."""
    return source.view(SOURCE_DTYPES[step.tensor.dtype]).view(stop - start, len(step.columns))


def _own(step: Step, start: int, stop: int, values: Tensor) -> Tensor:
    """What is this rank's of rows ``start`` to ``stop`` and the step's columns: a view."""
    own = step.placement.own_rows
    values = values[max(own.start - start, 0) : min(own.stop, stop) - start]
    if step.placement.columns is None:
        return values
    first = step.placement.columns.start - step.columns.start
    return values[:, first : first + len(step.placement.columns)]


def _target(step: Step, module: nn.Module, scales: list[Tensor], device: torch.device) -> _Target:
    placement, shard = step.placement, step.shard
    parameter = module.get_parameter(placement.parameter).data
    source_scale = scales[step.scale] if step.scale is not None else None
    first, count = placement.offset, len(placement.own_rows)
    if shard is None:
        rows = parameter.view(-1, *placement.own_shape[1:])[first : first + count]
        return _Target(step, None, rows, None, source_scale, _Way.ALONE)
    rows = parameter.view(-1, parameter.shape[-1])[first : first + count]
    if not step.converts:
        copied = step.columns == shard.columns == shard.window
        return _Target(step, shard, rows, None, None, _Way.COPIED if copied else _Way.ALONE)
    scale = module.get_parameter(f"{placement.parameter}_scale").data
    first = step.scale_offset
    scale = scale.view(-1, scale.shape[-1])[first : first + len(shard.scale_rows)]
    simple = (
        device.type == "cuda"  # where launches cost more than the work of one
        and not step.together
        and step.columns == shard.columns
        and (step.source is not None or (len(step.columns) % _MANY == 0 and rows.data_ptr() % _ALIGNMENT == 0))
    )
    return _Target(step, shard, rows, scale, source_scale, _Way.QUANTIZED if simple else _Way.ALONE)


def _is_own(target: _Target, piece: Piece) -> bool:
    """Whether all rows of a piece are this rank's."""
    own = target.step.placement.own_rows
    return piece.start >= own.start and piece.stop <= own.stop


def _kind(target: _Target, piece: Piece) -> _Kind:
    step = target.step
    assert step.format is not None
    dtype = step.source.data_dtype if step.source else SOURCE_DTYPES[step.tensor.dtype]
    return _Kind(step.format, step.source, dtype, piece.stop - piece.start, len(step.columns))


def _source_scale(target: _Target, start: int, stop: int) -> Tensor:
    """The scales that rows ``start`` to ``stop`` of a quantized tensor come with."""
    step = target.step
    assert step.source is not None
    assert target.source_scale is not None
    group = step.source.group[0]
    first = start // group - step.rows.start // group
    return target.source_scale[first : first + step.source.scale_shape(stop - start, len(step.columns))[0]]


def _runs(pieces: Sequence[Piece], views: Sequence[Tensor], kinds: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs of pieces of one size and kind that lie behind each other, as do their ``views``.

    Args:
        pieces: The pieces.
        views: Where each goes.
        kinds: What those of a run have in common; None: it goes by itself.
    """
    start = 0
    for i in range(1, len(pieces)):
        before, piece = pieces[i - 1], pieces[i]
        if (
            piece.nbytes != before.nbytes
            or piece.offset != before.offset + before.nbytes
            or kinds[i] is None
            or kinds[i] != kinds[i - 1]
            or views[i].dtype != views[i - 1].dtype
            or not follows(views[i - 1], views[i])
        ):
            yield start, i
            start = i
    if pieces:
        yield start, len(pieces)


def _scale_targets(plan: Plan, modules: dict[str, nn.Module]) -> list[Tensor]:
    """For each scale step the tensor it fills: rows of a parameter, or a piece of memory that loading drops."""
    sizes = [0 if step.parameter else step.part.shape[0] * len(step.columns) for step in plan.scales]
    pieces = torch.empty(sum(sizes), dtype=torch.float32, device=plan.device).split(sizes) if sizes else ()
    targets = []
    for step, piece in zip(plan.scales, pieces, strict=True):
        rows, columns = step.part.shape[0], len(step.columns)
        if step.parameter:
            scale = modules[step.module].get_parameter(step.parameter).data.view(-1, columns)
            targets.append(scale[step.offset : step.offset + rows])
        else:
            targets.append(piece.view(rows, columns))
    return targets


def _checked_as(target: _Target) -> str:
    """The dtype of the values whose finiteness was checked."""
    step = target.step
    if step.source is not None and step.source == step.format:
        dtype = step.source.data_dtype
    elif step.source is not None:
        # Rounded to bfloat16 first; a parameter that is not quantized may have less range than that.
        dtype = torch.float16 if target.data.dtype == torch.float16 else torch.bfloat16
    else:
        dtype = SOURCE_DTYPES[step.tensor.dtype] if step.format else target.data.dtype
    return str(dtype).removeprefix("torch.")
