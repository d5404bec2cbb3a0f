"""What crosses the line between a front end (``LLM``, the HTTP server) and the engine core.

The core knows token ids only; text (tokenizing, detokenizing, stop strings) belongs to the front end. All of
these are plain data that pickles, since the server keeps the core in a process of its own.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from requant.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class CoreRequest:
    """One sequence to generate.

    Attributes:
        request_id: Unique among unfinished requests.
        prompt: Prompt token ids, at least one, and leaving room for at least one new token.
        params: Validated parameters with ``n == 1``: the front end fans larger ``n`` out.
        eos_token_ids: Tokens that end the sequence unless ``params.ignore_eos``.
        arrival: ``time.time()`` at which the front end took the request.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival: float = 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the raw logits (before temperature and penalties).

    Attributes:
        token: The token that was sampled (or, for a prompt, that stands there).
        logprob: Its log-probability.
        rank: Its rank, 1 being the most likely.
        top: (token, logprob) of the most likely tokens, best first; as many as were asked for.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class CoreOutput(NamedTuple):
    """What one step produced for one request.

    Attributes:
        request_id: Whose it is.
        tokens: New token ids of this step, in order (several with speculative decoding).
        logprobs: One for each of ``tokens`` if they were asked for, else ``()``.
        prompt_logprobs: Once, with the first output, if asked for: one for each prompt token, the first None.
        finish_reason: Set on the last output of the request. The end-of-sequence or stop token that ended it
            is the last of ``tokens``. An aborted request's last output has no tokens.
        stop_token: The token of ``params.stop_token_ids`` that ended it, else None.
        cached_tokens: Prompt tokens served from the prefix cache, known with the first output.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class SpeculationCounts:
    """What has been drafted so far.

    Attributes:
        drafts: How often a sequence's drafts were checked.
        tokens: Tokens in them.
        accepted: Those that were accepted.
        by_position: Those at the first place of drafts, at the second, and so on; empty without speculative decoding.
    """

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()


@dataclass(frozen=True)
class CoreStats:
    """Gauges and counters of the engine core, sent along with outputs, for /metrics and the log.

    Attributes:
        running: Sequences being computed after this step.
        waiting: Sequences that hold no blocks: not started, or preempted.
        kv_usage: Share of the KV blocks that unfinished sequences hold, 0 to 1.
        prompt_tokens: Total prompt tokens of the sequences that have reached their first new token.
        generation_tokens: Total new tokens.
        prefix_queries: Total prompt tokens looked up in the prefix cache.
        prefix_hits: Total prompt tokens found there.
        preemptions: Total times a running sequence lost its blocks to an older one.
        speculation: Totals of speculative decoding.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    speculation: SpeculationCounts = SpeculationCounts()


@dataclass(frozen=True)
class StepResult:
    """All that one step of the core has to say."""

    outputs: tuple[CoreOutput, ...] = ()
    stats: CoreStats = field(default_factory=CoreStats)
