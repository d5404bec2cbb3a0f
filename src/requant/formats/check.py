"""What a weight must be before it is quantized."""

import torch
from torch import Tensor

from requant.errors import CheckpointError, ConfigError
from requant.formats.rows import row_runs

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_matrix(weight: Tensor, name: str = "weight") -> None:
    """Refuse anything but a matrix of a source dtype.

    Raises:
        ConfigError: ``weight`` is not 2-D, or not bfloat16, float16 or float32.
    """
    if weight.ndim != 2:
        raise ConfigError(f"{name} has shape {list(weight.shape)}; a matrix [N, K] is needed")
    if weight.dtype not in SOURCE_DTYPES:
        accepted = ", ".join(str(dtype) for dtype in SOURCE_DTYPES)
        raise ConfigError(f"{name} is {weight.dtype}; accepted are {accepted}")


def count_nonfinite(weight: Tensor) -> Tensor:
    """How many values of a matrix [N, K] are NaN or infinite: int64 [], on its device, without waiting for it."""
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for start, stop in row_runs(*weight.shape):
        rows = weight[start:stop]
        total += rows.numel() - rows.isfinite().sum()
    return total


def count_nan_codes(codes: Tensor) -> Tensor:
    """How many of the codes of each of some matrices [M, …] are NaN: int64 [M], on their device.

    Of those of our formats only e4m3 has one (two).
    """
    if codes.dtype != torch.float8_e4m3fn:
        return torch.zeros(len(codes), dtype=torch.int64, device=codes.device)
    return ((codes.view(torch.uint8) & 0x7F) == 0x7F).flatten(1).sum(1)


def check_finite(weight: Tensor, name: str = "weight") -> None:
    """Refuse a matrix with NaN or infinite values: they would spoil every value that shares their scale.

    Raises:
        CheckpointError: Names ``name`` and the count.
    """
    bad = int(count_nonfinite(weight))
    if bad:
        raise CheckpointError(
            f"{name}: {bad} of {weight.numel()} values are NaN or Inf; only finite weights are accepted"
        )
