"""One matrix of the checkpoint, put into its place: quantized, requantized, copied or dequantized.

Legend: N output features (rows), K input features.
"""

import torch
from torch import Tensor

from requant.formats import Format, count_nan_codes, count_nonfinite
from requant.formats.mxfp4 import e8m0_to_float32
from requant.integrations.transformers.sources import BLOCK
from requant.kernels import lookup

_ALIGNED = 16
_GROUP = 32
_E8M0_NAN = 255


def fill(
    source: Format | None, weight: Tensor, scale: Tensor | None, format: Format | None, data: Tensor, out: Tensor | None
) -> Tensor:
    """Put one matrix where it belongs, with the numbers of requant's contract.

    Args:
        source: The format of ``weight``; None: it is values.
        weight: [N, K] in a float dtype, or the codes of ``source``.
        scale: The scales of ``source``, as the checkpoint has them; None without one.
        format: What is stored; None: values.
        data: Codes of ``format``, or [N, K] in the model's dtype: filled.
        out: Scales of ``format``: filled; None without one.

    Returns:
        How many of the matrix's values or scales are NaN or infinite: int64 [], on its device.
    """
    if source is None and format is None:
        data.copy_(weight)
        return count_nonfinite(data)
    if source is None:
        assert format is not None
        assert out is not None
        return _quantize(format, weight.contiguous(), data, out)
    assert scale is not None
    codes, scales = weight.contiguous().view(source.data_dtype), _scales(source, scale)
    bad = count_nan_codes(codes[None])[0] + _count_bad(scales)
    if format is source:
        assert out is not None
        data.copy_(codes)
        out.copy_(scales)
    elif format is None:
        n, k = data.shape
        values = source.dequantize(codes, scales, (n, k)).to(torch.bfloat16)
        bad += count_nonfinite(values)
        data.copy_(values)
    else:
        # The plan lets nothing but blocks come here: all other quantized sources are passed through.
        assert source is BLOCK
        assert out is not None
        bad = bad.reshape(1)
        lookup("requantize", format.name, data.device.type)(format, [codes], [scales], [data], [out], [bad])
        bad = bad[0]
    return bad


def _quantize(format: Format, weight: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    device = weight.device.type
    bad = torch.zeros((), dtype=torch.int64, device=weight.device)
    aligned = not any(tensor.data_ptr() % _ALIGNED for tensor in (weight, data))
    if aligned and weight.shape[1] % _GROUP == 0:
        lookup("quantize_many", format.name, device)(format, [weight], [data], [scale], [bad])
        return bad
    bad += count_nonfinite(weight)
    if device == "cpu" and bad:
        return bad  # the reference's casts have no meaning for them
    lookup("quantize", format.name, device)(format, weight, data, scale)
    return bad


def _scales(source: Format, scale: Tensor) -> Tensor:
    """A checkpoint's scales in the dtype that the format has them in."""
    if source.scale_dtype == torch.uint8:
        return scale.contiguous().view(torch.uint8)
    if scale.dtype == torch.float8_e8m0fnu:
        return e8m0_to_float32(scale.contiguous().view(torch.uint8))
    return scale.float().contiguous()


def _count_bad(scales: Tensor) -> Tensor:
    return (scales == _E8M0_NAN).sum() if scales.dtype == torch.uint8 else (~scales.isfinite()).sum()
