"""Dynamic quantization of activations on a GPU, bit for bit :mod:`requant.kernels.activation`.

Legend: M tokens, K input features.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.formats.fp8 import E4M3
from requant.formats.ptpc_fp8 import FORMAT as PTPC_FP8
from requant.kernels.activation import quantize_activation
from requant.kernels.table import RowMax
from requant.kernels.triton.e4m3 import casts_in_hardware, e4m3_bits, scale_of
from requant.kernels.triton.quantize_fp8 import quantize_ptpc

_GROUP = 128
_GROUPS_PER_PROGRAM = 8


def quantizer(kind: str, row_max: RowMax | None = None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What quantizes activations.

    Args:
        kind: ``Format.activation``.
        row_max: Where the activations are a part of a token's features; see the kernel table. The plain reference then,
            which can give the largest magnitudes away before it divides.

    Returns:
        [M, K] of any strides → e4m3 [M, K] and float32 [M, 1] or [M, ceil(K / 128)].
    """
    if row_max is not None:
        return partial(quantize_activation, kind=kind, row_max=row_max)
    quantize = {"fp8_per_token": quantize_tokens, "fp8_1x128": quantize_groups}[kind]
    return lambda x: quantize(x.contiguous())


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each token, activation kind ``fp8_per_token``: the arithmetic and the kernel of a weight's row.

    Args:
        x: bf16, fp16 or fp32 [M, K], contiguous.

    Returns:
        e4m3 [M, K] and float32 [M, 1].
    """
    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    quantize_ptpc(PTPC_FP8, x, q, scale)
    return q, scale


@triton.jit(do_not_specialize=["scale_stride_k"])
def _group_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    K,
    groups,
    scale_stride_m,
    scale_stride_k,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """GROUPS groups of one token."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * K + col, mask=col < K, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), 1))
    codes = e4m3_bits(tl.div_rn(x, scale[:, None]), HARDWARE)
    tl.store(q_ptr + row * K + col, codes, mask=col < K)
    tl.store(scale_ptr + row * scale_stride_m + group * scale_stride_k, scale, mask=group < groups)


def quantize_groups(x: Tensor, padded_rows: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize each run of 128 columns of each token, activation kind ``fp8_1x128``.

    Args:
        x: bf16, fp16 or fp32 [M, K], contiguous.
        padded_rows: Allocate this many rows if they are more than M; those past M are left undefined.

    Returns:
        e4m3 [M, K] and float32 [M, ceil(K / 128)], the latter contiguous along M: the layout that the
        library's product asks for.
    """
    m, k = x.shape
    rows, groups = max(m, padded_rows), triton.cdiv(k, _GROUP)
    q = torch.empty(rows, k, dtype=E4M3, device=x.device)
    scale = torch.empty(groups, rows, dtype=torch.float32, device=x.device).t()
    _group_kernel[(m, triton.cdiv(groups, _GROUPS_PER_PROGRAM))](
        x,
        q.view(torch.uint8),
        scale,
        k,
        groups,
        scale.stride(0),
        scale.stride(1),
        GROUP=_GROUP,
        GROUPS=_GROUPS_PER_PROGRAM,
        HARDWARE=casts_in_hardware(x.device),
        num_warps=2,
    )
    return q, scale
