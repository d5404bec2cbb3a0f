"""The check that every quantize kernel makes before it writes into a caller's buffers."""

from torch import Tensor

from requant.formats.base import Format


def check_buffers(format: Format, weight: Tensor, data: Tensor, scale: Tensor) -> None:
    """Refuse buffers that a kernel would read or write out of bounds, before it does.

    Raises:
        ValueError: A defect of the caller: a shape, dtype, device or layout other than the format's.
    """
    n, k = weight.shape
    expected = {
        "weight": (weight, (n, k), weight.dtype),
        "data": (data, format.data_shape(n, k), format.data_dtype),
        "scale": (scale, format.scale_shape(n, k), format.scale_dtype),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != weight.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; {format.name} of a weight "
                f"[{n}, {k}] on {weight.device} needs {dtype} {list(shape)} there"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)} has strides {tensor.stride()}; it must be contiguous")
