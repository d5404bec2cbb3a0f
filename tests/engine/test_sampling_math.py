import math

import pytest
import torch

from requant.engine.sampling_math import (
    SHORT_TOP_K,
    filter_threshold,
    gumbel_argmax,
    penalize,
    rank_and_logprob,
    seeded_exponential,
    token_counts,
)

MASK = 2**64 - 1


def splitmix64(state: int, steps: int) -> int:
    """Output number ``steps`` (from 1) of a SplitMix64 generator, in Python's integers."""
    z = (state + steps * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def threshold(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> float:
    one = torch.tensor
    return filter_threshold(logits[None], one([[top_k]]), one([[top_p]]), one([[min_p]]), top_k).item()


def test_token_counts() -> None:
    counts = token_counts(torch.tensor([0, 0, 0, 2]), torch.tensor([1, 3, 1, 0]), 3, 4)
    assert counts.tolist() == [[0, 2, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 1.0]])
    output, prompt = torch.tensor([[2.0, 0, 0, 0]]), torch.tensor([[1.0, 1, 0, 0]])
    column = [torch.tensor([[x]]) for x in (2.0, 0.25, 0.5)]
    assert penalize(logits, output, prompt, *column).tolist() == [[1.0 - 2 * 0.25 - 0.5, -4.0, 2.0, 1.0]]


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_seeded_noise_is_splitmix64(scale: float) -> None:
    seed, position = int(scale * 12345678901234567), 7
    mixed = splitmix64(seed - 0x9E3779B97F4A7C15, 1)  # the output function of the seed itself
    key = splitmix64(mixed + (position - 1) * 0x9E3779B97F4A7C15, 1)
    expected = [-math.log1p(-((splitmix64(key, i) >> 11) + 0.5) / 2**53) for i in range(1, 6)]
    noise = seeded_exponential(torch.tensor([seed]), torch.tensor([position]), 5)
    torch.testing.assert_close(noise, torch.tensor([expected]), rtol=1e-6, atol=0)


def test_seeded_noise_is_exponential_and_uncorrelated() -> None:
    n = 300
    seeds = torch.arange(n) % 20
    noise = seeded_exponential(seeds, torch.arange(n) // 20, 1000).double()
    assert noise.min() > 0
    assert noise.isfinite().all()
    deviation = 1 / math.sqrt(noise.numel())
    assert abs(noise.mean() - 1) < 5 * deviation
    assert abs((noise**2).mean() - 2) < 5 * deviation * math.sqrt(20)
    centred = noise - 1
    for other in (centred.roll(1, 0), centred.roll(20, 0), centred.roll(1, 1)):
        assert abs((centred * other).mean()) < 5 * deviation


def unmix(z: int) -> int:
    """Inverse of SplitMix64's output function."""
    z ^= (z >> 31) ^ (z >> 62)
    z = (z * pow(0x94D049BB133111EB, -1, 2**64)) & MASK
    z ^= (z >> 27) ^ (z >> 54)
    z = (z * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & MASK
    return z ^ (z >> 30) ^ (z >> 60)


@pytest.mark.parametrize("bits", [0, MASK])
def test_extreme_noise_is_positive_and_finite(bits: int) -> None:
    seed = unmix(unmix((unmix(bits) - 0x9E3779B97F4A7C15) & MASK))
    signed = seed - 2**64 if seed >= 2**63 else seed
    noise = seeded_exponential(torch.tensor([signed]), torch.tensor([0]), 1).item()
    assert noise < 1e-15 if bits == 0 else noise > 16
    assert 0 < noise < math.inf


def test_gumbel_argmax_never_takes_what_is_masked() -> None:
    logits = torch.full((1, 4), -torch.inf)
    logits[0, 2] = -1000.0
    for noise in ([0.0, 0.0, 1.0, 0.0], [1e-30, 1.0, 16.0, 1.0]):
        assert gumbel_argmax(logits, torch.tensor([noise])).tolist() == [2]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "expected"),
    [
        (8, 1.0, 0.0, 8),
        (3, 1.0, 0.0, 3),
        (8, 0.5, 0.0, 1),  # 1/2 reaches 0.5 by itself
        (8, 0.51, 0.0, 2),
        (8, 0.75, 0.0, 2),
        (8, 0.76, 0.0, 3),
        (8, 1e-6, 0.0, 1),
        (8, 1.0, 0.25, 3),
        (8, 1.0, 1.0, 1),
        (2, 0.66, 0.0, 1),  # renormalized over two: 2/3, 1/3
        (2, 0.67, 0.0, 2),
        (8, 0.66, 0.5, 1),
    ],
)
def test_filters_by_hand(top_k: int, top_p: float, min_p: float, expected: int) -> None:
    powers = torch.tensor([1, 2, 3, 4, 5, 6, 7, 7], dtype=torch.float32)
    logits = -powers * math.log(2)  # probabilities 1/2, 1/4, …, 1/128, 1/128
    kept = logits >= threshold(logits, top_k, top_p, min_p) - 1e-6
    assert kept.sum() == expected
    assert kept[:expected].all()


def test_equal_logits_stay_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0])
    assert threshold(logits, 2, 1.0, 0.0) == 2.0
    assert threshold(logits, 5, 0.6, 0.0) == 2.0


@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_short_and_long_way_agree(top_p: float) -> None:
    vocab = 4 * SHORT_TOP_K
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    top_k, top_p_R1, min_p = torch.tensor([[5], [40], [SHORT_TOP_K]]), torch.full((3, 1), top_p), torch.zeros(3, 1)
    short = filter_threshold(logits, top_k, top_p_R1, min_p, SHORT_TOP_K)
    long = filter_threshold(logits, top_k, top_p_R1, min_p, vocab)
    assert torch.equal(short, long)


def test_keeping_all_keeps_the_tail() -> None:
    logits = torch.cat([torch.tensor([30.0]), torch.linspace(-80, -70, 5000)])
    assert threshold(logits, 5001, 1.0, 0.0) == -80.0


def test_rank_counts_strictly_larger_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).repeat(4, 1)
    logprob, rank, top_logprobs, top_tokens = rank_and_logprob(logits, torch.arange(4), 3)
    assert rank.tolist() == [4, 1, 1, 3]
    torch.testing.assert_close(logprob, logits[0].log_softmax(0))
    torch.testing.assert_close(top_logprobs[0], logits[0].log_softmax(0)[[1, 2, 3]])
    assert top_tokens[0, 2] == 3
    assert set(top_tokens[0, :2].tolist()) == {1, 2}
