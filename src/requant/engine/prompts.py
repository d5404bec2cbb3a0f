"""From what a caller passes as a prompt to token ids that the core can run, or an error before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from requant.engine.interface import ModelFacts
from requant.engine.sampling_params import SamplingParams
from requant.engine.tokenizer import Tokenizer
from requant.errors import RequestError


class ContextLengthError(RequestError):
    """The prompt, or prompt and output together, do not fit the model's context."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that is ready to run.

    Attributes:
        text: As it was given, or None if token ids were given.
        token_ids: At least one, with room in the context for at least one new token.
        params: Its parameters, ``max_tokens`` resolved to what the context holds.
    """

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams


class InputProcessor:
    """Tokenizes and checks prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, facts: ModelFacts) -> None:
        self._tokenizer = tokenizer
        self._facts = facts

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        add_special_tokens: bool = True,
        must_fit: bool = False,
    ) -> Prompt:
        """Make a :class:`Prompt`.

        Args:
            prompt: Text, or token ids.
            params: How to generate.
            add_special_tokens: Tokenize a text with what the model puts around one (BOS).
            must_fit: Refuse a ``max_tokens`` that the context has no room for, rather than end there.

        Raises:
            RequestError: The prompt is empty or names a token that the model doesn't have; so does a parameter.
            ContextLengthError: The prompt is too long, or with ``must_fit`` the output could be.
        """
        text = prompt if isinstance(prompt, str) else None
        if not prompt:
            raise RequestError("the prompt is empty; accepted: at least one token")
        tokens = self._encode(prompt, add_special_tokens) if isinstance(prompt, str) else tuple(prompt)
        if not tokens:
            raise RequestError("the prompt has no tokens; accepted: at least one")
        self._check_ids("prompt", tokens)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", tuple(params.logit_bias))
        limit = self._limit(len(tokens), params.max_tokens, must_fit)
        return Prompt(text, tokens, replace(params, max_tokens=limit))

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not Unicode text: lone surrogate at {error.start}") from error
        return tuple(self._tokenizer.encode(text, add_special_tokens))

    def _check_ids(self, name: str, tokens: Sequence[int]) -> None:
        vocab = self._facts.vocab_size
        wrong = next((t for t in tokens if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab), None)
        if wrong is not None:
            raise RequestError(f"{name} has token id {wrong!r}; accepted: 0 to {vocab - 1}")

    def _limit(self, length: int, max_tokens: int | None, must_fit: bool) -> int:
        context = self._facts.max_model_len
        room = context - length
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {length} tokens; accepted: at most {context - 1}, "
                f"the model's context of {context} less one new token"
            )
        if must_fit and max_tokens is not None and max_tokens > room:
            raise ContextLengthError(
                f"the prompt has {length} tokens and max_tokens is {max_tokens}; "
                f"accepted: at most {context} together, the model's context"
            )
        return room if max_tokens is None else min(max_tokens, room)
