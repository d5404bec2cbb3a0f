"""Random workloads: every request gets what it would get alone, and nothing is left behind."""

import random
from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]
Alone = Callable[..., tuple[int, ...]]


def limits(rng: random.Random) -> dict[str, int | bool]:
    seqs = rng.choice([1, 2, 5, 16])
    block_size = rng.choice([1, 2, 4, 16])
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": seqs + rng.choice([0, 1, 7, 60]),
        "max_model_len": 48,
        "block_size": block_size,
        "num_blocks": -(-48 // block_size) + rng.choice([0, 1, 3, 30]),
        "enable_prefix_caching": rng.random() < 0.7,
    }


def prompt(rng: random.Random, prefixes: list[list[int]]) -> list[int]:
    shared = rng.choice(prefixes)
    return shared[: rng.randrange(len(shared) + 1)] + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]


def expected_tokens(alone: tuple[int, ...], stops: set[int], min_tokens: int) -> tuple[int, ...]:
    for index, token in enumerate(alone):
        if index >= min_tokens and token in stops:
            return alone[: index + 1]
    return alone


@pytest.mark.parametrize("seed", range(120))
def test_everyone_gets_what_they_would_get_alone(harness: Make, generate_alone: Alone, seed: int) -> None:
    rng = random.Random(seed)
    h = harness(drafts=rng.choice([0, 0, 1, 3, 8]), **limits(rng))
    prefixes = [[rng.randrange(50) for _ in range(24)] for _ in range(3)]
    expected: dict[str, tuple[int, ...]] = {}
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for number in range(40):
        for _ in range(rng.choice([0, 0, 1, 4])):
            h.step()
        name = f"r{number}"
        tokens = prompt(rng, prefixes)
        max_tokens = rng.choice([1, 3, 10, 30])
        min_tokens = rng.randrange(max_tokens)
        stops = set(rng.sample(range(50), rng.choice([0, 2])))
        room = 48 - len(tokens)
        alone = generate_alone(tokens, min(max_tokens, room))
        expected[name] = expected_tokens(alone, stops, min_tokens)
        prompts[name] = tokens
        h.add(
            name,
            tokens,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=sorted(stops),
            prompt_logprobs=rng.choice([None, None, 0]),
        )
        if rng.random() < 0.15:
            victim = rng.choice(list(expected))
            ended = victim in h.outputs and h.outputs[victim][-1].finish_reason is not None
            h.core.abort([victim])
            aborted |= set() if ended else {victim}
    h.finish()

    h.assert_nothing_held()
    for name, tokens in expected.items():
        if name in aborted:
            assert h.reason(name) == "abort"
            assert h.tokens(name) == tokens[: len(h.tokens(name))]
        else:
            assert h.tokens(name) == tokens
            assert h.reason(name) in ("stop", "length")
        for output in h.outputs[name]:
            if output.prompt_logprobs is not None:
                assert [entry.token for entry in output.prompt_logprobs[1:]] == prompts[name][1:]
    for step in h.runner.steps:
        assert len(step) <= h.config.max_num_seqs
        assert sum(sequence.length for sequence in step) <= h.config.max_num_batched_tokens
        assert len({sequence.request.id for sequence in step}) == len(step)


def test_pressure_preempts_and_prefixes_hit(harness: Make, generate_alone: Alone) -> None:
    h = harness(max_num_seqs=8, num_blocks=14, max_num_batched_tokens=64)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, i] for i in range(12)]
    for i, tokens in enumerate(prompts):
        h.add(str(i), tokens, max_tokens=20)
    h.finish()
    assert h.stats.preemptions > 0
    assert h.stats.prefix_hits >= 11 * 8
    for i, tokens in enumerate(prompts):
        assert h.tokens(str(i)) == generate_alone(tokens, 20)
    h.assert_nothing_held()


@pytest.mark.parametrize("caching", [True, False])
def test_prompt_logprobs_survive_preemption_in_mid_prompt(harness: Make, caching: bool) -> None:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 2, "block_size": 1, "max_model_len": 30}

    def start(num_blocks: int) -> Any:
        h = harness(num_blocks=num_blocks, enable_prefix_caching=caching, **limits)
        h.add("old", [1, 2, 3, 4, 5], max_tokens=20)
        for _ in range(3):
            h.step()
        h.add("asking", list(range(20)), prompt_logprobs=0)
        return h

    roomy, tight = start(60), start(30)
    roomy.finish()
    while tight.core.has_unfinished() and tight.step() and tight.stats.preemptions == 0:
        pass
    positions = [p for step in tight.runner.steps for s in step for p in s.prompt_positions]
    assert 0 < len(positions) < 19
    tight.finish()
    positions = [p for step in tight.runner.steps for s in step for p in s.prompt_positions]
    assert positions == list(range(19))
    assert tight.outputs["asking"][0].prompt_logprobs == roomy.outputs["asking"][0].prompt_logprobs
    assert roomy.stats.preemptions == 0


def test_workload_is_worth_its_name(harness: Make) -> None:
    """The random limits do reach preemption, chunked prompts and prefix hits."""
    preemptions = chunks = hits = 0
    for seed in range(20):
        rng = random.Random(seed)
        h = harness(**limits(rng))
        prefixes = [[rng.randrange(50) for _ in range(24)]]
        for number in range(20):
            h.add(str(number), prompt(rng, prefixes), max_tokens=20)
        h.finish()
        preemptions += h.stats.preemptions
        hits += h.stats.prefix_hits
        chunks += sum(not sequence.samples for step in h.runner.steps for sequence in step)
    assert preemptions > 20
    assert chunks > 20
    assert hits > 20
