"""The sampler against an oracle that takes one row at a time and knows no tensors."""

import math
import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from requant.engine.messages import CoreRequest
from requant.engine.request import Request
from requant.engine.sampler import LOGPROB_ROWS, Sampler, sliced_logprobs, token_logprobs
from requant.engine.sampling_params import SamplingParams

VOCAB = 40
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass(frozen=True)
class Row:
    params: SamplingParams
    prompt: tuple[int, ...] = (1,)
    output: tuple[int, ...] = ()
    eos_token_ids: frozenset[int] = frozenset({0})


def oracle(logits: list[float], row: Row) -> list[float]:
    """The distribution of a row's next token, from the definitions of the parameters."""
    p = row.params
    x = list(logits)
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in range(len(x)):
        count = row.output.count(token)
        if count or token in row.prompt:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        x[token] -= p.frequency_penalty * count + (p.presence_penalty if count else 0)
    if len(row.output) < p.min_tokens:
        for token in (*row.eos_token_ids, *p.stop_token_ids):
            x[token] = -math.inf
    if p.temperature == 0:
        return [float(token == x.index(max(x))) for token in range(len(x))]
    x = [value / p.temperature for value in x]
    weights = [math.exp(value - max(x)) for value in x]
    weights = [w if w >= p.min_p else 0.0 for w in weights]
    if p.top_k > 0:
        least = sorted(weights, reverse=True)[min(p.top_k, len(weights)) - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    reached, least = 0.0, 0.0
    for w in sorted(weights, reverse=True):
        reached, least = reached + w / sum(weights), w
        if reached >= p.top_p:
            break
    if p.top_p < 1:
        weights = [w if w >= least else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def random_row(rng: random.Random) -> Row:
    def maybe(value: object, otherwise: object) -> object:
        return value if rng.random() < 0.4 else otherwise

    params = SamplingParams(
        max_tokens=100,
        temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
        top_k=maybe(rng.randrange(1, 60), 0),
        top_p=maybe(rng.uniform(0.1, 0.99), 1.0),
        min_p=maybe(rng.uniform(0.01, 0.5), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias=maybe({rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(3)}, {}),
        min_tokens=maybe(12, 0),
        stop_token_ids=(5, 7),
        seed=maybe(rng.randrange(-99, 99), None),
    )
    history = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
    cut = rng.randrange(1, len(history) + 1)
    return Row(params, tuple(history[:cut]), tuple(history[cut:]))


def make_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def chi_square(tokens: list[int], probs: list[float]) -> None:
    """Fail where counts are further from expectation than chance: 5 standard deviations of the statistic."""
    counts = Counter(tokens)
    assert all(probs[token] > 0 for token in counts)
    # Rare tokens are pooled, since the statistic needs some counts in every cell.
    cells = [(counts[t], len(tokens) * p) for t, p in enumerate(probs) if len(tokens) * p >= 10]
    rest = len(tokens) - sum(n for n, _ in cells), len(tokens) - sum(e for _, e in cells)
    if rest[1] > 10:
        cells.append(rest)
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("seed", range(15))
def test_distribution_is_the_oracles(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(12)]
    logits = make_logits(len(rows), seed)
    original = logits.clone()
    sampler = Sampler("cpu")
    expected = torch.tensor([oracle(line.tolist(), row) for line, row in zip(logits, rows, strict=True)])
    tokens = sampler.sample(logits, rows)
    assert torch.equal(logits, original)
    assert (expected.gather(1, tokens[:, None]) > 0).all()
    random_rows = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    edited = sampler._edit(logits.clone(), rows)[random_rows]
    shaped = sampler._shaped(edited, [rows[i] for i in random_rows]).softmax(dim=1)
    torch.testing.assert_close(shaped, expected[random_rows], atol=1e-5, rtol=1e-4)
    greedy_rows = [i for i, row in enumerate(rows) if row.params.temperature == 0]
    assert torch.equal(tokens[greedy_rows], expected[greedy_rows].argmax(dim=1))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6, "top_p": 0.9},
        {"top_k": 7, "temperature": 1.5},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    ],
)
@pytest.mark.parametrize("draws", ["engine", "seeds", "positions"])
def test_samples_follow_the_distribution(params: dict[str, float], draws: str) -> None:
    count = 8000
    row = Row(SamplingParams(**params))
    rows = [row] * count
    if draws == "seeds":
        rows = [replace(row, params=replace(row.params, seed=seed)) for seed in range(count)]
    elif draws == "positions":
        row = replace(row, params=replace(row.params, seed=42))
        rows = [replace(row, output=(1,) * (n % 800)) for n in range(800)]
    logits = make_logits(1).expand(len(rows), -1)
    tokens = Sampler("cpu", seed=1).sample(logits, rows)
    chi_square(tokens.tolist(), oracle(logits[0].tolist(), row))


