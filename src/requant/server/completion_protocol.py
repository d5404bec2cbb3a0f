"""``/v1/completions``: the request, the response, and a stream's chunk."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from requant.server.errors import ApiError
from requant.server.protocol import GenerationRequest, Usage


class CompletionRequest(GenerationRequest):
    """Body of a request."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """The prompts, however many there are."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        single = bool(self.prompt) and isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if single else list(self.prompt)
        if not prompts:
            raise ApiError(400, "prompt is an empty list; accepted: at least one prompt", "prompt")
        return prompts

    def check(self) -> None:
        """Refuse what is not supported, or makes no sense together."""
        super().check()
        if self.suffix:
            raise ApiError(400, "suffix is not supported", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, f"best_of is {self.best_of}; accepted: the same as n ({self.n or 1})", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0; accepted: 1 or more, or 0 together with echo", "max_tokens")


class CompletionLogprobs(BaseModel):
    """Log-probabilities, in parallel lists; the prompt's first token has none."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)
    text_offset: list[int] = Field(default_factory=list)


class CompletionChoice(BaseModel):
    """One sequence, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = None


class CompletionResponse(BaseModel):
    """The response, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
