"""``POST /v1/completions``."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from requant.engine.prompts import Prompt
from requant.engine.request_output import CompletionOutput, RequestOutput, TokenLogprob
from requant.engine.sampling_params import SamplingParams
from requant.server.completion_protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from requant.server.logprobs import append_completion_logprobs, prompt_logprobs
from requant.server.protocol import Usage, new_id
from requant.server.serving import EventStream, Serving, unless_disconnected

router = APIRouter()

_DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", response_model=CompletionResponse)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue one prompt or several, given as texts or as token ids."""
    serving: Serving = request.app.state.serving
    name = serving.model_name(body.model)
    body.check()
    params = _params(body)
    prompts = [
        await serving.engine.prepare(prompt, params, body.add_special_tokens, must_fit=body.max_tokens is not None)
        for prompt in body.prompts()
    ]
    run = _Run(serving, body, name, prompts)
    return EventStream(run.stream()) if body.stream else await unless_disconnected(request, run.whole())


def _params(body: CompletionRequest) -> SamplingParams:
    # To score a prompt (max_tokens 0 with echo), the core has to run it, and gives a token that nobody sees.
    limit = _DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    of_prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        of_prompt = max(of_prompt or 0, body.logprobs)
    return body.params(max_tokens=limit, logprobs=body.logprobs, prompt_logprobs=of_prompt)


class _Run:
    """One request being answered."""

    def __init__(self, serving: Serving, body: CompletionRequest, name: str, prompts: list[Prompt]) -> None:
        self._engine = serving.engine
        self._body = body
        self._name = name
        self._prompts = prompts
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._n = body.n or 1
        self._echoed = [self._echo(prompt) for prompt in prompts]
        self._of_prompt: dict[int, tuple[TokenLogprob | None, ...]] = {}
        self._begun: set[int] = set()
        self._usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))

    async def whole(self) -> CompletionResponse:
        """The response, once everything is there."""
        choices: list[CompletionChoice] = []
        async with aclosing(self._engine.generate(self._prompts, delta=False)) as outputs:
            async for index, output in outputs:
                choices += self._choices(index, output)
        return self._response(sorted(choices, key=lambda choice: choice.index), self._usage)

    async def stream(self) -> AsyncGenerator[CompletionResponse, None]:
        """The chunks, as they come."""
        async with aclosing(self._engine.generate(self._prompts, delta=True)) as outputs:
            async for index, output in outputs:
                for choice in self._choices(index, output):
                    if choice.text or choice.logprobs or choice.finish_reason:
                        yield self._response([choice])
        if self._body.wants_usage:
            yield self._response([], self._usage)

    def _echo(self, prompt: Prompt) -> str:
        if not self._body.echo:
            return ""
        return self._engine.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _choices(self, prompt_index: int, output: RequestOutput) -> list[CompletionChoice]:
        if output.prompt_logprobs is not None:
            self._of_prompt[prompt_index] = output.prompt_logprobs
        if output.finished:
            self._usage.prompt_tokens_details.cached_tokens += output.num_cached_tokens
        return [self._choice(prompt_index, part) for part in output.outputs]

    def _choice(self, prompt_index: int, part: CompletionOutput) -> CompletionChoice:
        body, index = self._body, prompt_index * self._n + part.index
        first = index not in self._begun
        self._begun.add(index)
        scored_only = body.max_tokens == 0
        text = self._echoed[prompt_index] if first else ""
        if not scored_only:
            text += part.text
            self._usage.completion_tokens += len(part.token_ids)
        of_prompt = self._of_prompt.get(prompt_index)
        reason = part.finish_reason
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(prompt_index, () if scored_only else part.logprobs or (), first),
            finish_reason="length" if scored_only and reason else reason,
            stop_reason=None if scored_only else part.stop_reason,
            prompt_logprobs=prompt_logprobs(of_prompt) if of_prompt and body.prompt_logprobs is not None else None,
        )

    def _logprobs(self, prompt_index: int, entries: tuple[TokenLogprob, ...], first: bool) -> CompletionLogprobs | None:
        count = self._body.logprobs
        of_prompt = self._of_prompt.get(prompt_index, ()) if self._body.echo and first else ()
        if count is None or not (entries or of_prompt):
            return None
        lists = CompletionLogprobs()
        if of_prompt:
            # The prompt's first token has nothing before it, hence no probability.
            lists.tokens.append(self._engine.decode(self._prompts[prompt_index].token_ids[:1]))
            lists.token_logprobs.append(None)
            lists.top_logprobs.append(None)
            lists.text_offset.append(0)
            append_completion_logprobs(lists, [entry for entry in of_prompt if entry is not None], count, 0)
        append_completion_logprobs(lists, entries, count, len(self._echoed[prompt_index]))
        return lists

    def _response(self, choices: list[CompletionChoice], usage: Usage | None = None) -> CompletionResponse:
        if usage is not None:
            usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
        return CompletionResponse(id=self._id, created=self._created, model=self._name, choices=choices, usage=usage)
