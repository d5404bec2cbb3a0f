"""From logits to tokens and log-probabilities, for rows that each have their own parameters.

Whatever no row of a step asks for costs nothing: parameters become tensors only for the rows that need them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from requant.engine.messages import TokenLogprobs
from requant.engine.runner_protocol import ScheduledSequence
from requant.engine.sampling_math import (
    SHORT_TOP_K,
    filter_threshold,
    gumbel_argmax,
    penalize,
    rank_and_logprob,
    seeded_exponential,
    token_counts,
)
from requant.engine.sampling_params import SamplingParams

_FLOAT32 = torch.finfo(torch.float32)

LOGPROB_ROWS = 128
"""Rows of the vocabulary that are looked at together for a prompt's log-probabilities: 78 MB at 152k tokens."""


class SamplingRow(Protocol):
    """What a row's token depends on besides its logits; a :class:`~requant.engine.request.Request` is one."""

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""
        ...

    @property
    def prompt(self) -> Sequence[int]:
        """Prompt token ids."""
        ...

    @property
    def output(self) -> Sequence[int]:
        """Token ids generated before this one."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end the sequence."""
        ...


@dataclass(frozen=True)
class _BehindDrafts:
    """A row behind some drafts, as if they had been accepted."""

    request: SamplingRow
    drafts: tuple[int, ...]

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt(self) -> Sequence[int]:
        return self.request.prompt

    @property
    def output(self) -> Sequence[int]:
        return [*self.request.output, *self.drafts]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.request.eos_token_ids


def sampling_rows(sequence: ScheduledSequence) -> list[SamplingRow]:
    """The rows of a sequence that samples: behind its last known token, and behind each of its drafts."""
    drafts = sequence.drafts
    if not drafts:
        return [sequence.request]
    behind = (_BehindDrafts(sequence.request, drafts[: count + 1]) for count in range(len(drafts)))
    return [sequence.request, *behind]


def is_greedy(params: SamplingParams) -> bool:
    """Whether the most likely token is taken, without a random choice."""
    return params.greedy


