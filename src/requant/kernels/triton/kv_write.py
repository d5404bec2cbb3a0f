"""Writing a step's keys and values into the paged cache, in one launch.

Legend: T tokens, Hk key/value heads, D head size.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kv_write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_stride,
    v_stride,
    page_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    offs = tl.arange(0, BLOCK)
    mask = offs < WIDTH
    to = (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride + offs
    tl.store(k_cache_ptr + to, tl.load(k_ptr + token * k_stride + offs, mask=mask), mask=mask)
    tl.store(v_cache_ptr + to, tl.load(v_ptr + token * v_stride + offs, mask=mask), mask=mask)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Put each token's key and value into its slot; tokens with slot -1 are written nowhere.

    Args:
        k: [T, Hk, D]; heads of one token are contiguous, else it is copied first.
        v: Likewise.
        k_cache: [pages, block_size, Hk, D], heads of one slot contiguous.
        v_cache: Likewise, with the same strides.
        slots: int64 [T], page · block_size + offset, or -1.
    """
    tokens, heads, d = k.shape
    k, v = (x if x.stride(2) == 1 and x.stride(1) == d else x.contiguous() for x in (k, v))
    width = heads * d
    _kv_write_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        PAGE=k_cache.shape[1],
        num_warps=4,
    )
