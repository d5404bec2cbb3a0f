"""The arithmetic of ``benchmarks/perplexity.py``, and the program with an engine whose answers are known."""

import hashlib
import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from requant.engine.messages import TokenLogprobs
from requant.engine.sampling_params import SamplingParams
from requant.errors import ConfigError, RecipeError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "perplexity.py"
spec = importlib.util.spec_from_file_location("perplexity", SCRIPT)
assert spec is not None
assert spec.loader is not None
perplexity = importlib.util.module_from_spec(spec)
spec.loader.exec_module(perplexity)


def score(token: int, logprob: float) -> TokenLogprobs:
    return TokenLogprobs(token=token, logprob=logprob, rank=1, top=())


def test_windows_are_whole_and_follow_each_other():
    assert perplexity.cut_windows(range(11), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert perplexity.cut_windows(range(8), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert perplexity.cut_windows(range(11), 4, limit=7) == [[0, 1, 2, 3]]
    assert perplexity.cut_windows(range(11), 4, limit=100) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("count", "size", "limit", "message"),
    [
        (9, 1, None, "--window is 1; accepted: 2 or more"),
        (9, 4, 3, "--tokens is 3; accepted: 4"),
        (9, 4, -1, "--tokens is -1"),
        (3, 4, None, "has 3 tokens, which is less than one window of 4"),
    ],
)
def test_sizes_that_score_nothing_are_refused(count, size, limit, message):
    with pytest.raises(ConfigError, match=message):
        perplexity.cut_windows(range(count), size, limit)


def test_first_token_of_a_window_is_not_scored():
    assert perplexity.window_logprobs([7, 8, 9], [None, score(8, -1.0), score(9, -2.0)]) == [-1.0, -2.0]


@pytest.mark.parametrize(
    "scores",
    [
        [None, score(8, -1.0)],
        [score(7, -1.0), score(8, -1.0), score(9, -2.0)],
        [None, None, score(9, -2.0)],
        [None, score(9, -1.0), score(8, -2.0)],
        [None, score(8, float("nan")), score(9, -2.0)],
        [None, score(8, -math.inf), score(9, -2.0)],
    ],
)
def test_scores_of_another_window_are_refused(scores):
    with pytest.raises(ValueError, match="prompt logprob"):
        perplexity.window_logprobs([7, 8, 9], scores)


def test_perplexity_is_the_inverse_geometric_mean_probability():
    assert perplexity.perplexity([math.log(1 / 4)] * 10) == pytest.approx(4.0, rel=1e-12)
    assert perplexity.perplexity([math.log(1 / 2), math.log(1 / 8)]) == pytest.approx(4.0, rel=1e-12)


def test_what_is_left_can_be_a_window():
    assert perplexity.cut_windows(range(11), 4, rest=True) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert perplexity.cut_windows(range(9), 4, rest=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # one token scores nothing
    assert perplexity.cut_windows(range(11), 4, limit=6, rest=True) == [[0, 1, 2, 3], [4, 5]]


def test_a_recipe_may_be_a_file(tmp_path):
    file = tmp_path / "r.json"
    file.write_text('{"global_quant_config": "mxfp4"}')
    assert perplexity.parse_recipe(str(file)) == (str(file), {"global_quant_config": "mxfp4"})
    with pytest.raises(ConfigError, match=r"--recipe nowhere\.json cannot be read"):
        perplexity.parse_recipe("nowhere.json")


def test_recipes_are_none_a_format_or_json():
    assert perplexity.parse_recipe("none") == ("as it is", None)
    assert perplexity.parse_recipe("mxfp4")[1] == {"global_quant_config": "mxfp4", "exclude_layer": ["lm_head"]}
    assert perplexity.parse_recipe('{"layer_quant_config": {"*": "mxfp4"}}')[1] == {
        "layer_quant_config": {"*": "mxfp4"}
    }
    with pytest.raises(ConfigError, match=r"^--recipe \{oops is not JSON"):
        perplexity.parse_recipe("{oops")


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """An engine under which every token has probability 1/4 unquantized and 1/5 quantized; logs its calls."""
    log = SimpleNamespace(made=[], prompts=[], shutdowns=0, error=None)

    class FakeLLM:
        def __init__(self, model, **options):
            self.probability = 1 / 5 if options["online_quant_config"] else 1 / 4
            log.made.append((model, options))

        def generate(self, prompts, params):
            assert (params.max_tokens, params.temperature, params.prompt_logprobs) == (1, 0, 0)
            if log.error:
                raise log.error
            log.prompts.append(prompts)
            value = math.log(self.probability)
            return [SimpleNamespace(prompt_logprobs=[None, *(score(t, value) for t in p[1:])]) for p in prompts]

        def shutdown(self):
            log.shutdowns += 1

    def from_pretrained(model):
        if model != "M":
            raise OSError(f"nothing at {model}\nsecond line")
        return lambda text, **_: {"input_ids": [ord(character) for character in text]}

    stand_in = SimpleNamespace(__name__="requant", __version__="0", LLM=FakeLLM, SamplingParams=SamplingParams)
    monkeypatch.setattr(perplexity, "requant", stand_in)
    monkeypatch.setattr(perplexity.transformers, "AutoTokenizer", SimpleNamespace(from_pretrained=from_pretrained))
    (tmp_path / "text.txt").write_text("abcdefghij")

    def run(*extra, model="M"):
        arguments = ["perplexity.py", "--model", model, "--text", str(tmp_path / "text.txt"), "--window", "4"]
        arguments += ["--output", str(tmp_path / "out" / "ppl.json"), *extra]
        monkeypatch.setattr(perplexity.sys, "argv", arguments)
        return perplexity.main()

    log.run = run
    log.output = tmp_path / "out" / "ppl.json"
    return log


def test_program_measures_each_recipe_and_writes_what_it_prints(engine, capsys):
    assert engine.run("--dtype", "float32") == 0
    assert [options["online_quant_config"] for _, options in engine.made] == [
        None,
        *({"global_quant_config": f, "exclude_layer": ["lm_head"]} for f in ("ptpc_fp8", "per_block_fp8", "mxfp4")),
    ]
    assert {(options["dtype"], options["max_model_len"]) for _, options in engine.made} == {("float32", 5)}
    assert engine.prompts[0] == [[97, 98, 99, 100], [101, 102, 103, 104]]
    assert engine.shutdowns == 4
    document = json.loads(engine.output.read_text())
    assert (document["model"], document["window"], document["dtype"]) == ("M", 4, "float32")
    assert {"requant", "torch", "transformers"} == set(document["versions"])
    first, second = document["results"][:2]
    assert (first["name"], first["windows"], first["tokens"]) == ("as it is", 2, 6)
    assert [first["ppl"], second["ppl"]] == pytest.approx([4.0, 5.0])
    printed = capsys.readouterr().out
    assert "ptpc_fp8" in printed
    assert "1.2500" in printed


def test_errors_are_one_line_and_the_engine_is_shut_down(engine, capsys):
    engine.error = RecipeError("'*x*' matches nothing")
    assert engine.run("--recipe", "mxfp4") == 2
    assert engine.shutdowns == 1
    assert engine.run(model="elsewhere") == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: '*x*' matches nothing",
        "error: no tokenizer for elsewhere: nothing at elsewhere",
    ]
    assert not engine.output.exists()


def test_default_text_is_the_one_its_readme_describes():
    text = perplexity.TEXT.read_bytes()
    readme = (perplexity.TEXT.parent / "README.md").read_text()
    assert text.isascii()
    assert f"{len(text):,} bytes" in readme
    assert hashlib.sha256(text).hexdigest() in readme


@pytest.mark.skipif(
    not (perplexity.MODEL / "tokenizer.json").is_file(),
    reason="the demo model is not there: run examples/fetch_smollm2.py",
)
def test_default_text_has_the_stated_number_of_tokens():
    tokens = perplexity.tokenize(str(perplexity.MODEL), perplexity.TEXT.read_text())
    assert f"{len(tokens):,} tokens" in (perplexity.TEXT.parent / "README.md").read_text()
    assert len(perplexity.cut_windows(tokens, 512)) == 73
