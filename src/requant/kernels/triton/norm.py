"""Root-mean-square norm in one launch, with the addition before it.

Legend: R rows, H features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def normalized(x, weight, mask, size, eps, TYPE: tl.constexpr):
    """``weight`` · x / sqrt(mean(x²) + eps) of float32 [BLOCK], zero outside ``mask``: rounded where torch rounds."""
    mean = tl.sum(tl.where(mask, x * x, 0.0), 0) / size
    unit = (x * tl.rsqrt(mean + eps)).to(TYPE).to(tl.float32)
    return (unit * weight.to(tl.float32)).to(TYPE)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    kind: tl.constexpr = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        other = tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
        total = (x + other).to(kind)
        tl.store(total_ptr + row * size + cols, total, mask=mask)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    tl.store(y_ptr + row * size + cols, normalized(x, weight, mask, size, eps, kind), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See :func:`requant.kernels.norm_reference.rms_norm`; rows may be slices of wider ones."""
    size = x.shape[-1]
    rows = x if x.stride(-1) == 1 and x.dim() == 2 else x.contiguous().view(-1, size)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is None:
        others, total = rows, x
    else:
        others = residual if residual.stride(-1) == 1 and residual.dim() == 2 else residual.contiguous().view(-1, size)
        total = torch.empty_like(y)
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(rows.shape[0],)](
        rows,
        others,
        weight,
        y,
        total if residual is not None else y,
        rows.stride(0),
        others.stride(0),
        size,
        eps,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(max(block // 256, 1), 16),
    )
    return y, total
