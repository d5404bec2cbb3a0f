"""What is accepted of drafts, what is drafted next, and where its keys and values go."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from requant.engine.batch import make_step, to_device
from requant.engine.drafting import Drafter, accepted, make_draft_step
from requant.engine.messages import CoreRequest, SpeculationCounts
from requant.engine.request import Request
from requant.engine.runner_protocol import ScheduledSequence
from requant.engine.sampler import Sampler, sampling_rows
from requant.engine.sampling_params import SamplingParams
from requant.engine.speculation import Speculation, describe
from requant.kernels.attention_batch import AttentionBatch

CPU = torch.device("cpu")


def request(tokens: list[int], blocks: list[int], context: int = 100, **params: object) -> Request:
    made = Request(CoreRequest("r", tuple(tokens), SamplingParams(**params), frozenset({9})), context)
    made.blocks = blocks
    return made


@pytest.mark.parametrize(
    ("sampled", "drafts", "expected"),
    [
        ([5], (), (5,)),
        ([5, 6], (4,), (5,)),
        ([5, 6], (5,), (5, 6)),
        ([5, 6, 7, 8], (5, 6, 7), (5, 6, 7, 8)),
        ([5, 6, 7, 8], (5, 0, 7), (5, 6)),
        ([5, 6, 7, 8], (0, 6, 7), (5,)),
    ],
)
def test_accepted(sampled: list[int], drafts: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert accepted(sampled, drafts) == expected


def test_the_output_is_distributed_as_the_models_own() -> None:
    """Whatever is drafted: two tokens of a known distribution, the second depending on the first."""
    first = torch.tensor([0.5, 0.3, 0.2])
    second = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.3, 0.3, 0.4]])
    sampler, trials = Sampler(CPU, seed=1), 20_000
    for draft in range(3):
        sequence = ScheduledSequence(request([1], [0]), 0, 1, drafts=(draft,))
        rows = sampling_rows(sequence) * trials
        logits = torch.stack([first.log(), second[draft].log()]).repeat(trials, 1)
        counts: Counter[tuple[int, ...]] = Counter()
        undecided: Counter[int] = Counter()
        for a, b in sampler.sample(logits, rows).view(trials, 2).tolist():
            tokens = accepted([a, b], (draft,))
            if len(tokens) == 2:
                counts[tokens] += 1
            else:
                undecided[tokens[0]] += 1
        assert draft not in undecided
        for token in range(3):
            seen = undecided[token] + sum(counts[token, following] for following in range(3))
            sigma = (trials * first[token] * (1 - first[token])) ** 0.5
            assert abs(seen - trials * first[token]) < 4.5 * sigma
            wanted = trials * first[draft] * second[draft, token]
            assert abs(counts[draft, token] - wanted) < 4.5 * wanted**0.5


def test_rows_behind_drafts_see_them_as_output() -> None:
    sequence = ScheduledSequence(request([1, 2], [0]), 1, 1, drafts=(7, 8))
    sequence.request.append(3)
    assert [list(row.output) for row in sampling_rows(sequence)] == [[3], [3, 7], [3, 7, 8]]
    assert all(row.params is sequence.request.params for row in sampling_rows(sequence))


def test_a_decode_step_with_drafts_is_one_of_single_tokens() -> None:
    one = ScheduledSequence(request([1, 2, 3], [4]), 2, 1, drafts=(7, 8))
    other = ScheduledSequence(request([1, 2, 3, 4, 5], [2, 6]), 4, 1)
    step = make_step([one, other], block_size=4)
    assert step.ids.tolist() == [3, 7, 8, 5]
    assert step.positions.tolist() == [2, 3, 4, 4]
    assert step.query_start.tolist() == [0, 1, 2, 3, 4]
    assert step.context_lens.tolist() == [3, 4, 5, 5]
    assert step.sampled_rows.tolist() == [0, 1, 2, 3]
    assert step.tables.shape[0] == 4
    assert step.slots[:2].tolist() == [18, 19]


def test_beside_a_prompt_sequences_stay_whole() -> None:
    decoding = ScheduledSequence(request([1, 2, 3], [4, 5]), 2, 1, drafts=(7, 8))
    prompt = ScheduledSequence(request([1, 2, 3, 4], [2]), 0, 3, samples=False)
    step = make_step([decoding, prompt], block_size=4)
    assert step.query_start.tolist() == [0, 3, 6]
    assert step.context_lens.tolist() == [5, 3]
    assert step.sampled_rows.tolist() == [0, 1, 2]


def test_what_is_drafted_next() -> None:
    """Two tokens of three are accepted of the first, none of the second; the third is in its prompt."""
    sequences = [
        ScheduledSequence(request([1, 2, 3], [0, 1, 2, 3]), 2, 1, drafts=(4, 5, 6)),
        ScheduledSequence(request([1, 2], [4]), 1, 1, drafts=(8,)),
        ScheduledSequence(request([1, 2, 3, 4], [5]), 0, 2, samples=False),
    ]
    step, drafting = make_draft_step(sequences, [(4, 5, 7), (3,), ()], block_size=4, most=3)
    assert drafting == [0, 1]
    # Rows: position 2 to 5 of the first, 1 and 2 of the second, 0 and 1 of the third.
    assert step.following[:3].tolist() == [4, 5, 7]
    assert step.following[4] == 3
    assert step.following[6:].tolist() == [2, 3]
    assert len(step.following) == 8
    assert step.rows.tolist() == [2, 4]
    assert step.positions.tolist() == [5, 2]
    assert step.counts.tolist() == [3, 3]
    assert step.tables.tolist() == [[0, 1, 2, 3], [4, 0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({}, 4),
        ({"max_tokens": 2}, 0),  # one more token, which the next step gives anyway
        ({"max_tokens": 4}, 2),
        ({"context": 6}, 1),
        ({"blocks": [0]}, 2),  # four tokens are known, and there is room for their keys and values: two drafts
        ({"tokens": (9,)}, 0),
        ({"tokens": (9,), "ignore_eos": True}, 4),
    ],
)
def test_how_many_are_drafted(change: dict, count: int) -> None:
    change = dict(change)
    tokens, blocks = change.pop("tokens", (4,)), change.pop("blocks", [0, 1, 2])
    sequence = ScheduledSequence(request([1, 2, 3], blocks, **change), 2, 1)
    step, drafting = make_draft_step([sequence], [tokens], block_size=4, most=4)
    assert (step.counts.tolist() or [0]) == [count]
    assert drafting == ([0] if count else [])


class Model:
    """Drafts the token behind the one that follows; notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int], AttentionBatch]] = []

    def draft(self, following: Tensor, hidden: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        self.calls.append((following.tolist(), positions.tolist(), batch))
        return following[:, None].float() + hidden * 0

    def draft_logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() + 1, 50).float()


