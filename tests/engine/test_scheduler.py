import pytest

from requant.engine.messages import CoreRequest
from requant.engine.request import Request, RequestStatus
from requant.engine.sampling_params import SamplingParams
from requant.engine.scheduler import ScheduledStep, Scheduler, SchedulerConfig
from requant.errors import ConfigError


def config(**changes: int | bool) -> SchedulerConfig:
    defaults = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 32,
    }
    return SchedulerConfig(**(defaults | changes))


def request(name: str, length: int, first: int = 0, **params: object) -> Request:
    source = CoreRequest(name, tuple(range(first, first + length)), SamplingParams(**params))
    return Request(source, context=64)


def plan(step: ScheduledStep) -> list[tuple[str, int, int, bool]]:
    return [(s.request.id, s.start, s.known, s.samples) for s in step.sequences]


def sample(step: ScheduledStep, token: int = 99) -> None:
    for sequence in step.sequences:
        if sequence.samples:
            sequence.request.append(token)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; accepted: 1 or more"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": -1}, "num_blocks is -1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": 1}, "max_model_len is 1; accepted: 2 or more"),
        ({"max_num_batched_tokens": 3}, "accepted: at least max_num_seqs, 4"),
    ],
)
def test_contradicting_limits(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_context_is_what_model_and_cache_hold() -> None:
    assert config().context == 64
    assert config(num_blocks=4).context == 16


def test_nothing_to_do() -> None:
    assert Scheduler(config()).schedule() == ScheduledStep()


def test_long_prompt_is_cut_and_samples_with_its_last_chunk() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", 35))
    assert plan(scheduler.schedule()) == [("a", 0, 16, False)]
    assert plan(scheduler.schedule()) == [("a", 16, 16, False)]
    assert plan(scheduler.schedule()) == [("a", 32, 3, True)]


def test_decodes_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a", 3))
    scheduler.add(request("b", 4))
    step = scheduler.schedule()
    assert plan(step) == [("a", 0, 3, True), ("b", 0, 4, True)]
    sample(step)
    scheduler.add(request("c", 10, first=100))
    scheduler.add(request("d", 10, first=200))
    step = scheduler.schedule()
    assert plan(step) == [("a", 3, 1, True), ("b", 4, 1, True), ("c", 0, 10, True), ("d", 0, 4, False)]
    sample(step)
    assert plan(scheduler.schedule()) == [("a", 4, 1, True), ("b", 5, 1, True), ("c", 10, 1, True), ("d", 4, 6, True)]


def test_at_most_max_num_seqs_run() -> None:
    scheduler = Scheduler(config(max_num_seqs=2))
    for name in "abc":
        scheduler.add(request(name, 2))
    assert [name for name, *_ in plan(scheduler.schedule())] == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_no_one_overtakes_a_prompt_that_has_to_wait_for_blocks() -> None:
    scheduler = Scheduler(config(num_blocks=4))
    scheduler.add(request("a", 8))
    scheduler.add(request("big", 12, first=100))
    scheduler.add(request("small", 2, first=200))
    assert plan(scheduler.schedule()) == [("a", 0, 8, True)]
    assert scheduler.num_waiting == 2


def test_last_arrived_loses_its_blocks_and_is_computed_again() -> None:
    scheduler = Scheduler(config(num_blocks=4, max_model_len=16, enable_prefix_caching=False))
    old, young = request("old", 7), request("young", 3, first=100)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(2):
        sample(scheduler.schedule())
    while scheduler.preemptions == 0:
        step = scheduler.schedule()
        sample(step)
    assert [name for name, *_ in plan(step)] == ["old"]
    assert young.status is RequestStatus.WAITING
    assert (young.blocks, young.computed) == ([], 0)
    known = len(young.tokens)
    assert known > 3
    scheduler.finish(old)
    assert plan(scheduler.schedule()) == [("young", 0, known, True)]


def test_preempted_request_goes_ahead_of_those_that_came_later() -> None:
    scheduler = Scheduler(config(num_blocks=4, max_model_len=16, max_num_seqs=2))
    old, young = request("old", 7), request("young", 3, first=100)
    for each in (old, young, request("late", 1, first=200)):
        scheduler.add(each)
    while scheduler.preemptions == 0:
        sample(scheduler.schedule())
    scheduler.finish(old)
    assert [name for name, *_ in plan(scheduler.schedule())] == ["young", "late"]


def test_newcomer_leaves_a_block_for_everyone_running() -> None:
    for num_blocks, admitted in ((4, False), (5, True)):
        scheduler = Scheduler(config(num_blocks=num_blocks))
        scheduler.add(request("a", 8))
        scheduler.add(request("b", 8, first=100))
        assert len(scheduler.schedule().sequences) == 1 + admitted


def test_blocks_computed_again_are_found_again() -> None:
    scheduler = Scheduler(config(num_blocks=4, max_model_len=16))
    old, young = request("old", 7), request("young", 4, first=100)
    scheduler.add(old)
    scheduler.add(young)
    while scheduler.preemptions == 0:
        sample(scheduler.schedule())
    while len(old.tokens) < 16:  # takes the block that young's prompt was in
        sample(scheduler.schedule())
    scheduler.finish(old)
    assert plan(scheduler.schedule())[0][:2] == ("young", 0)
    scheduler.finish(young)
    scheduler.add(request("again", 6, first=100))
    assert plan(scheduler.schedule())[0][:2] == ("again", 4)


def test_equal_prompts_of_one_step_share_blocks() -> None:
    scheduler = Scheduler(config())
    first, second = request("first", 10), request("second", 10)
    scheduler.add(first)
    scheduler.add(second)
    assert plan(scheduler.schedule()) == [("first", 0, 10, True), ("second", 8, 2, True)]
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert scheduler.pool.holders(first.blocks[0]) == 2
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (20, 8)


def test_last_token_of_a_cached_prompt_is_computed() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("first", 8))
    scheduler.schedule()
    scheduler.add(request("second", 8))
    assert plan(scheduler.schedule())[-1] == ("second", 4, 4, True)


