"""The front end's half of generation: what the core says in tokens becomes text, request by request."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from requant.engine.detokenizer import Detokenizer, OutputText
from requant.engine.messages import CoreOutput, CoreRequest, FinishReason, TokenLogprobs
from requant.engine.prompts import Prompt
from requant.engine.request_output import Candidate, CompletionOutput, FinishedRequest, RequestOutput, TokenLogprob
from requant.engine.tokenizer import Tokenizer


class OutputProcessor:
    """Keeps the open requests, and turns the core's outputs into theirs.

    A prompt with ``n`` sequences is ``n`` requests to the core, with seeds of their own.

    Args:
        tokenizer: Makes text of tokens.
        eos_token_ids: Tokens that end a sequence.
        on_finished: Told of every request that ended, aborted ones included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        on_finished: Callable[[FinishedRequest], None] = lambda request: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._on_finished = on_finished
        self._requests: dict[str, _Request] = {}
        self._owners: dict[str, tuple[_Request, _Sequence]] = {}

    def add(self, request_id: str, prompt: Prompt, delta: bool) -> list[CoreRequest]:
        """Open a request.

        Args:
            request_id: Unique among open requests.
            prompt: What to generate from.
            delta: Report what is new as it comes; False: report once, when all sequences have ended.

        Returns:
            What to give to the core.
        """
        request = _Request(request_id, prompt, delta, self._tokenizer)
        self._requests[request_id] = request
        self._owners.update({sequence.core_id: (request, sequence) for sequence in request.sequences})
        now = time.time()
        return [
            CoreRequest(sequence.core_id, prompt.token_ids, sequence.params, self._eos, now)
            for sequence in request.sequences
        ]

    def process(self, outputs: Iterable[CoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Take in one step of the core.

        Returns:
            What there is to report, and the core's requests that are to be aborted since a stop string ended
            them. Outputs of requests that are no longer open are dropped.
        """
        touched: dict[str, _Request] = {}
        abort: list[str] = []
        for output in outputs:
            if output.request_id not in self._owners:
                continue
            request, sequence = self._owners[output.request_id]
            request.note(output)
            sequence.feed(output)
            touched[request.id] = request
            if sequence.finish_reason is not None:
                del self._owners[output.request_id]
                if output.finish_reason is None:
                    abort.append(output.request_id)
        reports = [report for request in touched.values() if (report := request.report()) is not None]
        for request in touched.values():
            if request.finished:
                self._close(request)
        return reports, abort

    def abort(self, request_id: str) -> list[str]:
        """Forget an open request; what the core is to abort. Nothing if it is not open."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        running = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        for sequence in running:
            sequence.finish_reason = "abort"
            del self._owners[sequence.core_id]
        self._close(request)
        return [sequence.core_id for sequence in running]

    def request_of(self, core_id: str) -> str | None:
        """The open request that a request of the core belongs to."""
        return self._owners[core_id][0].id if core_id in self._owners else None

    def open_requests(self) -> list[str]:
        """Ids of the open requests."""
        return list(self._requests)

    def _close(self, request: "_Request") -> None:
        del self._requests[request.id]
        self._on_finished(request.summary())


class _Request:
    """One prompt and its sequences."""

    def __init__(self, request_id: str, prompt: Prompt, delta: bool, tokenizer: Tokenizer) -> None:
        self.id = request_id
        self._prompt = prompt
        self._delta = delta
        self._tokenizer = tokenizer
        self._arrival = time.monotonic()
        self._first_token: float | None = None
        self._cached: int | None = None
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.sequences = [_Sequence(self, prompt, index, tokenizer) for index in range(prompt.params.n)]

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def note(self, output: CoreOutput) -> None:
        """Take what an output says of the whole request; the sequence that comes first says it."""
        if self._cached is None:
            self._cached = output.cached_tokens
        if output.tokens and self._first_token is None:
            self._first_token = time.monotonic()
        if output.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = self._named_prompt_logprobs(output.prompt_logprobs)

    def report(self) -> RequestOutput | None:
        """What the caller is to see now, if anything."""
        if not self._delta and not self.finished:
            return None
        outputs = tuple(output for sequence in self.sequences if (output := sequence.take()) is not None)
        logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        if not outputs and logprobs is None:
            return None
        return RequestOutput(
            self.id,
            self._prompt.text,
            self._prompt.token_ids,
            logprobs,
            outputs,
            self.finished,
            self._cached or 0,
        )

    def summary(self) -> FinishedRequest:
        return FinishedRequest(
            self._arrival,
            self._first_token,
            time.monotonic(),
            len(self._prompt.token_ids),
            tuple(sequence.num_tokens for sequence in self.sequences),
            tuple(sequence.finish_reason or "abort" for sequence in self.sequences),
        )

    def _named_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> tuple[TokenLogprob | None, ...]:
        text, offset = Detokenizer(self._tokenizer), 0
        named: list[TokenLogprob | None] = []
        for token, entry in zip(self._prompt.token_ids, logprobs, strict=True):
            named.append(None if entry is None else _named(entry, self._tokenizer, offset))
            offset += len(text.add(token))
        return tuple(named)


class _Sequence:
    """One sequence of a request."""

    def __init__(self, request: _Request, prompt: Prompt, index: int, tokenizer: Tokenizer) -> None:
        seed = prompt.params.seed
        self.index = index
        self.core_id = f"{request.id}-{index}"
        self.params = replace(prompt.params, n=1, seed=None if seed is None else _wrap(seed + index))
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self._stop_reason: int | str | None = None
        self._text = OutputText(tokenizer, prompt.token_ids, self.params)
        self._name = partial(_named, tokenizer=tokenizer)
        self._new_tokens: list[int] = []
        self._new_logprobs: list[TokenLogprob] = []
        self._sum = 0.0
        self._reported = False

    def feed(self, output: CoreOutput) -> None:
        """Append an output's tokens, up to one that completes a stop string."""
        for position, token in enumerate(output.tokens):
            last = position == len(output.tokens) - 1
            self._new_tokens.append(token)
            self.num_tokens += 1
            if output.logprobs:
                entry = self._name(output.logprobs[position], offset=len(self._text.text))
                self._new_logprobs.append(entry)
                self._sum += entry.logprob
            ends_here = last and output.finish_reason == "stop"
            if ends_here and not self.params.include_stop_str_in_output:
                continue  # The stop token is no part of the text.
            stop = self._text.add(token, may_stop=self.num_tokens > self.params.min_tokens)
            if stop is not None:
                self.finish_reason, self._stop_reason = "stop", stop
                return
        if output.finish_reason is not None:
            self.finish_reason, self._stop_reason = output.finish_reason, output.stop_token
            stop = self._text.finish()
            if stop is not None:
                self.finish_reason, self._stop_reason = "stop", stop

    def take(self) -> CompletionOutput | None:
        """What is new since the last call, or None."""
        finished = self.finish_reason is not None
        text = self._text.take(finished)
        news = text or self._new_tokens or (finished and not self._reported)
        if not news:
            return None
        self._reported = finished
        tokens, self._new_tokens = tuple(self._new_tokens), []
        logprobs, self._new_logprobs = tuple(self._new_logprobs), []
        wanted = self.params.logprobs is not None
        return CompletionOutput(
            self.index,
            text,
            tokens,
            logprobs if wanted else None,
            self._sum if wanted else None,
            self.finish_reason,
            self._stop_reason,
        )


def _named(entry: TokenLogprobs, tokenizer: Tokenizer, offset: int) -> TokenLogprob:
    """Log-probabilities with the tokens' texts."""
    top = tuple(Candidate(token, tokenizer.token_text(token), logprob) for token, logprob in entry.top)
    return TokenLogprob(entry.token, tokenizer.token_text(entry.token), entry.logprob, entry.rank, offset, top)


def _wrap(seed: int) -> int:
    """A seed within signed 64 bits, whatever was added to it."""
    return (seed + 2**63) % 2**64 - 2**63
