"""The rows of a grouped matrix product: every (token, choice) pair, sorted by expert, in blocks of one expert each.

Nothing waits for the device, and the order never depends on timing: pairs of one expert stay in the order of tokens.

Legend: T tokens, k choices a token, S = T · k pairs (pair s is choice s % k of token s // k), E experts, B blocks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs times experts (a power of two) that one program compares. A program among many keeps to what its registers
# hold on a Hopper GPU; one that is alone may have twice as many and spill a little: it saves two launches.
_COMPARISONS = 8192
_COMPARISONS_ALONE = 16384


class Blocks(NamedTuple):
    """Pairs in blocks of ``rows``, each block of one expert.

    Attributes:
        pairs: int32 [B · rows]: of block b, ``counts[b]`` pairs from b · rows on; the rest is undefined.
        experts: int32 [B]: each block's expert.
        counts: int32 [B]: how many pairs it has; 0 for blocks that nothing is left for.
        rows: Rows of a block.
    """

    pairs: Tensor
    experts: Tensor
    counts: Tensor
    rows: int


def max_blocks(pairs: int, experts: int, rows: int) -> int:
    """The most blocks that ``pairs`` pairs can take.

    c pairs of one expert take 1 + (c − 1) // rows blocks: most are taken when as many experts as can have a pair.
    """
    used = min(pairs, experts)
    return used + (pairs - used) // rows


def chunk_for(pairs: int, padded: int) -> int:
    """Pairs that one program ranks, by comparing each with each and with every expert: all of them if they are few.

    Args:
        pairs: S.
        padded: E as a power of two.
    """
    alone = max(triton.next_power_of_2(pairs), 16)
    if alone <= 128 and alone * padded <= _COMPARISONS_ALONE:
        return alone
    return min(max(_COMPARISONS // padded, 16), 64)


@triton.jit
def _local(ids_ptr, offs, pairs, first, count):
    """The pairs' experts, counted from the first one here; -1 for those that are not here, and past the last pair."""
    ids = tl.load(ids_ptr + offs, mask=offs < pairs, other=-1).to(tl.int32) - first
    return tl.where((offs < pairs) & (ids >= 0) & (ids < count), ids, -1)


@triton.jit(do_not_specialize=["pairs", "chunks", "first", "count"])
def _count_kernel(ids_ptr, counts_ptr, pairs, chunks, first, count, E: tl.constexpr, CHUNK: tl.constexpr):
    """How many pairs of a chunk each expert has."""
    chunk = tl.program_id(0)
    offs = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = _local(ids_ptr, offs, pairs, first, count)
    experts = tl.arange(0, E)
    tl.store(counts_ptr + experts * chunks + chunk, tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), 0))


@triton.jit(do_not_specialize=["pairs", "blocks", "chunks", "first", "count"])
def _place_kernel(
    ids_ptr,
    upto_ptr,
    pairs_ptr,
    block_experts_ptr,
    block_counts_ptr,
    pairs,
    blocks,
    chunks,
    first,
    count,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Put a chunk's pairs where they belong, and describe some of the blocks."""
    chunk = tl.program_id(0)
    offs = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = _local(ids_ptr, offs, pairs, first, count)
    experts = tl.arange(0, E)
    mine = ids[:, None] == experts[None, :]
    own = tl.sum(mine.to(tl.int32), 0)
    if SINGLE:
        total = own
        before = tl.zeros([E], tl.int32)
    else:
        total = tl.load(upto_ptr + experts * chunks + chunks - 1)
        before = tl.load(upto_ptr + experts * chunks + chunk) - own
    block_count = (total + ROWS - 1) // ROWS
    block_end = tl.cumsum(block_count, 0)
    block_start = block_end - block_count

    start = tl.sum(tl.where(mine, (block_start * ROWS + before)[None, :], 0), 1)
    earlier = tl.arange(0, CHUNK)[None, :] < tl.arange(0, CHUNK)[:, None]
    other = _local(ids_ptr, offs, pairs, first, count)
    rank = tl.sum(((ids[:, None] == other[None, :]) & earlier).to(tl.int32), 1)
    tl.store(pairs_ptr + start + rank, offs, mask=ids >= 0)

    # There are at most as many blocks as pairs: each program describes those with its pairs' numbers.
    past = block_end[None, :] <= offs[:, None]
    expert = tl.sum(past.to(tl.int32), 1)
    here = experts[None, :] == expert[:, None]
    left = tl.sum(tl.where(here, (total - (offs[:, None] - block_start[None, :]) * ROWS), 0), 1)
    in_range = offs < blocks
    tl.store(block_experts_ptr + offs, tl.where(expert < E, expert, 0), mask=in_range)
    tl.store(block_counts_ptr + offs, tl.minimum(tl.maximum(left, 0), ROWS), mask=in_range)


def sort_pairs(experts: Tensor, num_experts: int, rows: int, first: int = 0) -> Blocks:
    """Sort pairs into blocks.

    Args:
        experts: int64 [T, k]; those outside [first, first + E) are not here, and their pairs are in no block.
        num_experts: E.
        rows: Rows of a block.
        first: Number of the first expert.
    """
    pairs = experts.numel()
    padded = triton.next_power_of_2(num_experts)
    chunk = chunk_for(pairs, padded)
    blocks, chunks = max_blocks(pairs, num_experts, rows), triton.cdiv(pairs, chunk)
    device = experts.device
    ids = experts.contiguous()
    order = torch.empty(blocks * rows, dtype=torch.int32, device=device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=device)
    block_counts = torch.empty_like(block_experts)
    upto = None
    if chunks > 1:
        # A sum along the last dimension is a parallel scan; along the first, one thread would walk all chunks.
        counts = torch.empty(padded, chunks, dtype=torch.int32, device=device)
        _count_kernel[(chunks,)](ids, counts, pairs, chunks, first, num_experts, E=padded, CHUNK=chunk, num_warps=4)
        upto = counts.cumsum(1, dtype=torch.int32)
    _place_kernel[(chunks,)](
        ids,
        upto,
        order,
        block_experts,
        block_counts,
        pairs,
        blocks,
        chunks,
        first,
        num_experts,
        E=padded,
        CHUNK=chunk,
        ROWS=rows,
        SINGLE=chunks == 1,
        num_warps=4,
    )
    return Blocks(order, block_experts, block_counts, rows)
