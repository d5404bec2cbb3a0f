"""What is asked and when: prompts of random tokens, and moments of arrival. Both follow from a seed alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from requant.errors import ConfigError

# A text of random tokens may be cut differently when it is read: tokens are put right this often, then taken as it is.
_ROUNDS = 10
_WORDS = 4096  # Different tokens in prompts, at most.
_TINY = 1e-9  # Against lengths that are a rounding error short of a whole number.


class Words(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids."""


@dataclass(frozen=True)
class Sample:
    """One request.

    Attributes:
        prompt: Its text.
        prompt_len: Tokens of that.
        output_len: Most tokens of the answer.
    """

    prompt: str
    prompt_len: int
    output_len: int


@dataclass(frozen=True)
class Lengths:
    """How long random requests are.

    Attributes:
        prefix: Tokens that all prompts begin with.
        prompt: Tokens behind them.
        output: Tokens of an answer.
        ratio: Share by which the latter two vary, evenly, up and down.
    """

    prefix: int
    prompt: int
    output: int
    ratio: float

    def draw(self, rng: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        """Lengths of ``count`` prompts, without their prefix, and of their answers."""
        return self._draw(rng, self.prompt, count, 0), self._draw(rng, self.output, count, 1)

    def _draw(self, rng: np.random.Generator, length: int, count: int, least: int) -> list[int]:
        change = length * self.ratio
        low, high = int(np.floor(length - change + _TINY)), int(np.ceil(length + change - _TINY))
        return [int(n) for n in rng.integers(max(low, least), max(high, least) + 1, count)]


def random_samples(
    tokenizer: Words, tokens: Sequence[int], lengths: Lengths, count: int, rng: np.random.Generator
) -> list[Sample]:
    """Requests with prompts of random tokens.

    Args:
        tokenizer: The model's.
        tokens: Ids to draw from: all that are not special.
        lengths: How long they are.
        count: How many.
        rng: Decides everything.

    Raises:
        ConfigError: There is no token to draw from.
    """
    if not tokens:
        raise ConfigError("the tokenizer has no token that is not special")
    ids = _words(tokenizer, tokens, rng)
    prefix = tokenizer.encode(_text(tokenizer, ids, [], lengths.prefix, rng)[0], add_special_tokens=False)
    samples = []
    for prompt_len, output_len in zip(*lengths.draw(rng, count), strict=True):
        text, length = _text(tokenizer, ids, prefix, max(prompt_len, 0 if prefix else 1), rng)
        samples.append(Sample(text, length, output_len))
    return samples


def _words(tokenizer: Words, tokens: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Some tokens that are themselves again when their text is read; parts of characters, for one, are not."""
    some = rng.choice(np.asarray(tokens), min(_WORDS, len(tokens)), replace=False)
    kept = [token for token in some if tokenizer.encode(tokenizer.decode([token]), add_special_tokens=False) == [token]]
    return np.asarray(kept) if kept else some


def _text(
    tokenizer: Words, ids: np.ndarray, prefix: list[int], length: int, rng: np.random.Generator
) -> tuple[str, int]:
    """A text that is read as the prefix and ``length`` more tokens, or nearly so, and how many it is read as."""
    wanted = len(prefix) + length
    now = prefix + [int(token) for token in rng.choice(ids, length)]
    for _ in range(_ROUNDS):
        text = tokenizer.decode(now)
        read = tokenizer.encode(text, add_special_tokens=False)
        if len(read) == wanted:
            break
        now = read[:wanted] + [int(token) for token in rng.choice(ids, max(wanted - len(read), 0))]
    return text, len(read)


def arrivals(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds from the beginning at which requests arrive, the first at 0.

    The time between two follows a gamma distribution of shape ``burstiness`` with mean ``1 / rate`` (1: a Poisson
    process), stretched so that the last one comes when it is due on average.

    Args:
        count: How many requests.
        rate: Requests a second; inf: all at once.
        burstiness: Below 1: in bursts; above: more evenly.
        rng: Decides them.
    """
    if count < 2 or rate == np.inf:
        return [0.0] * count
    between = rng.gamma(burstiness, 1 / (rate * burstiness), count - 1)
    times = np.concatenate([[0.0], np.cumsum(between)])
    if times[-1] > 0:
        times *= (count - 1) / rate / times[-1]
    return [float(time) for time in times]
