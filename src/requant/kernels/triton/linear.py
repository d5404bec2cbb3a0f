"""The linear layers of a GPU: what the kernel table names for each format.

Legend: M tokens, N output features, K input features. Few tokens go to our own kernels, which read weights at
close to the memory's speed; many go to the library's products, which are faster there than ours.
"""

from collections.abc import Callable
from functools import partial
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from requant.formats.base import QuantizedTensor
from requant.kernels.table import RowMax
from requant.kernels.triton.activation import quantize_groups, quantizer
from requant.kernels.triton.linear_fp8 import w8a8
from requant.kernels.triton.linear_mxfp4 import matmul, matmul_by_rows

Forward = Callable[[Tensor], Tensor]

# Up to this many tokens a plain kernel of our own is 1.3 to 2 times as fast as the library's on an H200.
_FP8_OWN_TOKENS = 64
# Above this the weight is dequantized once and multiplied by the library, not anew for every tile of tokens.
_MXFP4_OWN_TOKENS = 128
_BLOCK = 128


def linear_ptpc(weight: QuantizedTensor, dtype: torch.dtype, row_max: RowMax | None = None) -> Forward:
    """The forward of a ``ptpc_fp8`` weight: dynamic per-token FP8 activations, float32 accumulation.

    Args:
        weight: e4m3 [N, K] and float32 [N, 1].
        dtype: The model's dtype.
        row_max: See the kernel table.

    Returns:
        x [M, K] → y [M, N], both in ``dtype``; can be captured in a CUDA graph.
    """
    w, scale = weight.data, weight.scale
    n, k = weight.shape
    capability = capability_of(w.device)
    fp8_units = capability >= (8, 9)
    multiply = partial(w8a8, w_NK=w, w_scale=scale, dtype=dtype, fp8_dot=fp8_units and dtype != torch.float32)
    # The library's row-wise product writes BF16 only and wants 16-byte rows.
    library = fp8_units and w.is_cuda and dtype == torch.bfloat16 and n % 16 == 0 and k % 16 == 0

    quantize = quantizer("fp8_per_token", row_max)

    def forward(x: Tensor) -> Tensor:
        x_q, x_scale = quantize(x)
        if library and x.shape[0] > _FP8_OWN_TOKENS:
            return torch._scaled_mm(x_q, w.t(), scale_a=x_scale, scale_b=scale.t(), out_dtype=dtype)
        return multiply(x_q, x_scale)

    return forward


def linear_per_block(weight: QuantizedTensor, dtype: torch.dtype, row_max: RowMax | None = None) -> Forward:
    """The forward of a ``per_block_fp8`` weight: dynamic 1×128 FP8 activations, float32 accumulation.

    Args:
        weight: e4m3 [N, K] and float32 [rows, ceil(K / 128)]; every part begins a new row of scales.
        dtype: The model's dtype.
        row_max: See the kernel table.

    Returns:
        x [M, K] → y [M, N], both in ``dtype``; can be captured in a CUDA graph.
    """
    w, scale = weight.data, weight.scale
    n, k = weight.shape
    parts = weight.parts or (n,)
    capability = capability_of(w.device)
    fp8_units = capability >= (8, 9)
    multiply = partial(
        w8a8,
        w_NK=w,
        w_scale=scale,
        dtype=dtype,
        fp8_dot=fp8_units and dtype != torch.float32,
        scale_rows=scale_rows(parts, weight.skipped).to(w.device),
    )
    regular = k % _BLOCK == 0 and all(rows % _BLOCK == 0 for rows in parts) and not any(weight.skipped)
    quantize = quantizer("fp8_1x128", row_max)
    if row_max is not None or not (regular and capability == (9, 0) and dtype == torch.bfloat16):
        return lambda x: multiply(*quantize(x))
    library = _library_per_block(w, scale)

    def forward(x: Tensor) -> Tensor:
        if x.shape[0] > _FP8_OWN_TOKENS:
            return library(x.contiguous())
        return multiply(*quantize(x))

    return forward


def linear_mxfp4(weight: QuantizedTensor, dtype: torch.dtype, row_max: RowMax | None = None) -> Forward:
    """The forward of an ``mxfp4`` weight: activations in the model's dtype, weights dequantized on the way.

    Args:
        weight: uint8 [N, 16·ceil(K / 32)] and E8M0 uint8 [N, ceil(K / 32)].
        dtype: The model's dtype.
        row_max: Not needed: activations are not quantized.

    Returns:
        x [M, K] → y [M, N], both in ``dtype``; can be captured in a CUDA graph.
    """
    few = partial(matmul, w=weight.data, scale=weight.scale, n=weight.shape[0])
    many = partial(matmul_by_rows, w=weight.data, scale=weight.scale, n=weight.shape[0])

    def forward(x: Tensor) -> Tensor:
        return (many if x.shape[0] > _MXFP4_OWN_TOKENS else few)(x.contiguous())

    return forward


def scale_rows(parts: tuple[int, ...], skipped: tuple[int, ...] = ()) -> Tensor:
    """For each of the N features, the row of a per-block weight's scales that it belongs to, int32 [N].

    ``scale_rows((192, 64))`` is 128 × 0, 64 × 1, 64 × 2: a part begins a new row of scales. With ``skipped`` a part's
    first block has so many features less: ``scale_rows((192,), (96,))`` is 32 × 0, 128 × 1, 32 × 2.
    """
    rows, first = [], 0
    for part, skip in zip(parts, skipped or (0,) * len(parts), strict=True):
        rows.append(first + torch.arange(skip, skip + part, dtype=torch.int32) // _BLOCK)
        first += ceil((skip + part) / _BLOCK)
    return torch.cat(rows)


def _library_per_block(w: Tensor, scale: Tensor) -> Forward:
    """cuBLASLt's block-scaled product, in its layout: scales along K contiguous and a multiple of 4, M likewise.

    See the cuBLAS manual, "Scaling factors layouts", for 128-element 1D and 128×128 2D block scaling.
    """
    blocks = scale.shape[1]
    padded = torch.zeros(scale.shape[0], ceil(blocks / 4) * 4, dtype=scale.dtype, device=scale.device)
    padded[:, :blocks] = scale

    def forward(x: Tensor) -> Tensor:
        m = x.shape[0]
        x_q, x_scale = quantize_groups(x, padded_rows=ceil(m / 4) * 4)
        y = F.scaled_mm(
            x_q,
            w.t(),
            x_scale,
            ScalingType.BlockWise1x128,
            padded.t(),
            ScalingType.BlockWise128x128,
            output_dtype=x.dtype,
        )
        return y[:m]

    return forward


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability; a CPU, which only Triton's interpreter brings here, multiplies anything."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 9)
