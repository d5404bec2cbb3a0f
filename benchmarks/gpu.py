"""What a GPU can do at most, and how long something takes on it: what other benchmarks stand beside."""

from collections.abc import Callable

import torch
import triton

BF16 = torch.bfloat16
CACHE_BYTES = 60 << 20
"""More than the second-level cache of any GPU here: what is read over and over must be larger to come from memory."""


def seconds(run: Callable[[], object]) -> float:
    """Median time of ``run`` on the GPU."""
    return triton.testing.do_bench(run, return_mode="median") / 1e3


def graph_seconds(calls: list[Callable[[], object]]) -> float:
    """Median time of one of ``calls``, which a CUDA graph runs one after the other."""
    for call in calls:
        call()  # compiles, and fills caches outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return seconds(graph.replay) / len(calls)


def ceilings() -> dict[str, float]:
    """Bytes a second of a copy (read and written), and operations a second of large BF16 and FP8 products."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    dense = seconds(lambda: a @ b.t())
    fp8, one = [x.to(torch.float8_e4m3fn) for x in (a, b)], torch.ones((), device="cuda")
    scaled = seconds(lambda: torch._scaled_mm(fp8[0], fp8[1].t(), scale_a=one, scale_b=one, out_dtype=BF16))
    return {"bytes": 2 * source.nbytes / copy, "bf16": 2 * 8192**3 / dense, "fp8": 2 * 8192**3 / scaled}
