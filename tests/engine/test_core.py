from collections.abc import Callable
from typing import Any

import pytest

from requant.engine.core import EngineCore
from requant.errors import RequestError

Make = Callable[..., Any]
Alone = Callable[..., tuple[int, ...]]


def test_generates_until_max_tokens(harness: Make, generate_alone: Alone) -> None:
    h = harness()
    h.add("a", [1, 2, 3], max_tokens=5)
    h.finish()
    assert h.tokens("a") == generate_alone([1, 2, 3], 5)
    assert h.reason("a") == "length"
    h.assert_nothing_held()


def test_no_output_before_the_prompt_is_done(harness: Make) -> None:
    h = harness(max_num_batched_tokens=4)
    h.add("a", range(10))
    assert [len(h.step()) for _ in range(3)] == [0, 0, 1]


def test_ends_at_eos(harness: Make, generate_alone: Alone) -> None:
    expected = generate_alone([1], 6)
    eos = expected[3]
    h = harness()
    h.add("stops", [1], eos=[eos], max_tokens=6)
    h.add("ignores", [1], eos=[eos], max_tokens=6, ignore_eos=True)
    h.finish()
    assert h.tokens("stops") == expected[: expected.index(eos) + 1]
    assert h.reason("stops") == "stop"
    assert h.outputs["stops"][-1].stop_token is None
    assert h.tokens("ignores") == expected
    assert h.reason("ignores") == "length"


def test_ends_at_a_stop_token_and_names_it(harness: Make, generate_alone: Alone) -> None:
    expected = generate_alone([1], 6)
    h = harness()
    h.add("a", [1], stop_token_ids=[expected[2]], ignore_eos=True)
    h.finish()
    assert h.tokens("a") == expected[: expected.index(expected[2]) + 1]
    assert h.reason("a") == "stop"
    assert h.outputs["a"][-1].stop_token == expected[2]


def test_min_tokens_outlasts_an_early_stop(harness: Make, generate_alone: Alone) -> None:
    expected = generate_alone([1], 10)
    h = harness()
    h.add("a", [1], eos=range(50), min_tokens=4, max_tokens=10)
    h.finish()
    assert h.tokens("a") == expected[:5]
    assert h.reason("a") == "stop"


def test_ends_at_the_context(harness: Make) -> None:
    h = harness(max_model_len=10)
    h.add("a", range(7), max_tokens=None)
    h.add("one", range(9), max_tokens=100)
    h.finish()
    assert (len(h.tokens("a")), h.reason("a")) == (3, "length")
    assert (len(h.tokens("one")), h.reason("one")) == (1, "length")


def test_ends_where_the_kv_cache_ends(harness: Make, generate_alone: Alone) -> None:
    h = harness(num_blocks=3)
    h.add("a", range(5), max_tokens=None)
    h.finish()
    assert h.tokens("a") == generate_alone(range(5), 7)
    assert h.reason("a") == "length"


@pytest.mark.parametrize(
    ("limits", "prompt", "params", "message"),
    [
        ({}, [], {}, "the prompt is empty; accepted: at least one token"),
        ({}, range(64), {}, "the prompt has 64 tokens; accepted: at most 63, the context of 64 less one new token"),
        ({"num_blocks": 4}, range(16), {}, "accepted: at most 15, what the whole KV cache of 16 tokens holds"),
        ({}, [1, 50], {}, "prompt has token id 50; accepted: 0 to 49"),
        ({}, [-1], {}, "prompt has token id -1; accepted: 0 to 49"),
        ({}, [1], {"logit_bias": {50: 1.0}}, "logit_bias has token id 50; accepted: 0 to 49"),
        ({}, [1], {"n": 2}, "n is 2; accepted: 1"),
    ],
)
def test_refused_requests(
    harness: Make, limits: dict[str, int], prompt: list[int], params: dict[str, object], message: str
) -> None:
    h = harness(**limits)
    with pytest.raises(RequestError, match=message):
        h.add("a", [token % 50 if len(prompt) > 2 else token for token in prompt], **params)
    assert not h.core.has_unfinished()


def test_longest_acceptable_prompt(harness: Make) -> None:
    h = harness(max_model_len=16, num_blocks=4)
    h.add("a", range(15))
    h.finish()
    assert len(h.tokens("a")) == 1


def test_request_id_is_free_again_after_the_end(harness: Make) -> None:
    h = harness()
    h.add("a", [1], max_tokens=1)
    with pytest.raises(RequestError, match="request id 'a' is taken"):
        h.add("a", [2])
    h.finish()
    h.add("a", [2], max_tokens=1)
    h.finish()
    assert len(h.outputs["a"]) == 2


def test_scheduler_and_runner_must_agree(harness: Make) -> None:
    h = harness()
    h.runner.num_blocks -= 1
    with pytest.raises(ValueError, match="64 blocks of 4 tokens for a runner of 63 blocks of 4"):
        EngineCore(h.runner, h.config)


def test_abort_is_reported_once_and_frees_at_once(harness: Make) -> None:
    h = harness(max_num_seqs=1)
    h.add("running", [1], max_tokens=50)
    h.add("waiting", [2])
    h.step()
    h.core.abort(["running", "waiting", "unknown"])
    h.assert_nothing_held()
    assert h.core.has_unfinished()
    outputs = h.step()
    assert [(o.request_id, o.tokens, o.finish_reason) for o in outputs] == [
        ("running", (), "abort"),
        ("waiting", (), "abort"),
    ]
    assert not h.core.has_unfinished()
    assert h.step() == ()


