"""The small routes, clients that go away, and an engine that dies."""

import re
from typing import Any

import httpx
import openai
import pytest

import requant


def test_models(server: Any) -> None:
    models = server.openai.models.list().data
    assert [model.id for model in models] == ["tiny", "tiny-alias"]
    one = server.openai.models.retrieve("tiny-alias")
    assert (one.owned_by, one.root, one.max_model_len) == ("requant", "the/root", 256)


def test_health_and_version(server: Any) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/version").json() == {"version": requant.__version__}


def values(server: Any) -> dict[str, float]:
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {name: float(value) for name, value in re.findall(r"^(requant:\S+) (\S+)$", answer.text, re.MULTILINE)}


def test_metrics(server: Any) -> None:
    server.openai.completions.create(model="tiny", prompt="warm up", max_tokens=1)
    before = values(server)
    assert not [name for name in before if not name.startswith("requant:")]
    usage = server.openai.completions.create(model="tiny", prompt="the lazy dog", max_tokens=4, n=2).usage
    server.openai.completions.create(model="tiny", prompt="dog", stop="g")
    dog = len(server.tokenizer.encode("dog"))
    after = values(server)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["requant:prompt_tokens_total"] == 2 * usage.prompt_tokens + dog
    assert grown["requant:generation_tokens_total"] >= usage.completion_tokens + dog
    assert grown['requant:request_success_total{finished_reason="length"}'] == 2
    assert grown['requant:request_success_total{finished_reason="stop"}'] == 1
    assert grown["requant:time_to_first_token_seconds_count"] == 2
    assert grown["requant:time_per_output_token_seconds_count"] == 2
    assert grown["requant:e2e_request_latency_seconds_count"] == 2
    assert after["requant:prefix_cache_hits_total"] == 40
    assert after["requant:prefix_cache_queries_total"] == 100
    assert {"requant:num_requests_running", "requant:num_requests_waiting", "requant:kv_cache_usage_perc"} <= set(after)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_is_dropped_is_aborted(doomed: Any, path: str) -> None:
    """``<|stall|>`` never ends, ``<|wait|>`` is answered only after some request was aborted."""
    prompt = (
        {"prompt": "dog<|stall|>"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "<|stall|>"}]}
    )
    with doomed.http.stream("POST", path, json={**prompt, "stream": True}) as answer:
        next(answer.iter_lines())
    waited = doomed.openai.completions.create(model="tiny", prompt="<|wait|>fox", max_tokens=2)
    assert waited.choices[0].finish_reason == "length"
    assert values(doomed)['requant:request_success_total{finished_reason="abort"}'] == 1


def test_a_plain_request_that_is_dropped_is_aborted(doomed: Any) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{doomed.url}/v1/completions", json={"prompt": "dog<|stall|>", "n": 2}, timeout=httpx.Timeout(30, read=0.5)
        )
    assert (
        doomed.openai.completions.create(model="tiny", prompt="<|wait|>fox", max_tokens=2).usage.completion_tokens == 2
    )
    assert values(doomed)['requant:request_success_total{finished_reason="abort"}'] == 2


@pytest.mark.parametrize(
    ("prompt", "says"),
    [("<|raise|>", "RuntimeError: the fake core was told to fail"), ("<|exit|>", "exit code 7")],
)
def test_a_dead_engine(doomed: Any, prompt: str, says: str) -> None:
    stalled = doomed.openai.completions.create(model="tiny", prompt="dog<|stall|>", stream=True)
    next(iter(stalled))
    with pytest.raises(openai.InternalServerError, match=says) as caught:
        doomed.openai.completions.create(model="tiny", prompt=prompt)
    assert caught.value.code == "engine_dead"
    with pytest.raises(openai.APIError, match=says):
        list(stalled)
    answer = doomed.http.get("/health")
    assert answer.status_code == 503
    assert says in answer.json()["error"]["message"]
    with pytest.raises(openai.InternalServerError, match=says):
        doomed.openai.completions.create(model="tiny", prompt="fox")
