"""From scheduled sequences to the tensors that a model's forward takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from requant.engine.runner_protocol import ScheduledSequence
from requant.kernels.attention_batch import AttentionBatch


@dataclass(frozen=True)
class ModelInput:
    """One step's input, flattened over its sequences.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T].
        attention: Which token belongs to whom, and where its KV goes.
        last: int64 [B] on the host: index in T of each sequence's last token of this step.
    """

    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    last: np.ndarray


def make_input(sequences: Sequence[ScheduledSequence], block_size: int, device: torch.device) -> ModelInput:
    """Flatten ``sequences``; on a GPU every transfer is asynchronous, from pinned memory."""
    counts = np.array([s.count for s in sequences], dtype=np.int64)
    starts = np.array([s.start for s in sequences], dtype=np.int64)
    query_start = np.concatenate(([0], np.cumsum(counts)))
    ids = np.concatenate([np.asarray(s.request.tokens[s.start : s.stop], dtype=np.int64) for s in sequences])
    positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, counts)

    context_lens = starts + counts
    pages = -(-context_lens // block_size)
    tables = np.zeros((len(sequences), int(pages.max())), dtype=np.int32)
    for row, (sequence, used) in enumerate(zip(sequences, pages, strict=True)):
        tables[row, :used] = sequence.request.blocks[:used]
    rows = np.repeat(np.arange(len(sequences)), counts)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def move(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    attention = AttentionBatch(
        query_start=move(query_start, torch.int32),
        context_lens=move(context_lens, torch.int32),
        block_tables=move(tables, torch.int32),
        slots=move(slots, torch.int64),
        max_query=int(counts.max()),
        max_context=int(context_lens.max()),
    )
    return ModelInput(move(ids, torch.int64), move(positions, torch.int64), attention, query_start[1:] - 1)


def dummy_input(sequences: int, tokens_each: int, device: torch.device) -> ModelInput:
    """The largest step that can come, for measuring its memory: nothing of it is written to the KV cache."""
    total = sequences * tokens_each
    attention = AttentionBatch(
        query_start=torch.arange(0, total + 1, tokens_each, dtype=torch.int32, device=device),
        context_lens=torch.full((sequences,), tokens_each, dtype=torch.int32, device=device),
        block_tables=torch.zeros(sequences, max(tokens_each, 1), dtype=torch.int32, device=device),
        slots=torch.full((total,), -1, dtype=torch.int64, device=device),
        max_query=tokens_each,
        max_context=tokens_each,
    )
    zeros = torch.zeros(total, dtype=torch.int64, device=device)
    return ModelInput(zeros, zeros, attention, np.arange(1, sequences + 1) * tokens_each - 1)
