"""The inner loop that prefill and decode share: softmax(q · Kᵀ) · V over pages, one pass, running maximum.

The online softmax is that of "FlashAttention-2" (Dao, 2023), in base 2.

A head may come in two parts: main features, and R more that only keys and queries have. In latent attention the main
part of a key is the value as well, and is loaded once.

Legend: rows are (query, head) pairs that share one key/value head; D main features, R further ones of keys.
"""

import triton
import triton.language as tl


@triton.jit
def attend(
    q,
    q_rest,
    q_pos,
    first,
    stop,
    k_ptr,
    v_ptr,
    table_ptr,
    page_stride,
    slot_stride,
    scale_log2,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Attend to positions ``first`` to ``stop`` of one sequence, as far as each row may see them.

    Args:
        q: [ROWS, BLOCK_D], zero past D.
        q_rest: [ROWS, BLOCK_R], zero past R; not looked at if R is 0.
        q_pos: int32 [ROWS], the position of each row's query.
        first: First position.
        stop: One past the last; nothing at or past it is read.
        k_ptr: The key cache at this key/value head.
        v_ptr: The value cache likewise.
        table_ptr: The sequence's page numbers.
        page_stride: Elements from page to page.
        slot_stride: Elements from slot to slot.
        scale_log2: Factor on the scores, times log2(e).
        ROWS: Number of rows.
        D: Main features of a key, and those of a value.
        BLOCK_D: D rounded up to a power of two.
        R: Features of a key behind them.
        BLOCK_R: R rounded up to a power of two.
        BLOCK_N: Positions of one step.
        PAGE: Slots of a page.
        WINDOW: A query sees this many positions, its own included; 0: all before it.
        LATENT: A key's main features are its value.

    Returns:
        Per row the sum of exp2(score − maximum) · v [ROWS, BLOCK_D], the maximum and the sum of the exponentials
        [ROWS], all float32; a row that sees nothing has zeros and a maximum of −inf.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for start in range(first, stop, BLOCK_N):
        pos = start + offs_n
        inside = pos < stop
        page = tl.load(table_ptr + pos // PAGE, mask=inside, other=0).to(tl.int64)
        offsets = (page * page_stride + (pos % PAGE) * slot_stride)[:, None] + offs_d[None, :]
        mask = inside[:, None] & (offs_d[None, :] < D)
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if R > 0:
            offs_r = tl.arange(0, BLOCK_R)
            rest = (page * page_stride + (pos % PAGE) * slot_stride)[:, None] + D + offs_r[None, :]
            k_rest = tl.load(k_ptr + rest, mask=inside[:, None] & (offs_r[None, :] < R), other=0.0)
            score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
        score = score * scale_log2
        seen = inside[None, :] & (pos[None, :] <= q_pos[:, None])
        if WINDOW > 0:
            seen = seen & (pos[None, :] > q_pos[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        # A row that has seen nothing yet: subtracting −inf from −inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(score - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(p, 1)
        v = k if LATENT else tl.load(v_ptr + offsets, mask=mask, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total
