"""The weight formats: one descriptor each, with the plain-torch reference that defines its numbers.

:data:`FORMATS` maps a canonical name to its :class:`Format`; a new format is one more file and one more entry.
"""

from torch import Tensor

from requant.formats import mxfp4, per_block_fp8, ptpc_fp8
from requant.formats.base import Format, QuantizedStack, QuantizedTensor
from requant.formats.check import check_finite, check_matrix, count_nan_codes, count_nonfinite
from requant.recipe import canonical_format

__all__ = [
    "CONTRACT_VERSION",
    "FORMATS",
    "Format",
    "QuantizedStack",
    "QuantizedTensor",
    "check_finite",
    "check_matrix",
    "count_nan_codes",
    "count_nonfinite",
    "get",
    "quantize",
]

CONTRACT_VERSION = 1
"""Of the numbers that the formats produce: raised with any change of a code or a scale, or of how they are stored."""

FORMATS: dict[str, Format] = {module.FORMAT.name: module.FORMAT for module in (ptpc_fp8, per_block_fp8, mxfp4)}


def get(name: str) -> Format:
    """The format called ``name``, in any spelling that a recipe accepts.

    Raises:
        RecipeError: No format has that name; the message lists those that exist.
    """
    return FORMATS[canonical_format(name)]


def quantize(weight: Tensor, format_name: str) -> QuantizedTensor:
    """Quantize one matrix with the reference of a format, on the device it is on.

    ``quantize(torch.randn(512, 576), "mxfp4")`` gives ``data`` uint8 [512, 288] and ``scale`` uint8 [512, 18].

    Args:
        weight: [N, K], bfloat16, float16 or float32.
        format_name: A name that :func:`get` accepts.

    Raises:
        RecipeError: The format does not exist.
        ConfigError: ``weight`` is not 2-D, or has another dtype.
        CheckpointError: ``weight`` holds NaN or Inf.
    """
    format = get(format_name)
    check_matrix(weight)
    check_finite(weight)
    data, scale = format.quantize(weight)
    return QuantizedTensor(data, scale, format, (weight.shape[0], weight.shape[1]))