def test_unseeded_rows_beside_seeded_ones_follow_the_distribution() -> None:
    plain, seeded = Row(SamplingParams()), Row(SamplingParams(seed=1))
    logits = make_logits(1).expand(8000, -1)
    tokens = Sampler("cpu", seed=1).sample(logits, [plain, seeded] * 4000).tolist()
    chi_square(tokens[::2], oracle(logits[0].tolist(), plain))
    assert len(set(tokens[1::2])) == 1


def test_close_logits_far_from_zero_keep_their_distribution() -> None:
    step = 2.0**-13
    row = Row(SamplingParams(temperature=step))
    logits = (1000 - step * torch.arange(5)).expand(8000, -1)
    tokens = Sampler("cpu", seed=1).sample(logits, [row] * 8000)
    chi_square(tokens.tolist(), oracle(logits[0].tolist(), row))


def test_plain_greedy_is_argmax_and_the_first_of_equals() -> None:
    logits = make_logits(5).round()
    tokens = Sampler("cpu").sample(logits, [Row(SamplingParams(temperature=0))] * 5)
    assert tokens.tolist() == [line.index(max(line)) for line in logits.tolist()]


def test_greedy_rows_do_not_depend_on_random_neighbours() -> None:
    logits = make_logits(6)
    rows = [Row(SamplingParams(temperature=0 if i % 2 else 5.0)) for i in range(6)]
    tokens = Sampler("cpu").sample(logits, rows)
    assert torch.equal(tokens[1::2], logits.argmax(dim=1)[1::2])


def test_tiny_temperatures_are_finite() -> None:
    logits = make_logits(2) * 1000
    rows = [Row(SamplingParams(temperature=t)) for t in (1e-300, 2e-5)]
    assert torch.equal(Sampler("cpu").sample(logits, rows), logits.argmax(dim=1))


@pytest.mark.parametrize("case", range(6))
def test_seeded_rows_are_reproducible_in_any_company(case: int) -> None:
    rng = random.Random(case)
    rows = [random_row(rng) for _ in range(10)]
    rows = [replace(row, params=replace(row.params, temperature=1.0, seed=i)) for i, row in enumerate(rows)]
    logits = make_logits(10, case).bfloat16().float()  # many equal logits
    alone = [Sampler("cpu", seed=i).sample(logits[i : i + 1], [rows[i]]).item() for i in range(10)]
    for _ in range(5):
        order = rng.sample(range(10), rng.randrange(1, 11))
        company = [random_row(rng) for _ in range(3)]
        batch = torch.cat([logits[order], make_logits(3, rng.randrange(99))])
        tokens = Sampler("cpu", seed=rng.randrange(99)).sample(batch, [rows[i] for i in order] + company)
        assert tokens[: len(order)].tolist() == [alone[i] for i in order]


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(1, 1000)
    seen = {
        Sampler("cpu").sample(logits, [Row(SamplingParams(seed=seed), output=(1,) * length)]).item()
        for seed in range(5)
        for length in range(5)
    }
    assert len(seen) > 20


def test_unseeded_rows_follow_the_samplers_seed() -> None:
    logits, rows = torch.zeros(20, 1000), [Row(SamplingParams())] * 20
    first, again, other = (Sampler("cpu", seed=seed).sample(logits, rows) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(set(first.tolist())) > 10


def test_min_tokens_bans_end_and_stop_tokens_until_reached() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 0], logits[:, 5] = 50, 60
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(5, VOCAB + 3), ignore_eos=True)
    rows = [Row(params, output=(9,)), Row(params, output=(9, 9))]
    tokens = Sampler("cpu").sample(logits, rows).tolist()
    assert tokens[0] not in (0, 5)
    assert tokens[1] == 5