def test_abort_between_chunks_of_a_prompt(harness: Make, generate_alone: Alone) -> None:
    h = harness(max_num_batched_tokens=4)
    h.add("a", range(20))
    h.add("b", [1])
    h.step()
    h.core.abort(["a"])
    h.finish()
    assert h.tokens("a") == ()
    assert h.tokens("b") == generate_alone([1], 8)
    h.assert_nothing_held()


def test_logprobs_come_with_their_tokens(harness: Make) -> None:
    h = harness()
    h.add("a", [1], logprobs=1, max_tokens=3)
    h.add("b", [1], max_tokens=3)
    h.finish()
    assert [[entry.token for entry in o.logprobs] for o in h.outputs["a"]] == [[t] for t in h.tokens("a")]
    assert all(o.logprobs == () for o in h.outputs["b"])


@pytest.mark.parametrize("budget", [1, 4, 7, 64])
def test_prompt_logprobs_come_whole_with_the_first_output(harness: Make, budget: int) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    h = harness(max_num_batched_tokens=budget, max_num_seqs=1)
    for name in "ab":  # b comes after a has filled the prefix cache
        h.add(name, prompt, prompt_logprobs=0)
        h.finish()
    first, *rest = h.outputs["b"]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [entry.token for entry in first.prompt_logprobs[1:]] == prompt[1:]
    assert all(o.prompt_logprobs is None for o in rest)
    assert first.prompt_logprobs == h.outputs["a"][0].prompt_logprobs


def test_prompt_logprobs_of_one_token(harness: Make) -> None:
    h = harness()
    h.add("a", [1], prompt_logprobs=3)
    h.finish()
    assert h.outputs["a"][0].prompt_logprobs == (None,)


def test_cached_tokens_and_prefix_stats(harness: Make, generate_alone: Alone) -> None:
    h = harness()
    prompt = list(range(11))
    h.add("cold", prompt)
    h.finish()
    before = h.runner.computed_tokens
    h.add("warm", prompt)
    h.finish()
    assert h.outputs["cold"][0].cached_tokens == 0
    assert h.outputs["warm"][0].cached_tokens == 8
    assert h.tokens("warm") == h.tokens("cold") == generate_alone(prompt, 8)
    assert (h.stats.prefix_queries, h.stats.prefix_hits) == (22, 8)
    assert h.runner.computed_tokens - before == 3 + 7


def test_stats(harness: Make) -> None:
    h = harness(max_num_seqs=1, num_blocks=8)
    h.add("a", range(5), max_tokens=2)
    h.add("b", [9], max_tokens=1)
    h.step()
    assert (h.stats.running, h.stats.waiting, h.stats.kv_usage) == (1, 1, 0.25)
    assert (h.stats.prompt_tokens, h.stats.generation_tokens) == (5, 1)
    h.finish()
    assert (h.stats.running, h.stats.waiting, h.stats.kv_usage) == (0, 0, 0.0)
    assert (h.stats.prompt_tokens, h.stats.generation_tokens, h.stats.preemptions) == (6, 3, 0)


def test_several_tokens_a_step_end_exactly(harness: Make, generate_alone: Alone) -> None:
    expected = generate_alone([1], 30)
    h = harness(drafts=2)
    h.add("length", [1], max_tokens=30, logprobs=0)
    h.add("stop", [1], max_tokens=30, stop_token_ids=[expected[14]])
    h.finish()
    assert h.tokens("length") == expected
    assert {1, 3} <= {len(o.tokens) for o in h.outputs["length"]} <= {1, 2, 3}
    assert all(len(o.logprobs) == len(o.tokens) for o in h.outputs["length"])
    assert h.tokens("stop") == expected[: expected.index(expected[14]) + 1]
    assert h.stats.generation_tokens == 30 + len(h.tokens("stop"))
    h.assert_nothing_held()


def test_drafts_are_counted(harness: Make) -> None:
    h = harness(drafts=3)
    h.add("a", [1, 2, 3], max_tokens=40)
    h.finish()
    counts = h.stats.speculation
    steps = [step[0] for step in h.runner.steps if step[0].drafts]
    assert counts.drafts == len(steps)
    assert counts.tokens == sum(len(step.drafts) for step in steps)
    assert counts.accepted == sum(counts.by_position)
    assert counts.by_position[0] > counts.by_position[1] > counts.by_position[2] > 0
    # Each step gives one token more than it accepts; the last one may give some that are not wanted any more.
    assert 40 <= len(h.runner.steps) + counts.accepted <= 40 + 3


def test_drafts_take_no_page_from_anybody(harness: Make, generate_alone: Alone) -> None:
    """With pages for known tokens only, everything runs as it does without drafts."""
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    preemptions = []
    for drafts in (0, 4):
        h = harness(drafts=drafts, num_blocks=24, block_size=1, max_model_len=24)
        for i, prompt in enumerate(prompts):
            h.add(str(i), prompt, max_tokens=5)
        h.finish()
        preemptions.append(h.stats.preemptions)
        assert [h.tokens(str(i)) for i in range(3)] == [generate_alone(prompt, 5) for prompt in prompts]
        h.assert_nothing_held()
    assert preemptions == [0, 0]
