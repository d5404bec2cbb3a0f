"""``POST /v1/chat/completions``."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from requant.engine.prompts import Prompt
from requant.engine.request_output import CompletionOutput, RequestOutput
from requant.server.chat_protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatRequest,
    ChatResponse,
)
from requant.server.logprobs import chat_logprobs, prompt_logprobs
from requant.server.protocol import PromptTokensDetails, Usage, new_id
from requant.server.serving import EventStream, Serving, unless_disconnected

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatResponse)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    serving: Serving = request.app.state.serving
    name = serving.model_name(body.model)
    body.check()
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.params(max_tokens=limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    text = await serving.engine.render_chat(
        [message.for_template() for message in body.messages],
        **{
            **(body.chat_template_kwargs or {}),
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
        },
    )
    # The template has written out whatever special tokens there are to be.
    prompt = await serving.engine.prepare(text, params, add_special_tokens=False, must_fit=True)
    run = _Run(serving, body, name, prompt)
    return EventStream(run.stream()) if body.stream else await unless_disconnected(request, run.whole())


class _Run:
    """One request being answered."""

    def __init__(self, serving: Serving, body: ChatRequest, name: str, prompt: Prompt) -> None:
        self._engine = serving.engine
        self._body = body
        self._name = name
        self._prompt = prompt
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._completion_tokens = 0

    async def whole(self) -> ChatResponse:
        """The response, once everything is there."""
        async with aclosing(self._engine.generate([self._prompt], delta=False)) as outputs:
            output = [output async for _, output in outputs][-1]
        self._completion_tokens = sum(len(part.token_ids) for part in output.outputs)
        return ChatResponse(
            id=self._id,
            created=self._created,
            model=self._name,
            choices=[
                ChatChoice(
                    index=part.index,
                    message=AnswerMessage(content=part.text),
                    logprobs=chat_logprobs(part.logprobs),
                    finish_reason=part.finish_reason,
                    stop_reason=part.stop_reason,
                )
                for part in output.outputs
            ],
            usage=self._usage(output),
            prompt_logprobs=None if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs),
        )

    async def stream(self) -> AsyncGenerator[ChatChunk, None]:
        """The chunks, as they come."""
        async with aclosing(self._engine.generate([self._prompt], delta=True)) as outputs:
            async for _, output in outputs:
                for part in output.outputs:
                    self._completion_tokens += len(part.token_ids)
                    for choice in self._chunk_choices(part):
                        yield self._chunk([choice])
        if self._body.wants_usage:
            yield self._chunk([], self._usage(output))

    def _chunk_choices(self, part: CompletionOutput) -> list[ChatChunkChoice]:
        choices = []
        if part.index not in self._begun:
            self._begun.add(part.index)
            choices.append(ChatChunkChoice(index=part.index, delta={"role": "assistant", "content": ""}))
        if part.text or part.logprobs or part.finish_reason:
            choices.append(
                ChatChunkChoice(
                    index=part.index,
                    delta={"content": part.text} if part.text else {},
                    logprobs=chat_logprobs(part.logprobs),
                    finish_reason=part.finish_reason,
                    stop_reason=part.stop_reason,
                )
            )
        return choices

    def _usage(self, output: RequestOutput) -> Usage:
        prompt_tokens = len(self._prompt.token_ids)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=output.num_cached_tokens),
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._name, choices=choices, usage=usage)
