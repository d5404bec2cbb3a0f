from pathlib import Path
from typing import Any

import pytest
import requant_fakes

import requant
from requant import LLM, SamplingParams
from requant.engine.prompts import ContextLengthError
from requant.errors import CheckpointError, ConfigError, RecipeError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), core_factory=requant_fakes.build)


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_every_form_of_prompts(llm: LLM, tokenizer: Any) -> None:
    fox, dog = tokenizer.encode("the fox jumps over"), tokenizer.encode("lazy dog the dog")
    expected = [tokenizer.decode(tokens[:4]) for tokens in (fox, dog)]
    assert texts(llm.generate("the fox jumps over", GREEDY)) == expected[:1]
    assert texts(llm.generate(["the fox jumps over", "lazy dog the dog"], GREEDY)) == expected
    assert texts(llm.generate(fox, GREEDY)) == expected[:1]
    assert texts(llm.generate([fox, dog], GREEDY)) == expected
    assert llm.generate([], GREEDY) == []


def test_the_outputs_are_complete(llm: LLM, tokenizer: Any) -> None:
    (output,) = llm.generate("the fox", SamplingParams(max_tokens=3, n=2, seed=0, logprobs=0, prompt_logprobs=0))
    prompt = tokenizer.encode("the fox")
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("the fox", tuple(prompt), True)
    assert output.num_cached_tokens == len(prompt) // 2
    assert len(output.prompt_logprobs) == len(prompt)
    assert [(part.index, len(part.token_ids), part.finish_reason) for part in output.outputs] == [
        (0, 3, "length"),
        (1, 3, "length"),
    ]
    first = output.outputs[0]
    assert first.cumulative_logprob == sum(requant_fakes.logprob_of(token) for token in first.token_ids)


def test_order_is_the_prompts_whoever_ends_first(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=limit, ignore_eos=True) for limit in (9, 1, 5)]
    outputs = llm.generate(["fox", "dog", "lazy"], params)
    assert [output.prompt for output in outputs] == ["fox", "dog", "lazy"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]


def test_sixteen_tokens_by_default_and_no_more_than_the_context(llm: LLM) -> None:
    assert len(llm.generate("fox")[0].outputs[0].token_ids) == 16
    rest = llm.generate("fox", SamplingParams(max_tokens=10**6))[0]
    assert len(rest.prompt_token_ids) + len(rest.outputs[0].token_ids) == requant_fakes.CONTEXT


def test_stop_strings(llm: LLM) -> None:
    outputs = llm.generate(["the quick brown fox", "lazy dog"], SamplingParams(stop="brown", max_tokens=8))
    assert texts(outputs)[0] == "the quick "
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "length"]


def test_chat(llm: LLM, tokenizer: Any) -> None:
    one = [{"role": "user", "content": "the fox"}]
    rendered = tokenizer.encode("<|user|>the fox<|assistant|>")
    assert llm.chat(one, GREEDY)[0].prompt_token_ids == tuple(rendered)
    assert len(llm.chat([one, one], GREEDY)) == 2
    shouted = llm.chat(one, GREEDY, add_generation_prompt=False, shout="!")
    assert shouted[0].prompt == "<|user|>the fox!"


@pytest.mark.parametrize(
    ("prompts", "params", "kind"),
    [
        (["fox", ""], GREEDY, RequestError),
        (["fox", "fox " * 300], GREEDY, ContextLengthError),
        (["fox", "dog"], [GREEDY], RequestError),
        (["fox", "<|refuse|>"], GREEDY, RequestError),
    ],
)
def test_errors_leave_nothing_behind(llm: LLM, prompts: Any, params: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        llm.generate(prompts, params)
    (output,) = llm.generate("lazy dog", SamplingParams(max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2


def test_shutdown(tiny_model: Path) -> None:
    with LLM(str(tiny_model), core_factory="requant_fakes:build") as llm:
        llm.generate("fox", GREEDY)
    llm.shutdown()
    with pytest.raises(RequestError, match="shut down"):
        llm.generate("fox", GREEDY)


def test_what_cannot_be_built(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        LLM(str(tiny_model), core_factory=requant_fakes.refuse_to_build)
    with pytest.raises(ConfigError, match="unknown option 'max_len'; accepted: block_size"):
        LLM(str(tiny_model), max_len=3)
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path))


def test_public_names() -> None:
    assert requant.LLM is LLM
    assert requant.SamplingParams is SamplingParams
