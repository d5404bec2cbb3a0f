"""Prompts and arrivals follow from the seed, and have the lengths and the rate that were asked for."""

import numpy as np
import pytest
import requant_fakes

from requant.benchmarks.workload import Lengths, arrivals, random_samples
from requant.engine.config import ModelConfig
from requant.engine.tokenizer import Tokenizer, load_tokenizer
from requant.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    requant_fakes.make_tokenizer(folder)
    return load_tokenizer(ModelConfig(model=str(folder)))


def samples(tokenizer: Tokenizer, lengths: Lengths, count: int = 200, seed: int = 0):
    return random_samples(tokenizer, tokenizer.plain_token_ids(), lengths, count, np.random.default_rng(seed))


def test_lengths_are_those_that_the_server_will_count(tokenizer: Tokenizer) -> None:
    for sample in samples(tokenizer, Lengths(0, 30, 20, 0.0)):
        assert sample.prompt_len == len(tokenizer.encode(sample.prompt, add_special_tokens=False))
        assert abs(sample.prompt_len - 30) <= 1
        assert sample.output_len == 20


def test_lengths_vary_evenly_up_and_down(tokenizer: Tokenizer) -> None:
    outputs = [sample.output_len for sample in samples(tokenizer, Lengths(0, 5, 100, 0.8), 3000)]
    assert min(outputs) in range(20, 25)
    assert max(outputs) in range(176, 181)
    assert np.mean(outputs) == pytest.approx(100, abs=3)


def test_at_least_one_token(tokenizer: Tokenizer) -> None:
    for sample in samples(tokenizer, Lengths(0, 1, 1, 0.9)):
        assert sample.prompt_len >= 1
        assert sample.output_len >= 1


def test_a_prefix_is_shared_and_the_rest_is_not(tokenizer: Tokenizer) -> None:
    prompts = [sample.prompt for sample in samples(tokenizer, Lengths(20, 20, 5, 0.0), 50)]
    common = {tuple(tokenizer.encode(prompt)[:10]) for prompt in prompts}
    assert len(common) == 1
    assert len(set(prompts)) == 50
    alone = samples(tokenizer, Lengths(20, 0, 5, 0.0), 5)
    assert len({sample.prompt for sample in alone}) == 1


def test_the_seed_decides(tokenizer: Tokenizer) -> None:
    lengths = Lengths(3, 20, 20, 0.5)
    assert samples(tokenizer, lengths) == samples(tokenizer, lengths)
    assert samples(tokenizer, lengths) != samples(tokenizer, lengths, seed=1)


def test_special_tokens_are_never_asked_for(tokenizer: Tokenizer) -> None:
    plain = tokenizer.plain_token_ids()
    assert plain
    assert not tokenizer.eos_token_ids & set(plain)
    with pytest.raises(ConfigError, match="no token that is not special"):
        random_samples(tokenizer, [], Lengths(0, 1, 1, 0.0), 1, np.random.default_rng(0))


def test_all_at_once() -> None:
    assert arrivals(3, np.inf, 1.0, np.random.default_rng(0)) == [0.0] * 3
    assert arrivals(1, 2.0, 1.0, np.random.default_rng(0)) == [0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_their_rate_and_their_shape(burstiness: float) -> None:
    times = np.array(arrivals(20_001, 8.0, burstiness, np.random.default_rng(3)))
    gaps = np.diff(times)
    assert times[0] == 0
    assert times[-1] == pytest.approx(20_000 / 8)
    assert (gaps >= 0).all()
    # A gamma distribution of shape k has a standard deviation of 1 / √k means.
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
