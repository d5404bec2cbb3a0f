"""A runner without a model, strict about the contract: what it computes comes out of the KV cache alone."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

import pytest

from requant.engine.core import EngineCore
from requant.engine.messages import CoreOutput, CoreRequest, TokenLogprobs
from requant.engine.runner_protocol import RunnerOutput, ScheduledSequence
from requant.engine.sampling_params import SamplingParams
from requant.engine.scheduler import SchedulerConfig

VOCAB = 50


def digest(previous: int, token: int) -> int:
    """The fake KV of a position: like a real one, it depends on every token up to there."""
    return crc32(array("q", [token]).tobytes(), previous)


def next_token(kv: int) -> int:
    return crc32(b"next", kv) % VOCAB


def logprob_of(token: int, kv: int) -> TokenLogprobs:
    return TokenLogprobs(token, -float(kv % 1000), 1 + kv % 7, ())


def alone(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The first ``count`` tokens that follow ``prompt``."""
    kv, output = 0, []
    for token in prompt:
        kv = digest(kv, token)
    for _ in range(count):
        output.append(next_token(kv))
        kv = digest(kv, output[-1])
    return tuple(output)


class FakeRunner:
    """Stores a digest of the history in each KV slot and samples from the last one.

    Args:
        drafts: How many tokens to draft for the next step; they are guessed right most of the time.
    """

    vocab_size = VOCAB

    def __init__(self, num_blocks: int, block_size: int, drafts: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.drafts = drafts
        self.kv: list[int | None] = [None] * (num_blocks * block_size)
        self.steps: list[tuple[ScheduledSequence, ...]] = []
        self.computed_tokens = 0

    def run(self, sequences: Sequence[ScheduledSequence]) -> list[RunnerOutput]:
        self.steps.append(tuple(sequences))
        self.computed_tokens += sum(sequence.length for sequence in sequences)
        written: set[int] = set()
        for sequence in sequences:
            assert not sequence.drafts or sequence.samples
            assert len(sequence.drafts) <= self.drafts
            slots = {self._slot(sequence, sequence.start + i) for i in range(sequence.length)}
            assert len(slots) == sequence.length, "a sequence writes a slot twice"
            assert not slots & written, "two sequences write the same slot"
            written |= slots
        # In scheduling order: a sequence may read blocks that an earlier one stores in the same step.
        for sequence in sequences:
            for p, token in enumerate(sequence.tokens, sequence.start):
                previous = self.kv[self._slot(sequence, p - 1)] if p else 0
                assert previous is not None
                self.kv[self._slot(sequence, p)] = digest(previous, token)
        return [self._output(sequence) for sequence in sequences]

    def _slot(self, sequence: ScheduledSequence, position: int) -> int:
        block = sequence.request.blocks[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _output(self, sequence: ScheduledSequence) -> RunnerOutput:
        request = sequence.request
        kvs = [self.kv[self._slot(sequence, p)] for p in range(sequence.stop)]
        expected = 0
        for kv, token in zip(kvs, request.tokens, strict=False):
            expected = digest(expected, token)
            assert kv == expected, "the KV cache does not hold this sequence's history"
        prompt_logprobs = tuple(logprob_of(request.prompt[p + 1], kvs[p]) for p in sequence.prompt_positions)
        if not sequence.samples:
            return RunnerOutput(prompt_logprobs=prompt_logprobs)
        kv = kvs[-1]
        assert kv is not None
        tokens = [next_token(kv)]
        logprobs = [logprob_of(tokens[0], kv)]
        for draft in sequence.drafts:
            if draft != tokens[-1]:
                break
            kv = digest(kv, draft)
            tokens.append(next_token(kv))
            logprobs.append(logprob_of(tokens[-1], kv))
        wanted = request.params.logprobs is not None
        drafts = self._guess(digest(kv, tokens[-1]))
        return RunnerOutput(tuple(tokens), tuple(logprobs) if wanted else (), prompt_logprobs, drafts)

    def _guess(self, kv: int) -> tuple[int, ...]:
        drafts = []
        for _ in range(self.drafts):
            right = next_token(kv)
            drafts.append(right if crc32(b"guess", kv) % 4 else (right + 1) % VOCAB)
            kv = digest(kv, right)
        return tuple(drafts)


class Harness:
    """An engine core over a fake runner, and what it has put out so far."""

    def __init__(self, **limits: int | bool) -> None:
        defaults = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "block_size": 4,
            "num_blocks": 64,
        }
        self.config = SchedulerConfig(**(defaults | limits))
        self.runner = FakeRunner(self.config.num_blocks, self.config.block_size, self.config.drafts)
        self.core = EngineCore(self.runner, self.config)
        self.outputs: dict[str, list[CoreOutput]] = {}

    def add(self, request_id: str, prompt: Iterable[int], eos: Iterable[int] = (), **params: object) -> None:
        params = {"max_tokens": 8, "temperature": 0.0} | params
        self.core.add_request(CoreRequest(request_id, tuple(prompt), SamplingParams(**params), frozenset(eos)))

    def step(self) -> tuple[CoreOutput, ...]:
        result = self.core.step()
        self.stats = result.stats
        for output in result.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return result.outputs

    def finish(self, most_steps: int = 10_000) -> None:
        for _ in range(most_steps):
            if not self.core.has_unfinished():
                return
            self.step()
        raise AssertionError(f"unfinished after {most_steps} steps")

    def tokens(self, request_id: str) -> tuple[int, ...]:
        return tuple(token for output in self.outputs.get(request_id, ()) for token in output.tokens)

    def reason(self, request_id: str) -> str | None:
        reasons = [output.finish_reason for output in self.outputs[request_id]]
        assert all(reason is None for reason in reasons[:-1]), "an output came after the last one"
        return reasons[-1]

    def assert_nothing_held(self) -> None:
        pool = self.core._scheduler.pool
        assert pool.num_free == pool.num_blocks
        assert pool.usage == 0
        assert all(pool.holders(block) == 0 for block in range(pool.num_blocks))
        assert (self.core._scheduler.num_running, self.core._scheduler.num_waiting) == (0, 0)


@pytest.fixture
def harness() -> Callable[..., Harness]:
    """Makes a :class:`Harness` from limits."""
    return Harness


@pytest.fixture
def generate_alone() -> Callable[[Sequence[int], int], tuple[int, ...]]:
    """The fake model's continuation of a prompt, computed without an engine."""
    return alone