def test_a_request_is_a_row() -> None:
    request = Request(CoreRequest("r", (1, 2), SamplingParams(temperature=0, repetition_penalty=2.0)), context=9)
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 3], logits[0, 4] = 9, 8, 7
    for expected in (3, 4):
        token = Sampler("cpu").sample(logits, [request]).item()
        assert token == expected
        request.append(token)


def test_logprobs_are_raw_and_only_where_asked() -> None:
    logits = make_logits(4)
    wanted = [None, 3, None, 0]
    rows = [Row(SamplingParams(temperature=0.3, logprobs=n, logit_bias={2: -100.0})) for n in wanted]
    tokens = torch.tensor([1, 2, 3, 4])
    entries = Sampler("cpu").logprobs(logits, tokens, rows)
    expected = logits.double().log_softmax(dim=1).tolist()
    assert entries[0] is None
    assert entries[2] is None
    for index, token in ((1, 2), (3, 4)):
        line = expected[index]
        entry = entries[index]
        assert entry is not None
        assert (entry.token, entry.rank) == (token, 1 + sum(x > line[token] for x in line))
        assert entry.logprob == pytest.approx(line[token], abs=1e-5)
        best = sorted(range(VOCAB), key=lambda t: -line[t])[: wanted[index]]
        assert [t for t, _ in entry.top] == best
        assert [x for _, x in entry.top] == pytest.approx([line[t] for t in best], abs=1e-5)


def test_no_logprobs_asked() -> None:
    assert Sampler("cpu").logprobs(make_logits(1), torch.tensor([1]), [Row(SamplingParams())]) == [None]


def test_more_logprobs_than_tokens() -> None:
    (entry,) = token_logprobs(make_logits(1, vocab=3), torch.tensor([1]), [20])
    assert len(entry.top) == 3


@pytest.mark.parametrize("length", [0, 1, LOGPROB_ROWS, 2 * LOGPROB_ROWS + 44])
def test_sliced_logprobs_equal_the_whole(length: int) -> None:
    logits = make_logits(length)
    tokens = [i % VOCAB for i in range(length)]
    widths = []

    def logits_of(first: int, end: int) -> torch.Tensor:
        widths.append(end - first)
        return logits[first:end]

    entries = sliced_logprobs(logits_of, tokens, 2)
    assert sum(widths) == length
    assert all(width <= LOGPROB_ROWS for width in widths)
    assert entries == (token_logprobs(logits, torch.tensor(tokens), [2] * length) if length else [])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e300])
@pytest.mark.parametrize("repetition", [1e-300, 1e-40, 1.0, 1e40, 1e300])
def test_extreme_parameters_never_give_what_is_banned(temperature: float, repetition: float) -> None:
    """They are beyond float32; as infinities they would make a NaN of the ban, and a NaN is the largest logit."""
    params = SamplingParams(temperature=temperature, repetition_penalty=repetition, min_tokens=9, max_tokens=9, seed=1)
    row = Row(params, prompt=tuple(range(VOCAB)), output=(0, 1, 2, 3))
    logits = make_logits(50)
    logits[:, 5] = 0.0
    tokens = Sampler("cpu").sample(logits, [row] * 50).tolist()
    assert 0 not in tokens
    if temperature == 0 and repetition <= 1:
        assert all(logits[i, token] > 0 for i, token in enumerate(tokens))


@pytest.mark.gpu
@CUDA
def test_cuda_agrees_with_cpu_and_never_waits() -> None:
    rng = random.Random(0)
    rows = [random_row(rng) for _ in range(64)]
    rows = [replace(row, params=replace(row.params, seed=i)) for i, row in enumerate(rows)]
    logits = make_logits(64)
    expected = Sampler("cpu").sample(logits, rows)
    on_device, sampler = logits.cuda(), Sampler("cuda")
    sampler.sample(on_device, rows)  # first use allocates, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sampler.sample(on_device, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tokens.cpu(), expected)


@pytest.mark.gpu
@CUDA
def test_cuda_generator_follows_the_distribution() -> None:
    row = Row(SamplingParams(top_p=0.9))
    logits = make_logits(1).cuda().expand(20_000, -1)
    chi_square(Sampler("cuda").sample(logits, [row] * 20_000).tolist(), oracle(logits[0].tolist(), row))
