"""The end of a weight's way: from bytes on the device into its slice of a final parameter."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from requant.errors import CheckpointError
from requant.formats import count_nan_codes, count_nonfinite
from requant.formats.mxfp4 import e8m0_to_float32
from requant.kernels.table import lookup
from requant.loading.plan import Plan, Step
from requant.loading.sources import SOURCE_DTYPES

_E8M0_NAN = 255


@dataclass(frozen=True)
class _Target:
    """Where a step's rows go: views of the parameter and of its scales, and the scales they come with."""

    step: Step
    data: Tensor
    scale: Tensor | None
    source_scale: Tensor | None


class Targets:
    """The parameters that a plan's steps fill, and a count of the values that are not finite.

    Args:
        plan: The plan.
        model: Its model, built.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._device = plan.device
        self._scale_steps = plan.scales
        self._scales = _scale_targets(plan, modules)
        self._targets = [_target(step, modules[step.module], self._scales) for step in plan.steps]
        # One counter a step, on the device: they are read once, at the end, instead of waiting for each tensor.
        self._bad = torch.zeros(len(plan.steps), dtype=torch.int64, device=plan.device)
        self._bad_scales = torch.zeros(len(plan.scales), dtype=torch.int64, device=plan.device)

    def fill_scale(self, index: int, source: Tensor) -> None:
        """Put the scales of one step of ``plan.scales``, bytes on the device, where they belong."""
        target = self._scales[index]
        dtype = self._scale_steps[index].part.tensor.dtype
        if target.dtype == torch.uint8:
            target.copy_(source.view(target.shape))
            self._bad_scales[index] += (source == _E8M0_NAN).sum()
            return
        values = e8m0_to_float32(source) if dtype == "F8_E8M0" else source.view(SOURCE_DTYPES[dtype])
        target.copy_(values.view(target.shape))
        self._bad_scales[index] += count_nonfinite(target)

    def fill(self, index: int, start: int, stop: int, source: Tensor) -> None:
        """Put a piece of one tensor into its parameter: cast, quantized, as it is, or dequantized first.

        Args:
            index: Of the step.
            start: First row of the step's (first element, if it is neither source nor parameter that is quantized).
            stop: The row (element) behind its last.
            source: Its bytes, uint8 on the device.
        """
        target = self._targets[index]
        source_format, format = target.step.source, target.step.format
        if source_format is None and format is None:
            written = target.data.view(-1)[start:stop]
            # Checked after the cast, which overflows where the model's dtype has less range than the checkpoint's.
            written.copy_(source.view(SOURCE_DTYPES[target.step.tensor.dtype]))
            self._count(index, written)
        elif source_format is None:
            weight = source.view(SOURCE_DTYPES[target.step.tensor.dtype]).view(stop - start, -1)
            self._count(index, weight)
            self._quantize(target, start, stop, weight)
        elif source_format == format:
            codes = target.data[start:stop]
            codes.copy_(source.view(codes.dtype).view(codes.shape))
            self._bad[index] += count_nan_codes(codes)
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
            (target.step.tensor, prod(target.step.placement.shape), _checked_as(target), count)
            for target, count in zip(self._targets, self._bad.tolist(), strict=True)
            if count
        ]
        if not bad:
            return
        info, values, shown, count = bad[0]
        more = f"; so are values of {len(bad) - 1} more tensors" if len(bad) > 1 else ""
        raise CheckpointError(
            f"tensor {info.name} of {info.file}: {count} of {values} values are NaN or Inf (as {shown}){more}"
        )

    def _quantize(self, target: _Target, start: int, stop: int, weight: Tensor) -> None:
        format = target.step.format
        assert format is not None
        run = lookup("quantize", format.name, self._device.type)
        run(format, weight, target.data[start:stop], _scale_rows(target, start, stop))

    def _convert(self, index: int, start: int, stop: int, source: Tensor) -> None:
        """Dequantize, and quantize anew unless the parameter is unquantized."""
        target = self._targets[index]
        source_format, format = target.step.source, target.step.format
        assert source_format is not None
        assert target.source_scale is not None
        k = target.step.placement.shape[1]
        codes = source.view(source_format.data_dtype).view(stop - start, -1)
        group = source_format.group[0]
        first = start // group
        scale = target.source_scale[first : first + source_format.scale_shape(stop - start, k)[0]]
        if format is None:
            written = target.data[start:stop]
            written.copy_(source_format.dequantize(codes, scale, (stop - start, k)).to(torch.bfloat16))
            self._count(index, written)  # after the cast, as above
            return
        run = lookup("requantize", format.name, self._device.type)
        bad = self._bad[index : index + 1]
        run(format, codes, scale, target.data[start:stop], _scale_rows(target, start, stop), bad)

    def _count(self, index: int, values: Tensor) -> None:
        if values.device.type == "cpu" and torch.stack(values.aminmax()).isfinite().all():
            return  # minimum and maximum tell it in one pass, twenty times faster than asking each value
        self._bad[index] += count_nonfinite(values.view(1, -1))


def _scale_rows(target: _Target, start: int, stop: int) -> Tensor:
    """The rows of the parameter's scales that belong to these rows of the step."""
    format = target.step.format
    assert format is not None
    assert target.scale is not None
    first = start // format.group[0]
    return target.scale[first : first + format.scale_shape(stop - start, target.step.placement.shape[1])[0]]


def _target(step: Step, module: nn.Module, scales: list[Tensor]) -> _Target:
    placement = step.placement
    parameter = module.get_parameter(placement.parameter).data
    source_scale = scales[step.scale] if step.scale is not None else None
    if step.format is None:
        rows = parameter.view(-1, *placement.shape[1:])
        return _Target(step, rows[placement.offset : placement.offset + placement.shape[0]], None, source_scale)
    n, k = placement.shape
    rows = parameter.view(-1, parameter.shape[-1])[placement.offset : placement.offset + n]
    scale = module.get_parameter(f"{placement.parameter}_scale").data
    first = step.scale_offset
    scale = scale.view(-1, scale.shape[-1])[first : first + step.format.scale_shape(n, k)[0]]
    return _Target(step, rows, scale, source_scale)


def _scale_targets(plan: Plan, modules: dict[str, nn.Module]) -> list[Tensor]:
    """For each scale step the tensor it fills: rows of a parameter, or a piece of memory that loading drops."""
    sizes = [0 if step.parameter else prod(step.part.shape) for step in plan.scales]
    pieces = torch.empty(sum(sizes), dtype=torch.float32, device=plan.device).split(sizes) if sizes else ()
    targets = []
    for step, piece in zip(plan.scales, pieces, strict=True):
        rows, columns = step.part.shape
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
