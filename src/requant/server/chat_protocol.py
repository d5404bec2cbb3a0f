"""``/v1/chat/completions``: the request, the response, and a stream's chunk."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from requant.server.errors import ApiError
from requant.server.protocol import GenerationRequest, Usage


class ContentPart(BaseModel):
    """One part of a message; only text is understood."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message of a conversation; further fields go to the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[ContentPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: the content is one text.

        Raises:
            ApiError: A part is not text.
        """
        content = self.content
        if isinstance(content, list):
            for part in content:
                if part.type != "text":
                    raise ApiError(400, f"a content part has type {part.type!r}; accepted: text", "messages")
                if part.text is None:
                    raise ApiError(400, "a content part of type 'text' has no text", "messages")
            content = "\n".join(part.text or "" for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ResponseFormat(BaseModel):
    """``response_format``."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str


class ChatRequest(GenerationRequest):
    """Body of a request."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse what is not supported, or makes no sense together."""
        super().check()
        if (self.tools and self.tool_choice != "none") or self.functions:
            raise ApiError(400, "tools are not supported; leave them out, or set tool_choice to 'none'", "tools")
        if self.response_format is not None and self.response_format.type != "text":
            kind = self.response_format.type
            raise ApiError(400, f"response_format has type {kind!r}; accepted: text", "response_format")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is for requests with logprobs: true only", "top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            message = "continue_final_message and add_generation_prompt exclude each other; set one to false"
            raise ApiError(400, message, "continue_final_message")


class TopLogprob(BaseModel):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatTokenLogprob]


class AnswerMessage(BaseModel):
    """A whole answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatChunkChoice(BaseModel):
    """What is new of one answer; its delta has ``role`` once, first, and ``content``."""

    index: int
    delta: dict[str, str]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatResponse(BaseModel):
    """The response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = None


class ChatChunk(BaseModel):
    """One chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
