"""The end of a weight's way: from bytes on the device into its slice of a final parameter."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from requant.errors import CheckpointError
from requant.formats import count_nonfinite
from requant.kernels.table import lookup
from requant.loading.plan import SOURCE_DTYPES, Plan, Step


@dataclass(frozen=True)
class _Target:
    step: Step
    parameter: Tensor
    scale: Tensor | None


class Targets:
    """The parameters that a plan's steps fill, and a count of the values that are not finite.

    Args:
        plan: The plan.
        model: Its model, built.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._device = plan.device
        self._targets = [_target(step, modules[step.module]) for step in plan.steps]
        # One counter a step, on the device: they are read once, at the end, instead of waiting for each tensor.
        self._nonfinite = torch.zeros(len(plan.steps), dtype=torch.int64, device=plan.device)

    def fill(self, index: int, start: int, stop: int, source: Tensor) -> None:
        """Quantize or cast a piece of one tensor into its parameter.

        Args:
            index: Of the step.
            start: First row of the tensor (first element, if it is not quantized) that ``source`` holds.
            stop: The row (element) behind its last.
            source: Its bytes, uint8 on the device.
        """
        target = self._targets[index]
        step, format = target.step, target.step.format
        values = source.view(SOURCE_DTYPES[step.tensor.dtype])
        offset = step.placement.offset
        if format is None or target.scale is None:
            # Checked after the cast, which overflows where the model's dtype has less range than the checkpoint's.
            rows = (
                target.parameter[offset : offset + step.placement.shape[0]]
                if step.placement.shape
                else target.parameter
            )
            written = rows.view(-1)[start:stop]
            written.copy_(values)
            self._count(index, written)
            return
        weight = values.view(stop - start, step.placement.shape[1])
        self._count(index, weight)
        group = format.group[0]
        scale_start = step.scale_offset + (start // group if group else 0)
        scale_stop = scale_start + format.scale_shape(*weight.shape)[0]
        quantize = lookup("quantize", format.name, self._device.type)
        quantize(format, weight, target.parameter[offset + start : offset + stop], target.scale[scale_start:scale_stop])

    def check_finite(self) -> None:
        """Refuse weights with a NaN or an Inf, once everything is in place.

        Raises:
            CheckpointError: Names the first such tensor, with the count, and how many others there are.
        """
        bad = [(target, count) for target, count in zip(self._targets, self._nonfinite.tolist(), strict=True) if count]
        if not bad:
            return
        target, count = bad[0]
        info = target.step.tensor
        dtype = SOURCE_DTYPES[info.dtype] if target.step.format else target.parameter.dtype
        shown = str(dtype).removeprefix("torch.")
        more = f"; so are values of {len(bad) - 1} more tensors" if len(bad) > 1 else ""
        raise CheckpointError(
            f"tensor {info.name} of {info.file}: {count} of {info.numel} values are NaN or Inf (as {shown}){more}"
        )

    def _count(self, index: int, values: Tensor) -> None:
        if values.device.type == "cpu" and torch.stack(values.aminmax()).isfinite().all():
            return  # minimum and maximum tell it in one pass, twenty times faster than asking each value
        self._nonfinite[index] += count_nonfinite(values.view(1, -1))


def _target(step: Step, module: nn.Module) -> _Target:
    parameter = module.get_parameter(step.placement.parameter).data
    return _Target(step, parameter, module.get_parameter("weight_scale").data if step.format else None)
