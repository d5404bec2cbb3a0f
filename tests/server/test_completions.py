"""``/v1/completions`` through the official client; the fake core answers with the prompt's own tokens."""

from typing import Any

import pytest
import requant_fakes

TEXT = "the quick brown fox jumps over the lazy dog"


def ids(server: Any, text: str) -> list[int]:
    return server.tokenizer.encode(text)


def streamed(server: Any, **request: Any) -> dict[int, tuple[str, str | None]]:
    """Text and finish reason by index, put together from a stream."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for chunk in server.openai.completions.create(model="tiny", stream=True, **request):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            assert reasons.get(choice.index) is None, "a choice goes on after its end"
            reasons[choice.index] = choice.finish_reason
    return {index: (texts[index], reasons[index]) for index in sorted(texts)}


def test_a_string(server: Any) -> None:
    length = len(ids(server, TEXT))
    answer = server.openai.completions.create(model="tiny", prompt=TEXT, max_tokens=length)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("cmpl-")
    assert [(c.index, c.text, c.finish_reason, c.logprobs) for c in answer.choices] == [(0, TEXT, "length", None)]
    assert answer.usage.prompt_tokens == answer.usage.completion_tokens == length
    assert answer.usage.total_tokens == 2 * length
    assert answer.usage.prompt_tokens_details.cached_tokens == length // 2


def test_sixteen_tokens_by_default(server: Any) -> None:
    answer = server.openai.completions.create(model="tiny", prompt=TEXT)
    assert answer.usage.completion_tokens == 16


def test_several_strings_with_n(server: Any) -> None:
    prompts = ["fox one", "dog two"]
    answer = server.openai.completions.create(model="tiny", prompt=prompts, max_tokens=3, n=2, seed=1)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(answer.choices):
        prompt = ids(server, prompts[index // 2])
        shift = 1 + index % 2  # The fake core rotates by the seed; the n-th sequence has seed + n.
        expected = [prompt[(step + shift) % len(prompt)] for step in range(3)]
        assert choice.text == server.tokenizer.decode(expected)
    assert answer.usage.prompt_tokens == sum(len(ids(server, p)) for p in prompts)
    assert answer.usage.completion_tokens == 12


@pytest.mark.parametrize("several", [False, True])
def test_token_ids(server: Any, several: bool) -> None:
    first, second = ids(server, "the fox"), ids(server, "lazy dog")
    prompt = [first, second] if several else first
    answer = server.openai.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    expected = [first, second] if several else [first]
    assert [c.text for c in answer.choices] == [server.tokenizer.decode(tokens[:2]) for tokens in expected]


def test_model_may_be_left_out(server: Any) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": TEXT, "unknown_field": 1, "temperature": None}).json()
    assert answer["model"] == "tiny"


def test_echo(server: Any) -> None:
    answer = server.openai.completions.create(model="tiny-alias", prompt=["the fox", "dog"], max_tokens=1, echo=True)
    assert answer.model == "tiny-alias"
    assert [c.text for c in answer.choices] == ["the foxthe", "dogdo"]
    assert streamed(server, prompt=["the fox", "dog"], max_tokens=1, echo=True) == {
        0: ("the foxthe", "length"),
        1: ("dogdo", "length"),
    }


def test_logprobs(server: Any) -> None:
    tokens = ids(server, TEXT)
    answer = server.openai.completions.create(model="tiny", prompt=TEXT, max_tokens=len(tokens), logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == TEXT
    assert logprobs.token_logprobs == [requant_fakes.logprob_of(token) for token in tokens]
    offset = 0
    for token, top, at in zip(logprobs.tokens, logprobs.top_logprobs, logprobs.text_offset, strict=True):
        assert at == offset
        assert len(top) == 2
        assert max(top, key=top.get) == token
        offset += len(token)


def test_logprobs_zero_name_the_token_alone(server: Any) -> None:
    answer = server.openai.completions.create(model="tiny", prompt=TEXT, max_tokens=2, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert [list(top) for top in logprobs.top_logprobs] == [[token] for token in logprobs.tokens]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_scoring_a_prompt(server: Any, max_tokens: int, stream: bool) -> None:
    """Echo with logprobs, as evaluation harnesses ask for log-likelihoods."""
    tokens = ids(server, TEXT)
    request = {"prompt": tokens, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0}
    if stream:
        chunks = list(server.openai.completions.create(model="tiny", stream=True, **request))
        choices = [c for chunk in chunks for c in chunk.choices]
        assert len(choices) == 1
        choice = choices[0]
    else:
        answer = server.openai.completions.create(model="tiny", **request)
        assert answer.usage.completion_tokens == max_tokens
        choice = answer.choices[0]
    generated = tokens[:max_tokens]
    assert choice.text == TEXT + server.tokenizer.decode(generated)
    assert choice.finish_reason == "length"
    expected = [None, *(requant_fakes.logprob_of(token) for token in tokens[1:] + generated)]
    assert choice.logprobs.token_logprobs == expected
    assert choice.logprobs.top_logprobs[0] is None
    assert "".join(choice.logprobs.tokens) == choice.text
    ends = [at + len(token) for at, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)]
    assert choice.logprobs.text_offset == [0, *ends[:-1]]


def test_prompt_logprobs(server: Any) -> None:
    tokens = ids(server, "the fox")
    body = {"prompt": "the fox", "max_tokens": 1, "prompt_logprobs": 1}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert others == [
        {
            str(token): {
                "logprob": requant_fakes.logprob_of(token),
                "rank": 1,
                "decoded_token": server.tokenizer.decode([token]),
            }
        }
        for token in tokens[1:]
    ]
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": TEXT, "max_tokens": 40},
        {"prompt": [TEXT, "dog"], "n": 3, "seed": 2, "max_tokens": 9},
        {"prompt": TEXT, "stop": ["wn fo", "zzz"], "max_tokens": 40},
        {"prompt": "naïve 日本語 😀👍🏽 ", "max_tokens": 60},
        {"prompt": "😀", "max_tokens": 6},
        {"prompt": f"fox{requant_fakes.EOS}", "max_tokens": 6},
        {"prompt": TEXT, "stop": ["dogthe q"], "max_tokens": 60, "extra_body": {"include_stop_str_in_output": True}},
    ],
)
def test_streaming_gives_the_same(server: Any, request_: dict[str, Any]) -> None:
    answer = server.openai.completions.create(model="tiny", **request_)
    whole = {c.index: (c.text, c.finish_reason) for c in answer.choices}
    assert streamed(server, **request_) == whole


def test_usage_at_the_end_of_a_stream(server: Any) -> None:
    request = {"model": "tiny", "prompt": [TEXT, "dog"], "max_tokens": 5}
    usage = server.openai.completions.create(**request).usage
    *chunks, last = server.openai.completions.create(**request, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage == usage


def test_the_stream_as_it_is_on_the_wire(server: Any) -> None:
    with server.http.stream("POST", "/v1/completions", json={"prompt": TEXT, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: {") for line in lines[:-1])
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("text", ["日本語", "😀👍🏽", "é😀ü"])
def test_characters_are_never_split(server: Any, text: str) -> None:
    """Each of these characters is several tokens, one for each byte; every chunk holds whole ones."""
    tokens = ids(server, text)
    assert len(tokens) == len(text.encode())
    chunks = list(server.openai.completions.create(model="tiny", prompt=text, max_tokens=len(tokens), stream=True))
    pieces = [c.text for chunk in chunks for c in chunk.choices]
    assert "".join(pieces) == text
    assert len(pieces) >= len(text)


def test_a_character_cut_by_the_limit_shows_as_such(server: Any) -> None:
    answer = server.openai.completions.create(model="tiny", prompt="a😀", max_tokens=3)
    assert answer.choices[0].text == "a\ufffd"


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens(server: Any, include: bool) -> None:
    stop = "own fox ju"
    assert stop not in {server.tokenizer.decode([token]) for token in ids(server, TEXT)}
    body = {"prompt": TEXT, "max_tokens": 100, "stop": stop, "include_stop_str_in_output": include}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == TEXT[: TEXT.index(stop) + (len(stop) if include else 0)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_min_tokens_puts_stop_strings_off(server: Any) -> None:
    length = len(ids(server, TEXT))
    body = {"prompt": TEXT, "max_tokens": 100, "stop": "quick", "min_tokens": length}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == TEXT + TEXT[: TEXT.index("quick")]


def test_end_of_sequence(server: Any) -> None:
    prompt = f"fox{requant_fakes.EOS}dog"
    post = server.http.post
    body = {"prompt": prompt, "max_tokens": len(ids(server, prompt))}
    choice = post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("fox", "stop", None)
    choice = post("/v1/completions", json=body | {"ignore_eos": True}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("foxdog", "length")
    body |= {"ignore_eos": True, "skip_special_tokens": False}
    assert post("/v1/completions", json=body).json()["choices"][0]["text"] == prompt


@pytest.mark.parametrize("include", [False, True])
def test_stop_token(server: Any, include: bool) -> None:
    first, second, *_ = ids(server, "the fox")
    body = {"prompt": "the fox", "stop_token_ids": [second], "include_stop_str_in_output": include}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == server.tokenizer.decode([first, second] if include else [first])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", second)


def test_output_ends_with_the_context(server: Any) -> None:
    prompt = [1 + index for index in range(100, 100 + requant_fakes.CONTEXT - 3)]
    prompt = [token % 300 + 20 for token in prompt]
    answer = server.openai.completions.create(model="tiny", prompt=prompt)  # The default of 16 is cut to the room.
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_best_of_equal_to_n(server: Any) -> None:
    answer = server.openai.completions.create(model="tiny", prompt=TEXT, max_tokens=1, n=2, best_of=2)
    assert len(answer.choices) == 2


def test_several_tokens_a_step(server: Any, server_without_template: Any) -> None:
    """A core that gives three tokens at once changes nothing, also where a stop string ends within them."""
    for more in ({}, {"stop": ["quick br"]}, {"logprobs": 1}):
        request = {"model": "tiny", "prompt": TEXT, "max_tokens": 30, **more}
        one = server.openai.completions.create(**request).choices
        three = server_without_template.openai.completions.create(**request).choices
        assert one == three
        assert streamed(server_without_template, prompt=TEXT, max_tokens=30, **more)[0][0] == one[0].text
