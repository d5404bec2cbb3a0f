"""From scheduled sequences to the tensors that a model's forward takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from requant.engine.runner_protocol import ScheduledSequence
from requant.kernels.attention_batch import AttentionBatch

_NO_ROWS = range(0)


@dataclass(frozen=True)
class Step:
    """One step on the host, flattened over its sequences: plain data, which every rank computes alike.

    Attributes:
        ids: int64 [T].
        positions: int64 [T].
        query_start: int64 [B + 1], where each sequence's tokens begin.
        context_lens: int64 [B].
        tables: int32 [B, pages], the pages of each sequence.
        slots: int64 [T], where each token's key and value go.
        prompt_rows: For each sequence the rows in T whose logits predict wanted tokens of its prompt, maybe none.
        sampled_rows: int64, the rows in T whose logits the next tokens are sampled from: of a sequence that samples
            its last known token's, and its drafts'.
    """

    ids: np.ndarray
    positions: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    tables: np.ndarray
    slots: np.ndarray
    prompt_rows: tuple[range, ...]
    sampled_rows: np.ndarray


@dataclass(frozen=True)
class ModelInput:
    """One step's input on the device.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T].
        attention: Which token belongs to whom, and where its KV goes.
    """

    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch


def make_step(sequences: Sequence[ScheduledSequence], block_size: int) -> Step:
    """Flatten ``sequences``.

    Where all of them decode, each token is a sequence of its own, with the same pages: attention that is made for
    decoding, and its CUDA graphs, then serve drafts as well.
    """
    if all(s.known == 1 and s.samples and not s.drafts for s in sequences):
        return _decode_step(sequences, block_size)
    counts = np.array([s.length for s in sequences], dtype=np.int64)
    starts = np.array([s.start for s in sequences], dtype=np.int64)
    query_start = np.concatenate(([0], np.cumsum(counts)))
    ids = np.concatenate([np.asarray(s.tokens, dtype=np.int64) for s in sequences])
    positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, counts)

    context_lens = starts + counts
    pages = -(-context_lens // block_size)
    tables = np.zeros((len(sequences), int(pages.max())), dtype=np.int32)
    for row, (sequence, used) in enumerate(zip(sequences, pages, strict=True)):
        tables[row, :used] = sequence.request.table[:used]
    rows = np.repeat(np.arange(len(sequences)), counts)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    prompt_rows = tuple(_prompt_rows(s, int(first) - s.start) for s, first in zip(sequences, query_start, strict=False))
    sampling = [
        np.arange(end - 1 - len(s.drafts), end) for s, end in zip(sequences, query_start[1:], strict=True) if s.samples
    ]
    sampled_rows = np.concatenate(sampling) if sampling else np.zeros(0, dtype=np.int64)
    if all(s.known == 1 and s.samples for s in sequences):
        query_start, context_lens, tables = np.arange(len(ids) + 1), positions + 1, tables[rows]
    return Step(ids, positions, query_start, context_lens, tables, slots, prompt_rows, sampled_rows)


def _decode_step(sequences: Sequence[ScheduledSequence], block_size: int) -> Step:
    """A step of one token a sequence, as most steps are: of 128 sequences in a third of the time."""
    count = len(sequences)
    requests = [sequence.request for sequence in sequences]
    positions = np.fromiter((sequence.start for sequence in sequences), np.int64, count)
    ids = np.fromiter((r.tokens[p] for r, p in zip(requests, positions.tolist(), strict=True)), np.int64, count)
    pages = positions // block_size
    used = (pages + 1).tolist()
    tables = np.zeros((count, max(used)), dtype=np.int32)
    for row, request, length in zip(tables, requests, used, strict=True):
        row[:length] = request.table[:length]
    rows = np.arange(count + 1)
    slots = tables[rows[:-1], pages].astype(np.int64) * block_size + positions % block_size
    return Step(
        ids,
        positions,
        rows,
        positions + 1,
        tables,
        slots,
        tuple(_prompt_rows(s, row - s.start) for row, s in enumerate(sequences)),
        rows[:-1],
    )


def _prompt_rows(sequence: ScheduledSequence, zero: int) -> range:
    """Rows whose logits predict wanted tokens of the prompt; ``zero``: the row of the sequence's position 0."""
    positions = sequence.prompt_positions
    if sequence.request.params.prompt_logprobs is None:
        return _NO_ROWS
    return range(zero + positions.start, zero + positions.stop)


def to_device(step: Step, device: torch.device) -> ModelInput:
    """The step's tensors; on a GPU every transfer is asynchronous, from pinned memory."""

    attention = AttentionBatch(
        query_start=moved(step.query_start, torch.int32, device),
        context_lens=moved(step.context_lens, torch.int32, device),
        block_tables=moved(step.tables, torch.int32, device),
        slots=moved(step.slots, torch.int64, device),
        max_query=int(np.diff(step.query_start).max()),
        max_context=int(step.context_lens.max()),
    )
    return ModelInput(moved(step.ids, torch.int64, device), moved(step.positions, torch.int64, device), attention)


def moved(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An array on the device; on a GPU the transfer is asynchronous, from pinned memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


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
    return ModelInput(zeros, zeros, attention)
