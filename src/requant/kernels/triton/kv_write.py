"""Writing a step's keys and values into the paged cache, in one launch.

Legend: T tokens, Hk key/value heads, D and Dv sizes of keys and values.
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
    k_page_stride,
    k_slot_stride,
    v_page_stride,
    v_slot_stride,
    k_head_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    page, at = slot // PAGE, slot % PAGE
    offs = tl.arange(0, BLOCK)
    k_out = k_cache_ptr + page * k_page_stride + at * k_slot_stride
    v_out = v_cache_ptr + page * v_page_stride + at * v_slot_stride
    for head in tl.static_range(HEADS):
        k = tl.load(k_ptr + token * k_stride + head * K_WIDTH + offs, mask=offs < K_WIDTH)
        v = tl.load(v_ptr + token * v_stride + head * V_WIDTH + offs, mask=offs < V_WIDTH)
        tl.store(k_out + head * k_head_stride + offs, k, mask=offs < K_WIDTH)
        tl.store(v_out + head * v_head_stride + offs, v, mask=offs < V_WIDTH)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Put each token's key and value into its slot; tokens with slot -1 are written nowhere.

    Args:
        k: [T, Hk, D]; heads of one token are contiguous, else it is copied first.
        v: [T, Hk, Dv] likewise.
        k_cache: [pages, block_size, Hk, D], features of one head contiguous; it may be a slice of a wider tensor.
        v_cache: [pages, block_size, Hk, Dv] likewise.
        slots: int64 [T], page · block_size + offset, or -1.
    """
    k, v = (x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (k, v))
    heads, widths = k.shape[1], (k.shape[2], v.shape[2])
    if all(cache.stride(2) == cache.shape[3] for cache in (k_cache, v_cache)):
        heads, widths = 1, (heads * widths[0], heads * widths[1])  # a slot's heads are one piece of memory
    _kv_write_kernel[(k.shape[0],)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(2),
        HEADS=heads,
        K_WIDTH=widths[0],
        V_WIDTH=widths[1],
        BLOCK=triton.next_power_of_2(max(widths)),
        PAGE=k_cache.shape[1],
        num_warps=4,
    )
