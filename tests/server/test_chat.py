"""``/v1/chat/completions`` through the official client. The template writes ``<|role|>content``."""

from typing import Any

import openai
import pytest
import requant_fakes

MESSAGES = [{"role": "system", "content": "be quick"}, {"role": "user", "content": "the lazy dog"}]
RENDERED = "<|system|>be quick<|user|>the lazy dog<|assistant|>"


def answer_of(tokens: int, server: Any) -> str:
    """The fake core answers with the prompt; special tokens are left out of the text."""
    return server.tokenizer.decode(server.tokenizer.encode(RENDERED)[:tokens], skip_special_tokens=True)


def test_an_answer(server: Any) -> None:
    length = len(server.tokenizer.encode(RENDERED))
    answer = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=length)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "be quickthe lazy dog")
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (length, length)
    assert answer.usage.prompt_tokens_details.cached_tokens == length // 2


def test_the_rest_of_the_context_by_default(server: Any) -> None:
    usage = server.openai.chat.completions.create(model="tiny", messages=MESSAGES).usage
    assert usage.total_tokens == requant_fakes.CONTEXT


def test_max_completion_tokens_goes_before_max_tokens(server: Any) -> None:
    create = server.openai.chat.completions.create
    assert create(model="tiny", messages=MESSAGES, max_tokens=3).usage.completion_tokens == 3
    both = create(model="tiny", messages=MESSAGES, max_tokens=3, max_completion_tokens=4)
    assert both.usage.completion_tokens == 4


def test_content_parts(server: Any) -> None:
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    answer = server.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=5)
    expected = server.tokenizer.encode("<|user|>the\nfox<|assistant|><|assistant|>")
    assert answer.usage.prompt_tokens == len(expected)
    assert answer.choices[0].message.content == server.tokenizer.decode(expected[:5], skip_special_tokens=True)


def test_variables_of_the_template(server: Any) -> None:
    plain = len(server.tokenizer.encode(RENDERED))
    body = {"messages": MESSAGES, "max_tokens": 1}
    post = server.http.post
    usage = post("/v1/chat/completions", json=body | {"chat_template_kwargs": {"shout": "!!"}}).json()["usage"]
    assert usage["prompt_tokens"] == plain + 2
    usage = post("/v1/chat/completions", json=body | {"add_generation_prompt": False}).json()["usage"]
    assert usage["prompt_tokens"] == plain - 1


def test_a_stream(server: Any) -> None:
    request = {"model": "tiny", "messages": MESSAGES, "n": 2, "seed": 1, "max_tokens": 12}
    whole = server.openai.chat.completions.create(**request)
    chunks = list(server.openai.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for index in range(2):
        deltas = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert [c.delta.role for c in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(c.delta.content or "" for c in deltas) == whole.choices[index].message.content
        assert [c.finish_reason for c in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == whole.choices[index].finish_reason == "length"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_logprobs(server: Any) -> None:
    request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "logprobs": True}
    tokens = server.tokenizer.encode(RENDERED)[:6]
    content = server.openai.chat.completions.create(**request, top_logprobs=3).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [requant_fakes.logprob_of(token) for token in tokens]
    assert [bytes(entry.bytes).decode() for entry in content] == [server.tokenizer.decode([token]) for token in tokens]
    assert [len(entry.top_logprobs) for entry in content] == [3] * 6
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)
    stream = server.openai.chat.completions.create(**request, top_logprobs=3, stream=True)
    pieces = [c.logprobs for chunk in stream for c in chunk.choices if c.logprobs]
    assert [entry for piece in pieces for entry in piece.content] == content
    alone = server.openai.chat.completions.create(**request).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in alone] == [[]] * 6


def test_prompt_logprobs(server: Any) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 0}
    entries = server.http.post("/v1/chat/completions", json=body).json()["prompt_logprobs"]
    assert entries[0] is None
    assert [int(next(iter(entry))) for entry in entries[1:]] == server.tokenizer.encode(RENDERED)[1:]


def test_stop_string(server: Any) -> None:
    answer = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, stop="kthe")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("be quic", "stop")


def test_a_model_without_a_template(server_without_template: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        server_without_template.openai.chat.completions.create(model="tiny", messages=MESSAGES)


def test_what_the_template_refuses(server: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown role wizard"):
        server.openai.chat.completions.create(model="tiny", messages=[{"role": "wizard", "content": "x"}])
