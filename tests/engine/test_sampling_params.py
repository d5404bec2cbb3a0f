import pickle

import numpy as np
import pytest

from requant.engine.messages import CoreOutput, CoreRequest, StepResult, TokenLogprobs
from requant.engine.sampling_params import SamplingParams
from requant.errors import RequestError

INT_NAMES = ["n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"]
FLOAT_NAMES = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
FLAG_NAMES = ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens"]
NULLABLE = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}


def assert_refused(name: str, value: object, **others: object) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value}, **others)
    message = str(error.value)
    assert message.startswith(f"{name} is ")
    assert "; accepted: " in message
    assert "\n" not in message


@pytest.mark.parametrize("name", INT_NAMES)
@pytest.mark.parametrize("value", ["1", "a", True, 1.0, float("nan"), [1], {}, object, b"1"])
def test_whole_numbers_refuse_other_types(name: str, value: object) -> None:
    assert_refused(name, value)


@pytest.mark.parametrize("name", FLOAT_NAMES)
@pytest.mark.parametrize(
    "value", ["a", "0.5", True, float("nan"), float("inf"), -float("inf"), None, [0.5], 1j, 10**400]
)
def test_numbers_refuse_other_types(name: str, value: object) -> None:
    assert_refused(name, value)


@pytest.mark.parametrize("name", FLAG_NAMES)
@pytest.mark.parametrize("value", [1, "true", None, np.bool_(True)])
def test_flags_refuse_other_types(name: str, value: object) -> None:
    assert_refused(name, value)


@pytest.mark.parametrize("name", INT_NAMES)
def test_only_nullable_numbers_take_none(name: str) -> None:
    if name in NULLABLE:
        assert getattr(SamplingParams(**{name: None}), name) is None
    else:
        assert_refused(name, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 12),
        ("stop_token_ids", [1, "2"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: "a"}),
        ("logit_bias", {1: None}),
        ("logit_bias", {True: 1.0}),
    ],
)
def test_out_of_range(name: str, value: object) -> None:
    assert_refused(name, value)


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert_refused("min_tokens", 5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=400, max_tokens=None).min_tokens == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", np.float32(0.5)),
        ("top_p", 1),
        ("top_k", -1),
        ("top_k", np.int64(4)),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("logprobs", 0),
        ("prompt_logprobs", 20),
        ("logit_bias", {0: -100, 7: 100.0}),
    ],
)
def test_edges_are_accepted(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_collections_are_normalized() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2])
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    params = SamplingParams(stop=["a", "b"], stop_token_ids=None, logit_bias=None)
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == ()
    assert params.logit_bias == {}
    assert SamplingParams(stop=None).stop == ()


def test_logit_bias_is_a_copy() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 1000.0
    assert params.logit_bias == {1: 1.0}


def test_messages_survive_pickling() -> None:
    params = SamplingParams(stop="x", logit_bias={3: 1.0}, seed=1, logprobs=2)
    request = CoreRequest("r", (1, 2), params, frozenset({2}), 1.5)
    logprobs = TokenLogprobs(1, -0.5, 1, ((1, -0.5), (2, -1.5)))
    result = StepResult((CoreOutput("r", (1,), (logprobs,), (None, logprobs), "stop", 1, 4),))
    for message in (request, result):
        assert pickle.loads(pickle.dumps(message)) == message