def test_output_blocks_are_cached_for_the_next_turn() -> None:
    scheduler = Scheduler(config())
    turn = request("turn", 4)
    scheduler.add(turn)
    for _ in range(6):
        sample(scheduler.schedule())
    scheduler.finish(turn)
    following = Request(CoreRequest("next", (*turn.tokens, 7), SamplingParams()), context=64)
    scheduler.add(following)
    assert plan(scheduler.schedule()) == [("next", 8, 3, True)]


def test_no_sharing_without_prefix_caching() -> None:
    scheduler = Scheduler(config(enable_prefix_caching=False))
    scheduler.add(request("first", 8))
    scheduler.add(request("second", 8))
    assert plan(scheduler.schedule()) == [("first", 0, 8, True), ("second", 0, 8, True)]
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (0, 0)


def test_prompt_logprobs_compute_every_position() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("first", 10))
    scheduler.schedule()
    scheduler.add(request("second", 10, prompt_logprobs=1))
    sequence = scheduler.schedule().sequences[-1]
    assert (sequence.start, sequence.known) == (0, 10)
    assert sequence.prompt_positions == range(9)
    assert scheduler.prefix_queries == 10


def test_prompt_positions_end_before_the_last_prompt_token() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=4))
    asking = request("a", 9, prompt_logprobs=0)
    scheduler.add(asking)
    seen: list[int] = []
    for _ in range(5):
        step = scheduler.schedule()
        (sequence,) = step.sequences
        seen += sequence.prompt_positions
        asking.prompt_logprobs += [None] * len(sequence.prompt_positions)
        sample(step)
    assert seen == list(range(8))
    assert len(asking.output) == 3


def test_finish_in_any_state_frees_everything() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=8))
    requests = [request(name, 6, first=100 * i) for i, name in enumerate("abc")]
    for each in requests:
        scheduler.add(each)
    scheduler.schedule()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    for each in requests:
        scheduler.finish(each)
        assert each.status is RequestStatus.FINISHED
    assert scheduler.pool.usage == 0
    assert scheduler.schedule() == ScheduledStep()
