"""The engine core: takes requests, steps the model, ends sequences. Token ids only; text is the front end's."""

from collections.abc import Iterable

from requant.engine.messages import CoreOutput, CoreRequest, CoreStats, FinishReason, StepResult, TokenLogprobs
from requant.engine.request import Request
from requant.engine.runner_protocol import Runner, RunnerOutput, ScheduledSequence
from requant.engine.scheduler import Scheduler, SchedulerConfig
from requant.engine.speculation import Speculation
from requant.errors import RequestError


class EngineCore:
    """Continuous batching over a :class:`~requant.engine.runner_protocol.Runner`.

    Not thread-safe: one thread adds, aborts and steps. An error that :meth:`step` lets through comes from the
    runner and leaves the core unusable.

    Args:
        runner: Computes the steps; owns the KV cache.
        config: Limits; its ``block_size`` and ``num_blocks`` describe the runner's KV cache.
    """

    def __init__(self, runner: Runner, config: SchedulerConfig) -> None:
        if (config.block_size, config.num_blocks) != (runner.block_size, runner.num_blocks):
            raise ValueError(
                f"scheduler of {config.num_blocks} blocks of {config.block_size} tokens for a runner "
                f"of {runner.num_blocks} blocks of {runner.block_size}"
            )
        self._runner = runner
        self._config = config
        self._scheduler = Scheduler(config)
        self._requests: dict[str, Request] = {}
        self._aborted: list[CoreOutput] = []
        self._speculation = Speculation(config.drafts)
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def has_unfinished(self) -> bool:
        """Whether another :meth:`step` has anything to say: requests to go on with, or aborts to report."""
        return bool(self._requests or self._aborted)

    def add_request(self, source: CoreRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: The prompt is empty, too long for the model or the KV cache, or names a token that the
                model doesn't have; so does the logit bias; or the id belongs to an unfinished request.
        """
        self._check(source)
        request = Request(source, self._config.context)
        self._requests[request.id] = request
        self._scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now, at whatever point they are; ids of none are passed over.

        Blocks are free at once; the next :meth:`step` reports each request's end with the reason "abort".
        """
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._scheduler.finish(request)
                self._aborted.append(CoreOutput(request_id, finish_reason="abort"))

    def step(self) -> StepResult:
        """Run one step of the model for whatever is scheduled, and say what came of it."""
        outputs, self._aborted = self._aborted, []
        sequences = self._scheduler.schedule().sequences
        if sequences:
            results = self._runner.run(sequences)
            for sequence, result in zip(sequences, results, strict=True):
                self._note_drafts(sequence, result)
                output = self._accept(sequence.request, result)
                if output is not None:
                    outputs.append(output)
        self._speculation.log()
        return StepResult(tuple(outputs), self._stats())

    def _note_drafts(self, sequence: ScheduledSequence, result: RunnerOutput) -> None:
        """The KV of accepted drafts is there already; count them, and keep the next ones."""
        accepted = max(len(result.tokens) - 1, 0)
        sequence.request.computed += accepted
        sequence.request.drafts = result.drafts
        self._speculation.note(len(sequence.drafts), accepted)

    def _accept(self, request: Request, result: RunnerOutput) -> CoreOutput | None:
        """Add what a step gave to the request; None while it has no new token to show."""
        request.prompt_logprobs += result.prompt_logprobs
        if not result.tokens:
            return None
        first = not request.output
        tokens, reason, stop_token = self._append(request, result.tokens)
        if reason is not None:
            self._scheduler.finish(request)
            del self._requests[request.id]
        self._generation_tokens += len(tokens)
        if first:
            self._prompt_tokens += len(request.prompt)
        return CoreOutput(
            request.id,
            tokens=tokens,
            logprobs=result.logprobs[: len(tokens)],
            prompt_logprobs=self._prompt_logprobs(request) if first else None,
            finish_reason=reason,
            stop_token=stop_token,
            cached_tokens=request.cached_tokens or 0,
        )

    @staticmethod
    def _append(request: Request, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
        """Append tokens up to one that ends the sequence: (those appended, the reason, the stop token)."""
        params = request.params
        for index, token in enumerate(tokens):
            may_stop = len(request.output) >= params.min_tokens
            request.append(token)
            taken = tokens[: index + 1]
            if may_stop and not params.ignore_eos and token in request.eos_token_ids:
                return taken, "stop", None
            if may_stop and token in params.stop_token_ids:
                return taken, "stop", token
            if len(request.tokens) >= request.max_length:
                return taken, "length", None
        return tokens, None, None

    @staticmethod
    def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        if request.params.prompt_logprobs is None:
            return None
        return (None, *request.prompt_logprobs)

    def _stats(self) -> CoreStats:
        scheduler = self._scheduler
        return CoreStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_usage=scheduler.pool.usage,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            speculation=self._speculation.counts,
        )

    def _check(self, source: CoreRequest) -> None:
        length, model_len, context = len(source.prompt), self._config.max_model_len, self._config.context
        if source.request_id in self._requests:
            raise RequestError(f"request id {source.request_id!r} is taken by an unfinished request")
        if source.params.n != 1:
            raise RequestError(f"n is {source.params.n}; accepted: 1, one sequence per request to the core")
        if length == 0:
            raise RequestError("the prompt is empty; accepted: at least one token")
        if length >= model_len:
            raise RequestError(
                f"the prompt has {length} tokens; accepted: at most {model_len - 1}, "
                f"the context of {model_len} less one new token"
            )
        if length >= context:
            raise RequestError(
                f"the prompt has {length} tokens; accepted: at most {context - 1}, "
                f"what the whole KV cache of {context} tokens holds less one new token"
            )
        vocab = self._runner.vocab_size
        for name, tokens in (("prompt", source.prompt), ("logit_bias", tuple(source.params.logit_bias))):
            low, high = min(tokens, default=0), max(tokens, default=0)
            if low < 0 or high >= vocab:
                raise RequestError(f"{name} has token id {low if low < 0 else high}; accepted: 0 to {vocab - 1}")
