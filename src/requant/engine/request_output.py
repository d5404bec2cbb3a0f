"""What generation hands to its caller: text, tokens and how it ended."""

from dataclasses import dataclass, field
from typing import Literal

from requant.engine.messages import FinishReason


@dataclass(frozen=True)
class Candidate:
    """One of the most likely tokens at a position."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token, and of the most likely ones at its position.

    Attributes:
        token: The token.
        text: Its text by itself; U+FFFD for a part of a character.
        logprob: Its log-probability, from the raw logits.
        rank: Its rank, 1 being the most likely.
        offset: Where its text begins: characters from the beginning of the output's text (or the prompt's).
        top: The most likely tokens, best first.
    """

    token: int
    text: str
    logprob: float
    rank: int
    offset: int
    top: tuple[Candidate, ...]


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence, or what is new of it.

    Attributes:
        index: Which of the prompt's ``n`` sequences.
        text: Text; never half a character, never a part of a stop string that is to be cut off.
        token_ids: Tokens, the end-of-sequence token included.
        logprobs: One for each token, or None if they were not asked for.
        cumulative_logprob: Sum over all tokens of the sequence so far, or None.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``; None while it goes on.
        stop_reason: The stop string or stop token that ended it; None for an end-of-sequence token.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The outputs of one prompt: all of them when finished, or what is new (a delta).

    Attributes:
        request_id: The request.
        prompt: The prompt's text, or None if it was given as token ids.
        prompt_token_ids: The prompt's tokens.
        prompt_logprobs: One for each of the prompt's tokens, the first None; None if not asked for. A delta has
            them once.
        outputs: By index. A delta has those with something new only.
        finished: Whether this is the last output of the request.
        num_cached_tokens: Tokens of the prompt that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int


@dataclass(frozen=True)
class FinishedRequest:
    """What the metrics take from a request that ended; times as ``time.monotonic()`` has them.

    Attributes:
        arrival: When the request was taken.
        first_token: When its first token came, or None if none did.
        end: When its last sequence ended.
        prompt_tokens: Length of the prompt.
        output_tokens: For each sequence, how many tokens.
        reasons: For each sequence, how it ended.
    """

    arrival: float
    first_token: float | None
    end: float
    prompt_tokens: int
    output_tokens: tuple[int, ...]
    reasons: tuple[Literal["stop", "length", "abort"], ...] = field(default=())
