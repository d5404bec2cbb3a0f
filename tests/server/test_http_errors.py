"""Whatever a client does wrong is answered with OpenAI's error body and a 4xx status."""

from typing import Any

import openai
import pytest
import requant_fakes

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
LONG = "fox " * requant_fakes.CONTEXT


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert "\n" not in body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("name", ["messages", "self", "conversation", "tokenize", "chat_template"])
def test_variables_of_the_template_that_are_taken(server: Any, name: str) -> None:
    answer = server.http.post(CHAT, json={"messages": USER, "chat_template_kwargs": {name: 1}})
    assert "refuses these messages" in error_of(answer, 400)["message"]


@pytest.mark.parametrize("body", [b"\xff{}", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"])
def test_a_body_that_cannot_be_read(server: Any, body: bytes) -> None:
    answer = server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert "accepted: a JSON object in UTF-8" in error_of(answer, 400)["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        # wrong types
        (COMPLETIONS, {"prompt": 5}, "prompt", "string"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "string"),
        (COMPLETIONS, {"prompt": None}, "prompt", "string"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "string"),
        (COMPLETIONS, {"prompt": [True]}, "prompt", "integer"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt", "integer"),
        (COMPLETIONS, {}, "prompt", "required"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, "max_tokens", "integer"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "max_tokens", "integer"),
        (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "temperature", "number"),
        (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "stream", "boolean"),
        (COMPLETIONS, {"prompt": "x", "stop": 7}, "stop", "string"),
        (COMPLETIONS, {"prompt": "x", "stop": [7]}, "stop", "string"),
        (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs", "integer"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": "a"}}, "logit_bias", "number"),
        (COMPLETIONS, {"prompt": "x", "stream_options": 1}, "stream_options", "dictionary"),
        (COMPLETIONS, {"prompt": "x", "model": 1}, "model", "string"),
        (CHAT, {"messages": "hello"}, "messages", "list"),
        (CHAT, {"messages": [5]}, "messages", "dictionary"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages", "required"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "string"),
        (CHAT, {"messages": USER, "logprobs": 1}, "logprobs", "boolean"),
        (CHAT, {}, "messages", "required"),
        # values
        (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens", "1 or more"),
        (CHAT, {"messages": USER, "max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
        (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
        (COMPLETIONS, {"prompt": ""}, None, "prompt is empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "empty list"),
        (COMPLETIONS, {"prompt": [[]]}, None, "prompt is empty"),
        (COMPLETIONS, {"prompt": ["x", ""]}, None, "prompt is empty"),
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (COMPLETIONS, {"prompt": [requant_fakes.VOCAB_SIZE]}, None, "prompt has token id 512; accepted: 0 to 511"),
        (COMPLETIONS, {"prompt": [-1]}, None, "prompt has token id -1"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n", "greater than or equal to 1"),
        (COMPLETIONS, {"prompt": "x", "n": 129}, "n", "less than or equal to 128"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, None, "temperature is -1"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, None, "top_p is 0"),
        (COMPLETIONS, {"prompt": "x", "top_k": -5}, None, "top_k is -5"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, None, "logprobs is 21"),
        (COMPLETIONS, {"prompt": "x", "stop": [""]}, None, "non-empty string"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 17}, None, "min_tokens is 17"),
        (COMPLETIONS, {"prompt": "x", "seed": 2**70}, None, "64 bits"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, None, "-100 to 100"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"fox": 1}}, "logit_bias", "not a token id"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"512": 1}}, None, "logit_bias has token id 512"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [512]}, None, "stop_token_ids has token id 512"),
        (COMPLETIONS, {"prompt": "<|refuse|>"}, None, "the core refuses this prompt"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        # what is not supported
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of", "the same as n (1)"),
        (COMPLETIONS, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools", "not supported"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format", "accepted: text"),
        (CHAT, {"messages": USER, "continue_final_message": True}, "continue_final_message", "exclude each other"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "accepted: text"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "has no text"),
    ],
)
def test_bad_requests(server: Any, path: str, body: dict[str, Any], param: str | None, says: str) -> None:
    error = error_of(server.http.post(path, json=body), 400)
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize("content", [b"{", b"", b"[1, 2]", b'"text"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'])
def test_bodies_that_are_no_json_object(server: Any, content: bytes) -> None:
    error_of(server.http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"}), 400)


def test_another_content_type(server: Any) -> None:
    error = error_of(server.http.post(COMPLETIONS, data={"prompt": "x"}), 400)
    assert "application/json" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": LONG}),
        (COMPLETIONS, {"prompt": [20] * requant_fakes.CONTEXT}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": requant_fakes.CONTEXT}),
        (COMPLETIONS, {"prompt": LONG, "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        (CHAT, {"messages": USER, "max_tokens": requant_fakes.CONTEXT}),
    ],
)
def test_longer_than_the_context(server: Any, path: str, body: dict[str, Any]) -> None:
    error = error_of(server.http.post(path, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(requant_fakes.CONTEXT - 1) in error["message"] or str(requant_fakes.CONTEXT) in error["message"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})])
def test_unknown_model(server: Any, path: str, body: dict[str, Any]) -> None:
    error = error_of(server.http.post(path, json={"model": "gpt", **body}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "tiny, tiny-alias" in error["message"]


def test_unknown_route_and_wrong_method(server: Any) -> None:
    assert "/v1/nothing" in error_of(server.http.get("/v1/nothing"), 404)["message"]
    answer = server.http.get(COMPLETIONS)
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    error_of(server.http.get("/v1/models/gpt"), 404)


def test_the_client_has_its_own_exceptions_for_them(server: Any) -> None:
    create = server.openai.completions.create
    with pytest.raises(openai.NotFoundError):
        create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="tiny", prompt="")
    assert caught.value.type == "invalid_request_error"


def test_a_refusal_by_the_core_in_a_stream(server: Any) -> None:
    """The status is sent by then: the error comes as an event."""
    with pytest.raises(openai.APIError, match="the core refuses this prompt"):
        list(server.openai.completions.create(model="tiny", prompt="<|refuse|>", stream=True))


def test_errors_leave_the_server_serving(server: Any) -> None:
    assert server.openai.completions.create(model="tiny", prompt="dog", max_tokens=2).choices[0].text == "dog"
