"""How to generate: vLLM's names, meanings and defaults, validated when constructed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real

from requant.errors import RequestError

MAX_LOGPROBS = 20
"""Most top log-probabilities a position can be asked for."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow, and change nothing."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one generation request.

    Attributes:
        n: Number of sequences to generate from the prompt.
        max_tokens: Most new tokens; None: as many as the context holds.
        min_tokens: No end-of-sequence or stop token is sampled before this many new tokens.
        temperature: 0 is greedy.
        top_p: Keep the smallest set of tokens whose probability reaches this.
        top_k: Keep the k most likely tokens; 0 or -1: all.
        min_p: Keep tokens at least this likely relative to the most likely one.
        presence_penalty: Subtracted once from the logit of each token already generated.
        frequency_penalty: Subtracted for every time the token was generated.
        repetition_penalty: Logits of tokens in prompt or output are divided by it if positive, else multiplied.
        seed: Makes this request's samples reproducible, whatever else is in the batch.
        stop: Strings that end the sequence; they are cut from the text unless ``include_stop_str_in_output``.
        stop_token_ids: Tokens that end the sequence.
        include_stop_str_in_output: Keep the stop string (or the stop token's text) in the text.
        ignore_eos: Go on after an end-of-sequence token.
        logprobs: Number of top log-probabilities for every new token; None: none; at most 20.
        prompt_logprobs: The same for the prompt's tokens.
        logit_bias: Token id → bias added to its logit, within [-100, 100].
        skip_special_tokens: Leave special tokens out of the text.

    Raises:
        RequestError: A value is of the wrong type or outside what is accepted; the message names the parameter.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True

    @cached_property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a random choice."""
        return self.temperature < GREEDY_BELOW

    @cached_property
    def most_likely(self) -> bool:
        """Whether it is that of the model's own logits, which nothing edits."""
        penalized = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return self.greedy and not (penalized or self.logit_bias or self.min_tokens)

    def __post_init__(self) -> None:
        """Normalize the collections (one string, a list, None, …) to plain data, and check every parameter."""
        for name, normalize in _COLLECTIONS.items():
            object.__setattr__(self, name, normalize(getattr(self, name)))
        for name, (accepted, holds) in _CHECKS.items():
            value = getattr(self, name)
            if not holds(value):
                raise RequestError(f"{name} is {value!r}; accepted: {accepted}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}; accepted: at most max_tokens, {self.max_tokens}")


def _int_within(low: float, high: float = math.inf) -> Callable[[object], bool]:
    return lambda value: isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high


def _number(holds: Callable[[float], bool]) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        try:
            number = float(value)
        except OverflowError:  # an int beyond the floats
            return False
        return math.isfinite(number) and holds(number)

    return check


def _or_none(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or holds(value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _sequence(value: object) -> object:
    """A list, tuple or set as a tuple, nothing as ``()``; anything else stays, for the check to refuse."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else value


def _strings(value: object) -> object:
    return (value,) if isinstance(value, str) else _sequence(value)


def _mapping(value: object) -> object:
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else value


def _is_bias(value: object) -> bool:
    within = _number(lambda bias: abs(bias) <= 100)
    return isinstance(value, dict) and all(_token(token) and within(bias) for token, bias in value.items())


_token = _int_within(0)
_flag = ("true or false", _is_bool)
_penalty = ("a number from -2 to 2", _number(lambda x: abs(x) <= 2))
_top = (f"a whole number from 0 to {MAX_LOGPROBS}, or none", _or_none(_int_within(0, MAX_LOGPROBS)))

_COLLECTIONS: dict[str, Callable[[object], object]] = {
    "stop": _strings,
    "stop_token_ids": _sequence,
    "logit_bias": _mapping,
}

_CHECKS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "n": ("a whole number, 1 or more", _int_within(1)),
    "max_tokens": ("a whole number, 1 or more, or none", _or_none(_int_within(1))),
    "min_tokens": ("a whole number from 0 to max_tokens", _int_within(0)),
    "temperature": ("a number, 0 or more", _number(lambda x: x >= 0)),
    "top_p": ("a number above 0, at most 1", _number(lambda x: 0 < x <= 1)),
    "top_k": ("a whole number: -1 or 0 (all), or more", _int_within(-1)),
    "min_p": ("a number from 0 to 1", _number(lambda x: 0 <= x <= 1)),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "repetition_penalty": ("a number above 0", _number(lambda x: x > 0)),
    "seed": ("a whole number within 64 bits, or none", _or_none(_int_within(-(2**63), 2**63 - 1))),
    "stop": (
        "a non-empty string or a list of them",
        lambda value: isinstance(value, tuple) and all(isinstance(s, str) and s for s in value),
    ),
    "stop_token_ids": (
        "a list of token ids",
        lambda value: isinstance(value, tuple) and all(map(_token, value)),
    ),
    "include_stop_str_in_output": _flag,
    "ignore_eos": _flag,
    "logprobs": _top,
    "prompt_logprobs": _top,
    "logit_bias": ("token ids with a bias from -100 to 100 each", _is_bias),
    "skip_special_tokens": _flag,
}