def _is_penalized(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def _must_go_on(row: SamplingRow) -> bool:
    return row.params.min_tokens > 0 and len(row.output) < row.params.min_tokens


def _is_edited(row: SamplingRow) -> bool:
    return _is_penalized(row.params) or bool(row.params.logit_bias) or _must_go_on(row)


class Sampler:
    """Samples one token a row.

    Args:
        device: Where the logits are.
        seed: Of the random choices of rows that have no seed of their own.
    """

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self._device = torch.device(device)
        self._generator = torch.Generator(self._device)
        self._generator.manual_seed(seed)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Choose a token for every row, without waiting for the device.

        Args:
            logits: float32 [R, V], left unchanged.
            rows: R of them.

        Returns:
            int64 [R] on the device.
        """
        if all(row.params.most_likely for row in rows):
            return logits.argmax(dim=1)
        if any(map(_is_edited, rows)):
            logits = self._edit(logits.clone(), rows)
        random = [index for index, row in enumerate(rows) if not is_greedy(row.params)]
        if not random:
            return logits.argmax(dim=1)
        if len(random) == len(rows):
            return self._draw(logits, rows)
        tokens = logits.argmax(dim=1)
        chosen = self._tensor(random)
        tokens[chosen] = self._draw(logits[chosen], [rows[index] for index in random])
        return tokens

    def logprobs(self, logits: Tensor, tokens: Tensor, rows: Sequence[SamplingRow]) -> list[TokenLogprobs | None]:
        """Log-probabilities of sampled tokens, for the rows that ask for them (``params.logprobs``); waits.

        Args:
            logits: float32 [R, V], the raw ones.
            tokens: int64 [R] on the device.
            rows: R of them.
        """
        result: list[TokenLogprobs | None] = [None] * len(rows)
        wanted = {index: row.params.logprobs for index, row in enumerate(rows) if row.params.logprobs is not None}
        if wanted:
            if len(wanted) < len(rows):
                chosen = self._tensor(list(wanted))
                logits, tokens = logits[chosen], tokens[chosen]
            for index, entry in zip(wanted, token_logprobs(logits, tokens, list(wanted.values())), strict=True):
                result[index] = entry
        return result

    def _tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """A list or array on the device; from pinned memory, so that the host doesn't wait."""
        tensor = torch.as_tensor(values, dtype=dtype)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)

    def _column(self, values: Sequence[float]) -> Tensor:
        """Parameters as float32 [R, 1]; one beyond its range becomes its end, since infinities would lead to NaN."""
        return self._tensor(values, torch.float64).clamp_(-_FLOAT32.max, _FLOAT32.max).float().unsqueeze(1)

    def _edit(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Logit bias, then penalties, then the ban on ending early; in place."""
        biased = [(r, token, bias) for r, row in enumerate(rows) for token, bias in row.params.logit_bias.items()]
        if biased:
            at, tokens, values = zip(*biased, strict=True)
            index = (self._tensor(at), self._tensor(tokens))
            logits[index] += self._tensor(values, torch.float32)
        penalized = [index for index, row in enumerate(rows) if _is_penalized(row.params)]
        if penalized:
            chosen = self._tensor(penalized)
            logits[chosen] = self._penalized(logits[chosen], [rows[index] for index in penalized])
        vocab = logits.shape[1]
        banned = [
            (r, token)
            for r, row in enumerate(rows)
            if _must_go_on(row)
            for token in row.eos_token_ids.union(row.params.stop_token_ids)
            if token < vocab
        ]
        if banned:
            at, tokens = zip(*banned, strict=True)
            # The value as a tensor on the device: assigning a Python number waits for the device.
            never = self._tensor([-math.inf] * len(banned), torch.float32)
            logits.index_put_((self._tensor(at), self._tensor(tokens)), never)
        return logits

    def _penalized(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        return penalize(
            logits,
            self._counts([row.output for row in rows], logits.shape[1]),
            self._counts([row.prompt if row.params.repetition_penalty != 1 else () for row in rows], logits.shape[1]),
            self._column([row.params.repetition_penalty for row in rows]),
            self._column([row.params.frequency_penalty for row in rows]),
            self._column([row.params.presence_penalty for row in rows]),
        )

    def _counts(self, histories: Sequence[Sequence[int]], vocab: int) -> Tensor:
        at = np.repeat(np.arange(len(histories)), [len(history) for history in histories])
        tokens = np.concatenate([np.asarray(history, dtype=np.int64) for history in histories])
        return token_counts(self._tensor(at), self._tensor(tokens), len(histories), vocab)

    def _draw(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """One random token a row."""
        return gumbel_argmax(self._shaped(logits, rows), self._noise(rows, logits.shape[1]))

    def _shaped(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Temperature, then filters: the softmax of the result is the distribution that is sampled from."""
        temperature = self._column([row.params.temperature for row in rows])
        return self._filtered((logits - logits.amax(dim=1, keepdim=True)) / temperature, rows)

    def _filtered(self, scaled: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Set to -inf what top_k, top_p and min_p leave out; changes ``scaled``.

        Rows with a small top_k go apart from those that need the whole vocabulary sorted.
        """
        vocab = scaled.shape[1]
        widths = [min(row.params.top_k, vocab) if row.params.top_k > 0 else vocab for row in rows]
        filtered = [
            index
            for index, (row, width) in enumerate(zip(rows, widths, strict=True))
            if width < vocab or row.params.top_p < 1 or row.params.min_p > 0
        ]
        short = [index for index in filtered if widths[index] <= SHORT_TOP_K]
        long = [index for index in filtered if widths[index] > SHORT_TOP_K]
        for group in filter(None, (short, long)):
            chosen = self._tensor(group)
            part = scaled[chosen]
            threshold = filter_threshold(
                part,
                self._tensor([widths[index] for index in group]).unsqueeze(1),
                self._column([rows[index].params.top_p for index in group]),
                self._column([rows[index].params.min_p for index in group]),
                widest=max(widths[index] for index in group),
            )
            scaled[chosen] = part.masked_fill_(part < threshold, -torch.inf)
        return scaled

    def _noise(self, rows: Sequence[SamplingRow], vocab: int) -> Tensor:
        """Exponential noise [R, V]: from the sampler's generator, or from the row's own seed if it has one.

        Seeded noise is some fifteen passes of integer arithmetic over the vocabulary, the generator's is one.
        """
        noise = torch.empty(len(rows), vocab, dtype=torch.float32, device=self._device)
        seeds = {index: row.params.seed for index, row in enumerate(rows) if row.params.seed is not None}
        if len(seeds) < len(rows):
            noise.exponential_(generator=self._generator)
        if seeds:
            positions = self._tensor([len(rows[index].output) for index in seeds])
            noise[self._tensor(list(seeds))] = seeded_exponential(self._tensor(list(seeds.values())), positions, vocab)
        return noise


def token_logprobs(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probability, rank and most likely tokens of every row; waits for the device once.

    Args:
        logits: float32 [R, V], raw.
        tokens: int64 [R] on the same device.
        tops: How many of the most likely tokens each row wants.
    """
    logprob, rank, top_logprobs, top_tokens = rank_and_logprob(logits, tokens, min(max(tops), logits.shape[1]))
    # float64 holds float32 and token ids exactly: one transfer instead of five.
    packed = torch.cat([part.double().view(len(tops), -1) for part in (tokens, logprob, rank)], dim=1)
    table = torch.cat([packed, top_logprobs.double(), top_tokens.double()], dim=1).tolist()
    width = top_tokens.shape[1]
    return [
        TokenLogprobs(
            int(row[0]),
            row[1],
            int(row[2]),
            tuple((int(row[3 + width + i]), row[3 + i]) for i in range(min(top, width))),
        )
        for row, top in zip(table, tops, strict=True)
    ]


def logprob_slices(count: int) -> Iterator[tuple[int, int]]:
    """The runs (first, end) of at most :data:`LOGPROB_ROWS` positions whose logits are computed at a time."""
    for first in range(0, count, LOGPROB_ROWS):
        yield first, min(first + LOGPROB_ROWS, count)


def sliced_logprobs(logits_of: Callable[[int, int], Tensor], tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of a prompt's tokens, with the logits of at most :data:`LOGPROB_ROWS` positions at a time.

    Args:
        logits_of: (first, end) → float32 [end - first, V], the logits that predict ``tokens[first:end]``.
        tokens: The tokens that stand there: for each wanted position p the prompt's token p + 1.
        top: How many of the most likely tokens each position wants.
    """
    result: list[TokenLogprobs] = []
    for first, end in logprob_slices(len(tokens)):
        part = tokens[first:end]
        logits = logits_of(first, end)
        result += token_logprobs(logits, torch.tensor(part, device=logits.device), [top] * len(part))
    return result
