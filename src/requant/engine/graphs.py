"""CUDA graphs of the decode step: one graph a batch size, captured once, replayed with new inputs.

A decode step launches hundreds of small kernels; replaying a graph makes them one launch. A batch is padded to
the next captured size: padded rows have context length 0 and write their key and value nowhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from requant.kernels.attention_batch import AttentionBatch

Replay = Callable[[], object]
Forward = Callable[[Tensor, Tensor | None, Tensor, AttentionBatch], Tensor]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: dense where padding would cost most, and ``max_num_seqs`` itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32)]
    limit = min(max_num_seqs, 512)
    return sorted({s for s in sizes if s < limit} | {limit})


@dataclass
class _StaticInput:
    """Tensors at fixed addresses that the captured kernels read; sized for the largest batch."""

    input_ids: Tensor
    positions: Tensor
    batch: AttentionBatch
    states: Tensor | None

    @classmethod
    def allocate(
        cls, size: int, max_pages: int, max_context: int, device: torch.device, states: Tensor | None
    ) -> "_StaticInput":
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            zeros(size, dtype=torch.int64),
            zeros(size, dtype=torch.int64),
            AttentionBatch(
                query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
                context_lens=zeros(size),
                block_tables=zeros(size, max_pages),
                slots=torch.full((size,), -1, dtype=torch.int64, device=device),
                max_query=1,
                max_context=max_context,
            ),
            states,
        )

    def first(self, size: int) -> tuple[Tensor, Tensor | None, Tensor, AttentionBatch]:
        b = self.batch
        batch = AttentionBatch(
            b.query_start[: size + 1], b.context_lens[:size], b.block_tables[:size], b.slots[:size], 1, b.max_context
        )
        states = None if self.states is None else self.states[:size]
        return self.input_ids[:size], states, self.positions[:size], batch


class DecodeGraphs:
    """The captured graphs, sharing one memory pool.

    Args:
        forward: (input_ids [T], states [T, H] or None, positions [T], batch) → hidden [T, H].
        sizes: Batch sizes to capture, ascending.
        max_context: Longest context that a replay can have, in tokens.
        block_size: Tokens in a page.
        device: A CUDA device.
        states: For a forward that takes hidden states: where they lie, [largest size, H].
    """

    def __init__(
        self,
        forward: Forward,
        sizes: list[int],
        max_context: int,
        block_size: int,
        device: torch.device,
        states: Tensor | None = None,
    ) -> None:
        self._sizes = sizes
        max_pages = -(-max_context // block_size)
        self._static = _StaticInput.allocate(sizes[-1], max_pages, max_context, device, states)
        self._graphs: dict[int, tuple[Replay, Tensor]] = {}
        capture = self._capturer(device)
        for size in reversed(sizes):
            inputs = self._static.first(size)
            forward(*inputs)  # compiles kernels and fills caches outside the capture
            self._graphs[size] = capture(partial(forward, *inputs))

    def _capturer(self, device: torch.device) -> Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]:
        """What captures a computation: how it is run again, and where its result then is."""
        pool = torch.cuda.graph_pool_handle()

        def capture(compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            # Of this thread only: that of NCCL, which watches over the collectives, may ask the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                hidden = compute()
            return graph.replay, hidden

        return capture

    def takes(self, batch: AttentionBatch) -> bool:
        """Whether a batch is a pure decode step within the captured sizes."""
        return batch.max_query == 1 and batch.context_lens.numel() <= self._sizes[-1]

    def replay(
        self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, states: Tensor | None = None
    ) -> Tensor:
        """Run a decode batch of B sequences; the result [B, H] is valid until the next replay."""
        count = input_ids.numel()
        size = next(s for s in self._sizes if s >= count)
        static = self._static
        static.input_ids[:count].copy_(input_ids)
        static.positions[:count].copy_(positions)
        if static.states is not None and states is not None:
            static.states[:count].copy_(states)
        static.batch.context_lens[:count].copy_(batch.context_lens)
        static.batch.block_tables[:count, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        static.batch.slots[:count].copy_(batch.slots)
        if size > count:
            static.batch.context_lens[count:size].zero_()
            static.batch.slots[count:size].fill_(-1)
        replay, hidden = self._graphs[size]
        replay()
        return hidden[:count]
