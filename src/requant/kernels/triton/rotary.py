"""Between a layer's projection and its attention, in one launch: norms of heads, rotation, and the cache.

Legend: T tokens, Hq and Hk query and key/value heads, D head size, R rotated features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _heads_kernel(
    qkv_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    token_stride,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
):
    """One head of one token: a query goes to ``q``, a key or a value into its slot."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    source = qkv_ptr + token * token_stride + head * D
    kind: tl.constexpr = q_ptr.dtype.element_ty
    is_query = head < Q_HEADS
    is_value = head >= Q_HEADS + KV_HEADS
    slot = tl.load(slots_ptr + token)
    if (slot < 0) & (head >= Q_HEADS):
        return
    page, at = slot // PAGE, slot % PAGE
    if is_value:
        target = v_cache_ptr + page * v_page_stride + at * v_slot_stride
        target += (head - Q_HEADS - KV_HEADS) * v_head_stride
        tl.store(target + cols, tl.load(source + cols, mask=mask), mask=mask)
        return

    # A feature and its partner: of the first half the one HALF behind, of the second the one HALF before.
    partner = tl.where(cols < HALF, cols + HALF, cols - HALF)
    turned = cols < 2 * HALF
    partner = tl.where(turned, partner, cols)
    x = tl.load(source + cols, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + partner, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        weight_ptr = k_weight_ptr
        if is_query:
            weight_ptr = q_weight_ptr
        x_weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
        y_weight = tl.load(weight_ptr + partner, mask=mask, other=0.0)
        mean = tl.sum(tl.where(mask, x * x, 0.0), 0) / D
        scale = tl.rsqrt(mean + eps)
        x = ((x * scale).to(kind).to(tl.float32) * x_weight.to(tl.float32)).to(kind).to(tl.float32)
        y = ((y * scale).to(kind).to(tl.float32) * y_weight.to(tl.float32)).to(kind).to(tl.float32)
    angle = tl.where(cols < HALF, cols, cols - HALF)
    angles = token * HALF + tl.where(turned, angle, 0)
    cos = tl.load(cos_ptr + angles, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angles, mask=turned, other=0.0).to(tl.float32)
    # Each product is rounded as torch rounds it.
    first = (x * cos).to(kind).to(tl.float32)
    second = (y * sin).to(kind).to(tl.float32)
    out = tl.where(cols < HALF, first - second, first + second)
    out = tl.where(turned, out, x).to(kind)
    if is_query:
        tl.store(q_ptr + (token * Q_HEADS + head) * D + cols, out, mask=mask)
    else:
        target = k_cache_ptr + page * k_page_stride + at * k_slot_stride + (head - Q_HEADS) * k_head_stride
        tl.store(target + cols, out, mask=mask)


def heads(
    qkv: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rope: tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """See :func:`requant.kernels.rotary_reference.heads`; tokens with slot -1 are written nowhere."""
    tokens, every, size = qkv.shape
    if qkv.stride(2) != 1 or qkv.stride(1) != size:
        qkv = qkv.contiguous()
    cos, sin = (table.contiguous() for table in rope)
    q = torch.empty(tokens, num_heads, size, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = norms or (qkv, qkv)
    _heads_kernel[(tokens, every)](
        qkv,
        q,
        k_cache,
        v_cache,
        slots,
        cos,
        sin,
        q_weight,
        k_weight,
        qkv.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        eps,
        Q_HEADS=num_heads,
        KV_HEADS=(every - num_heads) // 2,
        D=size,
        HALF=cos.shape[-1],
        BLOCK=triton.next_power_of_2(size),
        PAGE=k_cache.shape[1],
        NORM=norms is not None,
        num_warps=1,
    )
    return q
