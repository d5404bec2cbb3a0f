"""What the quantized layers have in common: codes that survive a change of device or dtype, and a forward made late."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from requant.formats import Format


class QuantizedModule(nn.Module):
    """A module with weights in a format.

    Its forward is asked of the kernel table at the first call, and again after the weights moved: the layout that a
    kernel wants belongs to a device.

    Args:
        format: The format of its weights.

    Attributes:
        format: The format.
    """

    def __init__(self, format: Format) -> None:
        super().__init__()
        self.format = format
        self._stored: list[str] = []
        self._made: tuple[torch.dtype, Any] | None = None
        self._is_hf_initialized = True  # else transformers fills it with random numbers

    def set_weight(self, name: str, data: Tensor, scale: Tensor) -> None:
        """Take a loaded weight: codes and scales, of the shapes that :meth:`add_weight` gave them."""
        for suffix, value in (("", data), ("_scale", scale)):
            parameter = nn.Parameter(value, requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            setattr(self, name + suffix, parameter)
        self._made = None

    def add_weight(self, name: str, data_shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> None:
        """Declare a weight: its parameters are on no device before it is loaded."""
        for suffix, shape, dtype in (
            ("", data_shape, self.format.data_dtype),
            ("_scale", scale_shape, self.format.scale_dtype),
        ):
            self._stored.append(name + suffix)
            self.register_parameter(
                name + suffix, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
            )

    def made(self, dtype: torch.dtype, make: Callable[[torch.dtype], Any]) -> Any:
        """What ``make`` gives for inputs of ``dtype``, kept until the weights move."""
        if self._made is None or self._made[0] != dtype:
            self._made = dtype, make(dtype)
        return self._made[1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedModule":
        """Move: ``.to()`` with a dtype casts biases, never codes or scales."""
        stored = {id(self._parameters[name]) for name in self._stored}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if id(tensor) not in stored or moved.dtype == tensor.dtype else tensor.to(moved.device)

        self._made = None
        super()._apply(move, recurse)
        return self
