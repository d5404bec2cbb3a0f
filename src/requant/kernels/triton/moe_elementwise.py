"""Between and behind the two products of a fused MoE: the gate, and the weighted sum of a token's experts.

Legend: T tokens, k choices a token, S = T · k pairs, I inner size, H hidden size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.formats.fp8 import E4M3
from requant.kernels import gated_reference
from requant.kernels.triton.e4m3 import casts_in_hardware, e4m3_bits, scale_of

# ``Format.activation`` → columns that share a scale; 0: the whole row.
_GROUP = {"fp8_per_token": 0, "fp8_1x128": 128}


@triton.jit
def _silu_mul(y_ptr, row, cols, inner, TYPE: tl.constexpr):
    """silu(gate) · up of some columns in float32, rounded to the model's dtype as if it were stored; 0 beside them."""
    source = y_ptr + row * (2 * inner) + cols
    inside = (cols >= 0) & (cols < inner)
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=inside, other=0.0).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(TYPE).to(tl.float32)


@triton.jit
def _silu_kernel(y_ptr, out_ptr, inner, lead, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = _silu_mul(y_ptr, row, cols - lead, inner, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + cols, value.to(out_ptr.dtype.element_ty), mask=cols < width)


@triton.jit
def _silu_quantize_kernel(
    y_ptr,
    q_ptr,
    scale_ptr,
    inner,
    lead,
    width,
    groups,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """One row, BLOCK / GROUP scales of GROUP columns."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // GROUP)
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = _silu_mul(y_ptr, row, cols - lead, inner, y_ptr.dtype.element_ty)
    scale = scale_of(tl.max(tl.abs(value), 1))
    codes = e4m3_bits(tl.div_rn(value, scale[:, None]), HARDWARE)
    tl.store(q_ptr + row * width + cols, codes, mask=cols < width)
    tl.store(scale_ptr + row * groups + group, scale, mask=group < groups)


def silu_mul(y: Tensor, lead: int = 0, width: int | None = None) -> Tensor:
    """silu(gate) · up of y [S, 2I] (gate first), computed in float32.

    Args:
        y: [S, 2I].
        lead: Columns of zeros before it.
        width: Columns of the result, of which those behind it are zero too; None: ``lead`` + I.

    Returns:
        [S, width] in y's dtype.
    """
    rows, inner = y.shape[0], y.shape[1] // 2
    width = lead + inner if width is None else width
    out = torch.empty(rows, width, dtype=y.dtype, device=y.device)
    block = min(triton.next_power_of_2(width), 2048)
    _silu_kernel[(rows, triton.cdiv(width, block))](y, out, inner, lead, width, BLOCK=block, num_warps=4)
    return out


def silu_mul_quantize(y: Tensor, kind: str, lead: int = 0, width: int | None = None) -> tuple[Tensor, Tensor]:
    """:func:`silu_mul`, quantized: codes e4m3 [S, width] and scales float32 [S, 1] or [S, ceil(width / 128)].

    Args:
        y: [S, 2I].
        kind: ``Format.activation``; its groups of columns are counted from the first of the result.
        lead: See :func:`silu_mul`.
        width: See :func:`silu_mul`.
    """
    rows, inner = y.shape[0], y.shape[1] // 2
    width = lead + inner if width is None else width
    block = max(triton.next_power_of_2(width), 128)
    group = _GROUP[kind] or block
    groups = triton.cdiv(width, group)
    q = torch.empty(rows, width, dtype=E4M3, device=y.device)
    scale = torch.empty(rows, groups, dtype=torch.float32, device=y.device)
    _silu_quantize_kernel[(rows,)](
        y,
        q.view(torch.uint8),
        scale,
        inner,
        lead,
        width,
        groups,
        BLOCK=block,
        GROUP=group,
        HARDWARE=casts_in_hardware(y.device),
        num_warps=min(max(block // 512, 1), 16),
    )
    return q, scale


def gated(y: Tensor, activation: str) -> Tensor:
    """See :func:`requant.kernels.gated_reference.gated`; for silu in one launch, and rounded once."""
    if activation not in ("silu", "swish"):
        return gated_reference.gated(y, activation)
    return silu_mul(y.contiguous())


@triton.jit(do_not_specialize=["first", "count"])
def _combine_kernel(
    y_ptr, weight_ptr, ids_ptr, out_ptr, hidden, first, count, K: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        pair = token * K + choice
        inside = cols < hidden
        if SOME:
            expert = tl.load(ids_ptr + pair) - first
            inside = cols < tl.where((expert >= 0) & (expert < count), hidden, 0)
        y = tl.load(y_ptr + pair * hidden + cols, mask=inside, other=0.0)
        part = y.to(tl.float32) * tl.load(weight_ptr + pair)
        acc += tl.where(inside, part, 0.0) if SOME else part
    tl.store(out_ptr + token * hidden + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < hidden)


def combine(y: Tensor, weights: Tensor, experts: Tensor | None = None, here: range = range(0)) -> Tensor:
    """Σ_j weights[t, j] · y[t · k + j], in this order in float32.

    Args:
        y: [S, H].
        weights: float32 [T, k].
        experts: int64 [T, k]: the pairs' experts; None: all of them are here.
        here: Those that are here: rows of y that belong to others are not read, and count as zero.

    Returns:
        [T, H] in y's dtype.
    """
    tokens, choices = weights.shape
    hidden = y.shape[1]
    out = torch.empty(tokens, hidden, dtype=y.dtype, device=y.device)
    block = min(triton.next_power_of_2(hidden), 1024)
    grid = (tokens, triton.cdiv(hidden, block))
    _combine_kernel[grid](
        y,
        weights.contiguous(),
        experts.contiguous() if experts is not None else None,
        out,
        hidden,
        here.start,
        len(here),
        K=choices,
        BLOCK=block,
        SOME=experts is not None,
        num_warps=4,
    )
    return out