def test_the_layer_runs_once_for_each_token() -> None:
    sequences = [
        ScheduledSequence(request([1, 2, 3], [0, 1, 2, 3]), 2, 1, drafts=(4, 5, 6)),
        ScheduledSequence(request([1, 2], [7]), 1, 1),
    ]
    step = make_step(sequences, block_size=4)
    draft, _ = make_draft_step(sequences, [(4, 5, 7), (30,)], block_size=4, most=3)
    draft.counts[:] = [3, 2]
    model = Model()
    tokens = Drafter(model, CPU, 4).draft(to_device(step, CPU), torch.zeros(5, 1), draft)
    assert tokens is not None
    assert tokens.tolist() == [[8, 9, 10], [31, 32, 33]]
    first, second, third = model.calls
    assert first[1] == step.positions.tolist()
    assert second[:2] == ([8, 31], [5, 2])
    assert second[2].context_lens.tolist() == [6, 3]
    assert second[2].slots.tolist() == [1 * 4 + 1, 7 * 4 + 2]
    assert third[:2] == ([9, 32], [6, 3])
    assert third[2].slots.tolist() == [1 * 4 + 2, -1]  # the second one has drafted enough


def test_nothing_drafts_and_the_layers_kv_is_stored_all_the_same() -> None:
    sequences = [ScheduledSequence(request([1, 2, 3], [0]), 0, 2, samples=False)]
    model = Model()
    draft, _ = make_draft_step(sequences, [()], block_size=4, most=3)
    assert Drafter(model, CPU, 4).draft(to_device(make_step(sequences, 4), CPU), torch.zeros(2, 1), draft) is None
    assert [call[0] for call in model.calls] == [[2, 3]]


def test_the_log_tells_of_drafts_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now = [0.0]
    speculation = Speculation(2, clock=lambda: now[0])
    speculation.note(2, 2)
    speculation.note(2, 1)
    speculation.note(0, 0)  # a step without drafts
    speculation.log()
    assert not caplog.messages
    now[0] = 10.0
    speculation.log()
    speculation.log()
    speculation.note(1, 0)
    now[0] = 20.0
    speculation.log()
    assert caplog.messages == [
        "speculative decoding: 4 tokens drafted, 3 accepted (75.0 %; by position 100.0, 50.0 %), 2.50 tokens a step",
        "speculative decoding: 1 tokens drafted, 0 accepted (0.0 %; by position 0.0, 0.0 %), 1.00 tokens a step",
    ]
    assert speculation.counts == SpeculationCounts(3, 5, 3, (2, 1))
    assert describe(SpeculationCounts(by_position=(0, 0)), speculation.counts).startswith("5 tokens drafted")
