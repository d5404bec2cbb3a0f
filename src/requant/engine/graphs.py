"""CUDA graphs of the decode step: one graph a batch size, captured once, replayed with new inputs.

A decode step launches hundreds of small kernels; replaying a graph makes them one launch. A batch is padded to
the next captured size: padded rows have context length 0 and write their key and value nowhere.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from requant.engine.batch import ModelInput, Step, moved
from requant.kernels.attention_batch import AttentionBatch

Replay = Callable[[], object]
Forward = Callable[[Tensor, Tensor | None, Tensor, AttentionBatch], Tensor]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: dense where padding would cost most, and ``max_num_seqs`` itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32)]
    limit = min(max_num_seqs, 512)
    return sorted({s for s in sizes if s < limit} | {limit})


class _StaticInput:
    """Tensors at fixed addresses that the captured kernels read; sized for the largest batch.

    All but the pages lie in one piece of memory, which a step fills from the host in one transfer.

    Args:
        size: Largest batch, S.
        max_pages: Pages of the longest sequence.
        max_context: Its tokens.
        device: Where they lie.
        states: Hidden states [S, H] of a computation that takes some.
    """

    def __init__(
        self, size: int, max_pages: int, max_context: int, device: torch.device, states: Tensor | None
    ) -> None:
        self.size = size
        self.states = states
        self._words = torch.zeros(_WORDS * size, dtype=torch.int32, device=device)
        host = torch.zeros(_WORDS * size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = host
        self._arrays = tuple(part.numpy() for part in _parts(host, size))
        self.input_ids, self.positions, slots, context_lens = _parts(self._words, size)
        slots.fill_(-1)
        self.batch = AttentionBatch(
            query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens=context_lens,
            block_tables=torch.zeros(size, max_pages, dtype=torch.int32, device=device),
            slots=slots,
            max_query=1,
            max_context=max_context,
        )
        self._tables = np.zeros((0, 0), dtype=np.int32)
        self._moved = torch.cuda.Event() if device.type == "cuda" else None

    def first(self, size: int) -> tuple[Tensor, Tensor | None, Tensor, AttentionBatch]:
        """What a batch of ``size`` reads."""
        b = self.batch
        batch = AttentionBatch(
            b.query_start[: size + 1], b.context_lens[:size], b.block_tables[:size], b.slots[:size], 1, b.max_context
        )
        states = None if self.states is None else self.states[:size]
        return self.input_ids[:size], states, self.positions[:size], batch

    def fill(self, step: Step) -> None:
        """Take a step from the host. Rows behind its tokens have no context, and are written nowhere."""
        if self._moved is not None:
            self._moved.synchronize()  # the last step's transfer has read what is overwritten here
        count = len(step.ids)
        rest = (0, 0, -1, 0)
        for array, values, other in zip(
            self._arrays, (step.ids, step.positions, step.slots, step.context_lens), rest, strict=True
        ):
            array[:count], array[count:] = values, other
        self._words.copy_(self._host, non_blocking=True)
        if self._moved is not None:
            self._moved.record()
        if not np.array_equal(step.tables, self._tables):  # they grow by a page now and then
            tables = moved(step.tables, torch.int32, self._words.device)
            self.batch.block_tables[:count, : tables.shape[1]].copy_(tables)
            self._tables = step.tables

    def copy(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, states: Tensor | None) -> None:
        """Take a batch that is on the device already."""
        count = input_ids.numel()
        self.input_ids[:count].copy_(input_ids)
        self.positions[:count].copy_(positions)
        if self.states is not None and states is not None:
            self.states[:count].copy_(states)
        self.batch.context_lens[:count].copy_(batch.context_lens)
        self.batch.block_tables[:count, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        self._tables = np.zeros((0, 0), dtype=np.int32)
        self.batch.slots[:count].copy_(batch.slots)
        self.batch.context_lens[count:].zero_()
        self.batch.slots[count:].fill_(-1)


# 32-bit words of one token: its id, its position and its slot, of two each, and its context.
_WORDS = 7


def _parts(words: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, positions and slots, int64 [S], and contexts, int32 [S], in int32 [7 S]."""
    ids, positions, slots = (words[2 * i * size : 2 * (i + 1) * size].view(torch.int64) for i in range(3))
    return ids, positions, slots, words[6 * size :]


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
        self._static = _StaticInput(sizes[-1], max_pages, max_context, device, states)
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

    def takes_step(self, step: Step) -> bool:
        """As :meth:`takes`, of a step that is on the host yet."""
        return len(step.ids) == len(step.context_lens) <= self._sizes[-1]

    def run(self, step: Step) -> tuple[Tensor, ModelInput]:
        """Run a decode step of B sequences that is on the host.

        Returns:
            The result [B, H], and the step on the device; both are valid until the next run or replay.
        """
        count = len(step.ids)
        self._static.fill(step)
        ids, _, positions, batch = self._static.first(count)
        return self._replay(count), ModelInput(ids, positions, batch)

    def replay(
        self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, states: Tensor | None = None
    ) -> Tensor:
        """Run a decode batch of B sequences; the result [B, H] is valid until the next replay."""
        self._static.copy(input_ids, positions, batch, states)
        return self._replay(input_ids.numel())

    def _replay(self, count: int) -> Tensor:
        replay, hidden = self._graphs[next(size for size in self._sizes if size >= count)]
        replay()
        return hidden[:count]
