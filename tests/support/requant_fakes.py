"""A tokenizer and an engine core for tests of the front end: small, deterministic, and able to fail on demand.

The core answers with the prompt's own tokens, over and over, so that a test chooses the output by its prompt. Special
tokens in the prompt make it do more; see :class:`FakeCore`. Nothing here needs torch, so its process starts fast.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from requant.engine.config import EngineConfig
from requant.engine.messages import CoreOutput, CoreRequest, CoreStats, StepResult, TokenLogprobs
from requant.errors import RecipeError, RequestError

EOS = "<|end|>"
SPECIAL = [
    EOS,
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|stall|>",
    "<|wait|>",
    "<|raise|>",
    "<|exit|>",
    "<|refuse|>",
]
VOCAB_SIZE = 512
CONTEXT = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if shout is defined %}{{ shout }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A byte-level BPE tokenizer: common ASCII words are one token, other characters one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 4], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return folder


def special(token: str) -> int:
    """Id of a special token."""
    return SPECIAL.index(token)


def logprob_of(token: int) -> float:
    """What the core says of every token, wherever it stands."""
    return -(1 + token % 7) / 8


class _Running:
    def __init__(self, request: CoreRequest) -> None:
        self.request = request
        self.made = 0

    def next(self) -> int:
        prompt = self.request.prompt
        self.made += 1
        return prompt[(self.made - 1 + (self.request.params.seed or 0)) % len(prompt)]


class FakeCore:
    """Answers with the prompt, rotated left by the seed, until a limit or an end-of-sequence token.

    ``<|stall|>`` in the prompt: one token, then nothing until aborted. ``<|wait|>``: nothing until some request has
    been aborted. ``<|raise|>``: :meth:`step` raises. ``<|exit|>``: the process exits. ``<|refuse|>``: not accepted.
    Prompts report half of their tokens as cached.
    """

    def __init__(self, tokens_per_step: int = 1) -> None:
        self._tokens_per_step = tokens_per_step
        self._running: dict[str, _Running] = {}
        self._aborted: list[CoreOutput] = []
        self._aborts = 0
        self._prompt_tokens = 0
        self._generated = 0

    def add_request(self, source: CoreRequest) -> None:
        if special("<|refuse|>") in source.prompt:
            raise RequestError("the core refuses this prompt")
        self._running[source.request_id] = _Running(source)
        self._prompt_tokens += len(source.prompt)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._running.pop(request_id, None) is not None:
                self._aborts += 1
                self._aborted.append(CoreOutput(request_id, finish_reason="abort"))

    def has_unfinished(self) -> bool:
        return bool(self._running or self._aborted)

    def step(self) -> StepResult:
        outputs, self._aborted = self._aborted, []
        for running in list(self._running.values()):
            output = self._advance(running)
            if output is not None:
                outputs.append(output)
        if not outputs:
            time.sleep(0.001)  # Nobody can be served: don't keep a processor busy.
        return StepResult(tuple(outputs), self._stats())

    def _advance(self, running: _Running) -> CoreOutput | None:
        request, prompt = running.request, running.request.prompt
        if special("<|raise|>") in prompt:
            raise RuntimeError("the fake core was told to fail")
        if special("<|exit|>") in prompt:
            os._exit(7)
        if special("<|stall|>") in prompt and running.made:
            return None
        if special("<|wait|>") in prompt and not self._aborts:
            return None
        first, params = running.made == 0, request.params
        tokens: list[int] = []
        reason, stop_token = None, None
        while reason is None and len(tokens) < self._tokens_per_step:
            token = running.next()
            tokens.append(token)
            may_stop = running.made > params.min_tokens
            if may_stop and not params.ignore_eos and token in request.eos_token_ids:
                reason = "stop"
            elif may_stop and token in params.stop_token_ids:
                reason, stop_token = "stop", token
            elif running.made == params.max_tokens:
                reason = "length"
        self._generated += len(tokens)
        if reason is not None:
            del self._running[request.request_id]
        logprobs = tuple(_logprobs(token, params.logprobs) for token in tokens) if params.logprobs is not None else ()
        of_prompt = None
        if first and params.prompt_logprobs is not None:
            of_prompt = (None, *(_logprobs(token, params.prompt_logprobs) for token in prompt[1:]))
        return CoreOutput(
            request.request_id, tuple(tokens), logprobs, of_prompt, reason, stop_token, cached_tokens=len(prompt) // 2
        )

    def _stats(self) -> CoreStats:
        return CoreStats(
            running=len(self._running),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated,
            prefix_queries=100,
            prefix_hits=40,
        )


def _logprobs(token: int, count: int) -> TokenLogprobs:
    top = tuple(((token + step) % VOCAB_SIZE, logprob_of(token) - step) for step in range(count))
    return TokenLogprobs(token, logprob_of(token), 1, top)


@dataclass(frozen=True)
class FakeBuilt:
    core: FakeCore
    max_model_len: int = CONTEXT
    vocab_size: int = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset()
    report_path: str | None = None
    cache_writer: None = None


def build(config: EngineConfig) -> FakeBuilt:
    """A core; with ``online_quant_info_dir``, a file there stays locked for as long as this process lives."""
    if config.quant.online_quant_info_dir is not None:
        lock = os.open(Path(config.quant.online_quant_info_dir) / "alive", os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return FakeBuilt(FakeCore(), max_model_len=config.model.max_model_len or CONTEXT)


def build_three_a_step(config: EngineConfig) -> FakeBuilt:
    """A core that makes three tokens in a step."""
    return FakeBuilt(FakeCore(tokens_per_step=3))


def refuse_to_build(config: EngineConfig) -> FakeBuilt:
    """What the user gave is not acceptable."""
    raise RecipeError("the recipe names\nno format")


def fail_to_build(config: EngineConfig) -> FakeBuilt:
    """A defect, not the user's fault."""
    raise RuntimeError("out of luck")


def exit_while_building(config: EngineConfig) -> FakeBuilt:
    """The process is gone without a word."""
    os._exit(9)


def never_ready(config: EngineConfig) -> FakeBuilt:
    """Builds for as long as it is let; holds the lock that :func:`build` holds, and says so."""
    build(config)
    print("building", flush=True)
    while True:
        time.sleep(60)
