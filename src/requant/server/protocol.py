"""What all generation endpoints take and give, in OpenAI's names; vLLM's extras lie at the top level too.

Fields of the wrong type are refused, not converted; null is as good as absent; unknown fields are ignored.
"""

import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from requant.engine.sampling_params import SamplingParams
from requant.server.errors import ApiError

# Fields that go to SamplingParams as they are, if given.
_AS_THEY_ARE = (
    *("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_logprobs", "skip_special_tokens"),
    "include_stop_str_in_output",
)


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """The fields that completions and chat completions share."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Refuse what one field alone does not show.

        Raises:
            ApiError: Two fields do not go together.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for requests with stream: true only", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs is not given in a stream", "prompt_logprobs")

    def params(self, **more: Any) -> SamplingParams:
        """The sampling parameters: what was given, ``more``, and the defaults.

        Raises:
            RequestError: A value is outside what is accepted.
            ApiError: ``logit_bias`` has a key that is not a token id.
        """
        given = {name: value for name in _AS_THEY_ARE if (value := getattr(self, name)) is not None}
        return SamplingParams(**{**given, **more}, logit_bias=self._logit_bias())

    def _logit_bias(self) -> dict[int, float]:
        try:
            return {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError as error:
            raise ApiError(400, f"logit_bias has a key that is not a token id: {error}", "logit_bias") from error


class PromptTokensDetails(BaseModel):
    """Part of :class:`Usage`."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Tokens that a request took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = Field(default_factory=PromptTokensDetails)


def new_id(kind: str) -> str:
    """An id for a response: ``cmpl-…``, ``chatcmpl-…``."""
    return f"{kind}-{uuid.uuid4().hex}"
