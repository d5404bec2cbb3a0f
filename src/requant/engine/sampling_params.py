"""How to generate: vLLM's names, meanings and defaults, validated when constructed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from requant.errors import RequestError


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
        RequestError: A value is outside what is accepted; the message names the parameter.
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

    def __post_init__(self) -> None:
        """Normalize ``stop`` given as one string or a list, and check every range."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for name, value, accepted, ok in self._ranges():
            if not ok:
                raise RequestError(f"{name} is {value!r}; accepted: {accepted}")

    def _ranges(self) -> list[tuple[str, object, str, bool]]:
        limit = self.max_tokens
        return [
            ("n", self.n, "1 or more", self.n >= 1),
            ("max_tokens", limit, "1 or more", limit is None or limit >= 1),
            ("min_tokens", self.min_tokens, "0 to max_tokens", 0 <= self.min_tokens <= (limit or self.min_tokens)),
            ("temperature", self.temperature, "0 or more", 0.0 <= self.temperature < float("inf")),
            ("top_p", self.top_p, "above 0, at most 1", 0.0 < self.top_p <= 1.0),
            ("top_k", self.top_k, "-1, 0 (both: all) or more", self.top_k >= -1),
            ("min_p", self.min_p, "0 to 1", 0.0 <= self.min_p <= 1.0),
            ("presence_penalty", self.presence_penalty, "-2 to 2", -2.0 <= self.presence_penalty <= 2.0),
            ("frequency_penalty", self.frequency_penalty, "-2 to 2", -2.0 <= self.frequency_penalty <= 2.0),
            ("repetition_penalty", self.repetition_penalty, "above 0", 0.0 < self.repetition_penalty < float("inf")),
            ("seed", self.seed, "a whole number within 64 bits", self.seed is None or -(2**63) <= self.seed < 2**63),
            ("stop", self.stop, "non-empty strings", all(isinstance(s, str) and s for s in self.stop)),
            ("logprobs", self.logprobs, "0 to 20", self.logprobs is None or 0 <= self.logprobs <= 20),
            ("prompt_logprobs", self.prompt_logprobs, "0 to 20", self._in_20(self.prompt_logprobs)),
            ("logit_bias", dict(self.logit_bias), "-100 to 100", all(abs(b) <= 100 for b in self.logit_bias.values())),
        ]

    @staticmethod
    def _in_20(value: int | None) -> bool:
        return value is None or 0 <= value <= 20
