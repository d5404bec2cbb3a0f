"""Between and behind the two products of a fused MoE: the gate, and the weighted sum of a token's experts.

Legend: T tokens, k choices a token, S = T · k pairs, I inner size, H hidden size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.formats.fp8 import E4M3
from requant.kernels.triton.quantize_fp8 import casts_in_hardware, e4m3_bits, scale_of

# ``Format.activation`` → columns that share a scale; 0: the whole row.
_GROUP = {"fp8_per_token": 0, "fp8_1x128": 128}


@triton.jit
def _silu_mul(y_ptr, row, cols, inner, TYPE: tl.constexpr):
    """silu(gate) · up of some columns in float32, rounded to the model's dtype as if it were stored."""
    source = y_ptr + row * (2 * inner) + cols
    gate = tl.load(source, mask=cols < inner, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=cols < inner, other=0.0).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(TYPE).to(tl.float32)


@triton.jit
def _silu_kernel(y_ptr, out_ptr, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = _silu_mul(y_ptr, row, cols, inner, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * inner + cols, value.to(out_ptr.dtype.element_ty), mask=cols < inner)


@triton.jit
def _silu_quantize_kernel(
    y_ptr,
    q_ptr,
    scale_ptr,
    inner,
    groups,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
):
    """One row, BLOCK / GROUP scales of GROUP columns."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // GROUP)
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = _silu_mul(y_ptr, row, cols, inner, y_ptr.dtype.element_ty)
    scale = scale_of(tl.max(tl.abs(value), 1))
    codes = e4m3_bits(tl.div_rn(value, scale[:, None]), HARDWARE_CAST)
    tl.store(q_ptr + row * inner + cols, codes, mask=cols < inner)
    tl.store(scale_ptr + row * groups + group, scale, mask=group < groups)


def silu_mul(y: Tensor) -> Tensor:
    """silu(gate) · up of y [S, 2I] (gate first), computed in float32 → [S, I] in y's dtype."""
    rows, inner = y.shape[0], y.shape[1] // 2
    out = torch.empty(rows, inner, dtype=y.dtype, device=y.device)
    block = min(triton.next_power_of_2(inner), 2048)
    _silu_kernel[(rows, triton.cdiv(inner, block))](y, out, inner, BLOCK=block, num_warps=4)
    return out


def silu_mul_quantize(y: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """:func:`silu_mul`, quantized: codes e4m3 [S, I] and scales float32 [S, 1] or [S, ceil(I / 128)].

    Args:
        y: [S, 2I].
        kind: ``Format.activation``.
    """
    rows, inner = y.shape[0], y.shape[1] // 2
    block = max(triton.next_power_of_2(inner), 128)
    group = _GROUP[kind] or block
    groups = triton.cdiv(inner, group)
    q = torch.empty(rows, inner, dtype=E4M3, device=y.device)
    scale = torch.empty(rows, groups, dtype=torch.float32, device=y.device)
    _silu_quantize_kernel[(rows,)](
        y,
        q.view(torch.uint8),
        scale,
        inner,
        groups,
        BLOCK=block,
        GROUP=group,
        HARDWARE_CAST=casts_in_hardware(y.device),
        num_warps=min(max(block // 512, 1), 16),
    )
    return q, scale


@triton.jit
def _combine_kernel(y_ptr, weight_ptr, out_ptr, hidden, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        y = tl.load(y_ptr + (token * K + choice) * hidden + cols, mask=cols < hidden, other=0.0)
        acc += y.to(tl.float32) * tl.load(weight_ptr + token * K + choice)
    tl.store(out_ptr + token * hidden + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < hidden)


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """Σ_j weights[t, j] · y[t · k + j], in this order in float32: y [S, H], weights float32 [T, k] → [T, H]."""
    tokens, choices = weights.shape
    hidden = y.shape[1]
    out = torch.empty(tokens, hidden, dtype=y.dtype, device=y.device)
    block = min(triton.next_power_of_2(hidden), 1024)
    grid = (tokens, triton.cdiv(hidden, block))
    _combine_kernel[grid](y, weights.contiguous(), out, hidden, K=choices, BLOCK=block, num_warps=4)
    return out
