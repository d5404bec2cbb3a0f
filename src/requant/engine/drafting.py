"""Drafting: after a step, what the MTP layer expects to come, so that the next step can check several tokens at once.

Legend: T tokens of the step before, S sequences that draft, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from requant.engine.batch import ModelInput, moved
from requant.engine.graphs import DecodeGraphs
from requant.engine.runner_protocol import ScheduledSequence
from requant.kernels.attention_batch import AttentionBatch
from requant.models.base import CausalLM


@dataclass(frozen=True)
class DraftStep:
    """What is drafted behind one step: plain data, which every rank computes alike.

    Attributes:
        following: int64 [T], for each token of the step the one behind it, as far as it is known by now.
        rows: int64 [S], the rows in T from which sequences go on: those of their last tokens whose KV is right.
        positions: int64 [S], where the token behind lies, the sequence's newest.
        tables: int32 [S, pages], the pages of each sequence.
        counts: int64 [S], how many tokens each is to draft.
    """

    following: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    tables: np.ndarray
    counts: np.ndarray


def accepted(sampled: Sequence[int], drafts: Sequence[int]) -> tuple[int, ...]:
    """The tokens that a step has decided: drafts as long as the model says the same, and one more of the model's own.

    The model's own token is sampled at every place as it would be without drafts. A draft d is then accepted with the
    probability p(d) that the model gives it, and where it is not, the token in its place is distributed as the model
    would have it without d: this is rejection sampling with a draft that is certain (Leviathan et al., "Fast Inference
    from Transformers via Speculative Decoding", 2023), with one random choice instead of two.

    Args:
        sampled: The model's tokens, one behind the last known token and one behind each draft.
        drafts: What had been drafted.
    """
    count = 0
    while count < len(drafts) and sampled[count] == drafts[count]:
        count += 1
    return tuple(sampled[: count + 1])


def make_draft_step(
    sequences: Sequence[ScheduledSequence], decided: Sequence[tuple[int, ...]], block_size: int, most: int
) -> tuple[DraftStep, list[int]]:
    """What is to be drafted, and which of the sequences draft.

    Args:
        sequences: The step's.
        decided: The new tokens of each; none of those that have not reached the end of their prompt.
        block_size: Tokens in a page.
        most: Tokens that a sequence may draft.
    """
    following: list[int] = []
    drafting: list[tuple[int, int, int, list[int], int]] = []
    for index, (sequence, tokens) in enumerate(zip(sequences, decided, strict=True)):
        request, first = sequence.request, len(following)
        known = request.tokens[sequence.start + 1 : sequence.stop + 1]
        # Behind a rejected draft nothing is known; its KV is overwritten before anything attends to it.
        following += (known + list(tokens) + list(sequence.drafts))[: sequence.length]
        count = _count(sequence, tokens, block_size, most)
        if count:
            row = first + sequence.known - 1 + len(tokens) - 1
            position = sequence.stop + len(tokens) - 1
            drafting.append((index, row, position, request.blocks, count))
    pages = max((len(blocks) for _, _, _, blocks, _ in drafting), default=1)
    tables = np.zeros((len(drafting), pages), dtype=np.int32)
    for line, (_, _, _, blocks, _) in enumerate(drafting):
        tables[line, : len(blocks)] = blocks
    step = DraftStep(
        np.array(following, dtype=np.int64),
        np.array([row for _, row, _, _, _ in drafting], dtype=np.int64),
        np.array([position for _, _, position, _, _ in drafting], dtype=np.int64),
        tables,
        np.array([count for _, _, _, _, count in drafting], dtype=np.int64),
    )
    return step, [index for index, _, _, _, _ in drafting]


def _count(sequence: ScheduledSequence, tokens: tuple[int, ...], block_size: int, most: int) -> int:
    """How many tokens a sequence drafts: not past its end, nor past its pages; none once it has ended."""
    request = sequence.request
    if not tokens or (not request.params.ignore_eos and not request.eos_token_ids.isdisjoint(tokens)):
        return 0
    length = sequence.stop + len(tokens)
    # A step gives one token more than drafts; the first draft's KV lies where the newest token is, the last has none.
    room = len(request.blocks) * block_size - length + 2
    return max(min(most, request.max_length - length - 1, room), 0)


class Drafter:
    """Runs the MTP layer.

    Args:
        model: One that drafts.
        device: Where it lives.
        block_size: Tokens in a page of the KV cache.
    """

    def __init__(self, model: CausalLM, device: torch.device, block_size: int) -> None:
        self._model = model
        self._device = device
        self._block_size = block_size
        self._graphs: DecodeGraphs | None = None

    def capture(self, sizes: list[int], max_context: int, dtype: torch.dtype) -> None:
        """Capture the layer's decode step as CUDA graphs of these numbers of tokens. GPU only."""

        def forward(ids: Tensor, states: Tensor | None, positions: Tensor, batch: AttentionBatch) -> Tensor:
            assert states is not None
            return self._model.draft(ids, states, positions, batch)

        states = torch.zeros(sizes[-1], self._model.config.hidden_size, dtype=dtype, device=self._device)
        self._graphs = DecodeGraphs(forward, sizes, max_context, self._block_size, self._device, states)

    def forward(self, following: Tensor, hidden: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """One pass of the layer, as a CUDA graph where there is one; see :meth:`CausalLM.draft`."""
        if self._graphs is not None and self._graphs.takes(batch):
            return self._graphs.replay(following, positions, batch, hidden)
        return self._model.draft(following, hidden, positions, batch)

    def draft(self, step: ModelInput, hidden: Tensor, draft: DraftStep) -> Tensor | None:
        """Store the layer's own KV of a step, and draft.

        Args:
            step: The step.
            hidden: [T, H], what the model gave for it.
            draft: What to draft.

        Returns:
            int64 [S, most], the drafts; what is behind a sequence's count means nothing. None if no sequence drafts.
        """
        following = moved(draft.following, torch.int64, self._device)
        states = self.forward(following, hidden, step.positions, step.attention)
        if not draft.counts.size:
            return None
        states = states[moved(draft.rows, torch.int64, self._device)]
        tables = moved(draft.tables, torch.int32, self._device)
        query_start = torch.arange(len(draft.counts) + 1, dtype=torch.int32, device=self._device)
        tokens = [self._most_likely(states)]
        for index in range(1, int(draft.counts.max())):
            positions = draft.positions + index - 1
            batch = AttentionBatch(
                query_start=query_start,
                context_lens=moved(positions + 1, torch.int32, self._device),
                block_tables=tables,
                slots=moved(self._slots(draft, positions, index), torch.int64, self._device),
                max_query=1,
                max_context=int(positions.max()) + 1,
            )
            states = self.forward(tokens[-1], states, moved(positions, torch.int64, self._device), batch)
            tokens.append(self._most_likely(states))
        return torch.stack(tokens, dim=1)

    def _slots(self, draft: DraftStep, positions: np.ndarray, index: int) -> np.ndarray:
        """Where keys and values go; nowhere for sequences that have drafted enough."""
        pages = np.minimum(positions // self._block_size, draft.tables.shape[1] - 1)
        slots = draft.tables[np.arange(len(pages)), pages].astype(np.int64) * self._block_size
        return np.where(index < draft.counts, slots + positions % self._block_size, -1)

    def _most_likely(self, states: Tensor) -> Tensor:
        return self._model.draft_logits(states).argmax(dim=-1)
