"""The weight formats: one descriptor each, with the plain-torch reference that defines its numbers.

:data:`FORMATS` maps a canonical name to its :class:`Format`; a new format is one more file and one more entry.
"""

from torch import Tensor

from requant.errors import RecipeError
from requant.formats import mxfp4, per_block_fp8, ptpc_fp8
from requant.formats.base import Format, QuantizedTensor
from requant.formats.check import check_finite, check_matrix, count_nonfinite

__all__ = [
    "ALIASES",
    "FORMATS",
    "Format",
    "QuantizedTensor",
    "check_finite",
    "check_matrix",
    "count_nonfinite",
    "get",
    "quantize",
]

FORMATS: dict[str, Format] = {module.FORMAT.name: module.FORMAT for module in (ptpc_fp8, per_block_fp8, mxfp4)}
ALIASES: dict[str, str] = {"per_block128_fp8": "per_block_fp8"}


def get(name: str) -> Format:
    """The format called ``name``; case and surrounding blanks do not matter, and aliases are accepted.

    Raises:
        RecipeError: No format has that name; the message lists those that exist.
    """
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key not in FORMATS:
        raise RecipeError(f"unknown format {name!r}; accepted are {', '.join([*FORMATS, *ALIASES])}")
    return FORMATS[key]


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
