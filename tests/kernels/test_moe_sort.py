"""The sorting of (token, choice) pairs into blocks of one expert, against a loop over the experts.

On a GPU every case runs; without one, the small cases run under Triton's interpreter, in a process of its own
(``TRITON_INTERPRET`` must be set before Triton is imported): this file is that process's program.
"""

import itertools
from unittest import mock

import pytest
import torch
from requant_triton import check_small_cases
from torch import Tensor

gpu = pytest.mark.gpu

# T tokens, k choices, E experts, rows of a block. Up to 128 pairs are one program's, if the experts are not too many.
SMALL = [
    (1, 1, 1, 16),
    (1, 8, 128, 16),
    (3, 1, 5, 16),
    (5, 2, 5, 32),
    (16, 8, 128, 16),
    (17, 8, 128, 16),
    (16, 8, 256, 16),
    (200, 4, 60, 64),
    (129, 1, 7, 16),
    (70, 6, 64, 128),
]
LARGE = [(1000, 8, 512, 16), (5000, 8, 256, 64), (16384, 8, 128, 128), (16384, 1, 5, 128), (16384, 2, 200, 64)]


def poisoned_empty(*shape: int, **options: object) -> Tensor:
    """``torch.empty`` whose memory is filled, so that what a kernel fails to write is seen."""
    return torch.zeros(*shape, **options).fill_(0x7FFFFFFF)  # type: ignore[call-overload]


def routings(tokens: int, choices: int, num_experts: int) -> dict[str, Tensor]:
    """Chosen experts [T, k]: evenly, all the same, only the last few, and as a view that is not contiguous."""
    generator = torch.Generator().manual_seed(tokens)
    even = torch.rand(tokens, num_experts, generator=generator).topk(choices).indices
    return {
        "even": even,
        "one": torch.full_like(even, num_experts // 2),
        "last": num_experts - 1 - even % min(3, num_experts),
        "strided": even.t().contiguous().t(),
    }


def check_sort(ids: Tensor, num_experts: int, rows: int, device: str) -> None:
    """Every pair once, in a block of its expert, in the order of tokens; blocks behind the last are empty."""
    from requant.kernels.triton.moe_sort import max_blocks, sort_pairs

    with (
        mock.patch.object(torch, "empty", poisoned_empty),
        mock.patch.object(torch, "empty_like", lambda x: poisoned_empty(*x.shape, dtype=x.dtype, device=x.device)),
    ):
        blocks = sort_pairs(ids.to(device), num_experts, rows)
    pairs, experts, counts = (x.cpu() for x in blocks[:3])
    assert (blocks.rows, pairs.dtype) == (rows, torch.int32)
    assert len(experts) == len(counts) == max_blocks(ids.numel(), num_experts, rows)
    wanted = []
    for expert in range(num_experts):
        mine = (ids.flatten() == expert).nonzero().flatten().tolist()
        wanted += [(expert, mine[i : i + rows]) for i in range(0, len(mine), rows)]
    got = [(int(experts[b]), pairs[b * rows : b * rows + int(counts[b])].tolist()) for b in range(len(wanted))]
    assert got == wanted
    assert not counts[len(wanted) :].any()
    assert ((experts >= 0) & (experts < num_experts)).all()


def test_small_cases_under_the_interpreter() -> None:
    check_small_cases(__file__)


def test_the_number_of_blocks_is_the_most_that_any_routing_takes() -> None:
    pytest.importorskip("triton")
    from requant.kernels.triton.moe_sort import max_blocks

    for experts, rows in itertools.product((1, 2, 4), (1, 2, 3, 5)):
        for pairs in range(1, 9):
            counts = (c for c in itertools.product(range(pairs + 1), repeat=experts) if sum(c) == pairs)
            assert max_blocks(pairs, experts, rows) == max(sum(-(-c // rows) for c in each) for each in counts)


def test_few_pairs_are_one_programs() -> None:
    pytest.importorskip("triton")
    from requant.kernels.triton.moe_sort import chunk_for

    assert [chunk_for(pairs, 128) for pairs in (1, 8, 17, 128, 129, 131072)] == [16, 16, 32, 128, 64, 64]
    assert [chunk_for(pairs, 256) for pairs in (8, 64, 128, 131072)] == [16, 64, 32, 32]
    assert chunk_for(131072, 8) == 64
    assert chunk_for(131072, 2048) == 16


@gpu
@pytest.mark.parametrize("routing", ["even", "one", "last", "strided"])
@pytest.mark.parametrize(("tokens", "choices", "num_experts", "rows"), SMALL + LARGE)
def test_pairs_are_sorted_into_blocks(tokens: int, choices: int, num_experts: int, rows: int, routing: str) -> None:
    check_sort(routings(tokens, choices, num_experts)[routing], num_experts, rows, "cuda")


if __name__ == "__main__":
    for tokens, choices, num_experts, rows in SMALL:
        for ids in routings(tokens, choices, num_experts).values():
            check_sort(ids, num_experts, rows, "cpu")
    print("all passed")
