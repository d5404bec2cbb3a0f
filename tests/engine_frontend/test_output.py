import pytest
import requant_fakes

from requant.engine.interface import ModelFacts
from requant.engine.messages import CoreOutput, TokenLogprobs
from requant.engine.output import OutputProcessor
from requant.engine.prompts import ContextLengthError, InputProcessor, Prompt
from requant.engine.request_output import FinishedRequest
from requant.engine.sampling_params import SamplingParams
from requant.engine.tokenizer import Tokenizer
from requant.errors import RequestError

FACTS = ModelFacts(max_model_len=32, vocab_size=requant_fakes.VOCAB_SIZE)
EOS = frozenset({requant_fakes.special(requant_fakes.EOS)})


def prompt(tokenizer: Tokenizer, text: str, **params: object) -> Prompt:
    return InputProcessor(tokenizer, FACTS).prepare(text, SamplingParams(**params))  # type: ignore[arg-type]


def test_n_sequences_are_n_requests_to_the_core(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer, EOS)
    given = prompt(tokenizer, "fox", n=3, seed=2**63 - 2, max_tokens=4)
    requests = processor.add("r", given, delta=True)
    assert len({request.request_id for request in requests}) == 3
    for request in requests:
        assert (request.prompt, request.eos_token_ids) == (given.token_ids, EOS)
        assert (request.params.n, request.params.max_tokens) == (1, 4)
    assert [request.params.seed for request in requests] == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_without_a_seed_there_is_none(tokenizer: Tokenizer) -> None:
    requests = OutputProcessor(tokenizer, EOS).add("r", prompt(tokenizer, "fox", n=2), delta=True)
    assert [request.params.seed for request in requests] == [None, None]


def test_deltas_and_finals_say_the_same(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("日本 the dog")
    entries = [TokenLogprobs(token, -0.5, 1, ((token, -0.5),)) for token in tokens]
    gathered = {}
    for delta in (True, False):
        processor = OutputProcessor(tokenizer, EOS)
        given = prompt(tokenizer, "fox", n=2, logprobs=1, prompt_logprobs=0)
        ids = [request.request_id for request in processor.add("r", given, delta)]
        of_prompt = (None, *(TokenLogprobs(token, -1.0, 2, ()) for token in given.token_ids[1:]))
        reports = []
        for step, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
            end = "length" if step == len(tokens) - 1 else None
            outputs = [
                CoreOutput(core_id, (token,), (entry,), of_prompt if step == 0 else None, end, None, 1)
                for core_id in ids
            ]
            news, abort = processor.process(outputs)
            assert abort == []
            reports += news
        assert [report.finished for report in reports] == [False] * (len(reports) - 1) + [True]
        assert [report.prompt_logprobs for report in reports[1:]] == [None] * (len(reports) - 1)
        assert processor.open_requests() == []
        parts = [[part for report in reports for part in report.outputs if part.index == index] for index in range(2)]
        gathered[delta] = [
            (
                "".join(part.text for part in of_one),
                sum((part.token_ids for part in of_one), ()),
                sum((part.logprobs or () for part in of_one), ()),
                of_one[-1].cumulative_logprob,
                of_one[-1].finish_reason,
                reports[0].prompt_logprobs,
                reports[-1].num_cached_tokens,
            )
            for of_one in parts
        ]
    assert gathered[True] == gathered[False]
    text, token_ids, logprobs, cumulative, reason, of_prompt, cached = gathered[True][0]
    assert (text, token_ids, reason, cached) == ("日本 the dog", tuple(tokens), "length", 1)
    assert cumulative == -0.5 * len(tokens)
    assert [entry.token for entry in logprobs] == tokens
    # The offset of a token that is a part of a character is the character's.
    assert [entry.offset for entry in logprobs[:7]] == [0, 0, 0, 1, 1, 1, 2]
    assert of_prompt[0] is None
    assert [entry.rank for entry in of_prompt[1:]] == [2] * (len(of_prompt) - 1)


def test_a_stop_string_ends_the_sequence_and_aborts_the_core(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer, EOS)
    (request,) = processor.add("r", prompt(tokenizer, "fox", stop="quick"), delta=False)
    tokens = tuple(tokenizer.encode("the quick brown fox"))
    reports, abort = processor.process([CoreOutput(request.request_id, tokens)])
    assert abort == [request.request_id]
    (part,) = reports[0].outputs
    assert (part.text, part.finish_reason, part.stop_reason) == ("the ", "stop", "quick")
    assert tokenizer.decode(part.token_ids) == "the quick"  # Tokens behind the stop string are dropped.
    # What the core made before it heard of the abort belongs to nobody.
    assert processor.process([CoreOutput(request.request_id, tokens, finish_reason="abort")]) == ([], [])


def test_a_stop_string_in_the_last_token(tokenizer: Tokenizer) -> None:
    """The core has ended the sequence by itself, so there is nothing to abort; the reason is the stop string."""
    processor = OutputProcessor(tokenizer, EOS)
    (request,) = processor.add("r", prompt(tokenizer, "fox", stop="brown"), delta=False)
    tokens = tuple(tokenizer.encode("the quick brown"))
    reports, abort = processor.process([CoreOutput(request.request_id, tokens, finish_reason="length")])
    assert abort == []
    assert (reports[0].outputs[0].finish_reason, reports[0].outputs[0].stop_reason) == ("stop", "brown")


def test_aborting(tokenizer: Tokenizer) -> None:
    ended: list[FinishedRequest] = []
    processor = OutputProcessor(tokenizer, EOS, ended.append)
    first, second = processor.add("r", prompt(tokenizer, "fox", n=2), delta=True)
    processor.process([CoreOutput(first.request_id, (20, 21), finish_reason="length")])
    assert processor.abort("r") == [second.request_id]
    assert processor.abort("r") == []
    assert [(request.output_tokens, request.reasons) for request in ended] == [((2, 0), ("length", "abort"))]


@pytest.mark.parametrize("must_fit", [True, False])
def test_the_context_limits_the_output(tokenizer: Tokenizer, must_fit: bool) -> None:
    inputs = InputProcessor(tokenizer, FACTS)
    tokens = [20] * 30
    assert inputs.prepare(tokens, SamplingParams(max_tokens=None), must_fit=must_fit).params.max_tokens == 2
    assert inputs.prepare(tokens, SamplingParams(max_tokens=2), must_fit=must_fit).params.max_tokens == 2
    if must_fit:
        with pytest.raises(ContextLengthError, match=r"30 tokens and max_tokens is 3; accepted: at most 32 together"):
            inputs.prepare(tokens, SamplingParams(max_tokens=3), must_fit=True)
    else:
        assert inputs.prepare(tokens, SamplingParams(max_tokens=3)).params.max_tokens == 2
    inputs.prepare([20] * 31, SamplingParams(), must_fit=False)
    with pytest.raises(ContextLengthError, match=r"32 tokens; accepted: at most 31"):
        inputs.prepare([20] * 32, SamplingParams())


@pytest.mark.parametrize("bad", ["", [], [512], [-1], ["a"], [True], [1.0], "\ud800"])
def test_bad_prompts(tokenizer: Tokenizer, bad: object) -> None:
    with pytest.raises(RequestError, match="prompt"):
        InputProcessor(tokenizer, FACTS).prepare(bad, SamplingParams())  # type: ignore[arg-type]
