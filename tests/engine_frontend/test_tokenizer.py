import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import requant_fakes

from requant.engine.config import ModelConfig
from requant.engine.tokenizer import Tokenizer, eos_token_ids, load_tokenizer
from requant.errors import CheckpointError, ConfigError, RequestError

USER = [{"role": "user", "content": "fox"}]


def with_bos(folder: Path) -> Path:
    """A tokenizer that puts a token in front of a text."""
    from tokenizers import Tokenizer, processors

    requant_fakes.make_tokenizer(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    bos = "<|user|>"
    tokenizer.post_processor = processors.Sequence(
        [processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, requant_fakes.special(bos))])]
    )
    tokenizer.save(file)
    return folder


def test_round_trip(tokenizer: Tokenizer) -> None:
    for text in ("the quick fox", " two  spaces , and. punctuation 's", "日本語 😀\n\ttabs", "\x00\u200d"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_around_a_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(model=str(with_bos(tmp_path))))
    plain = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [requant_fakes.special("<|user|>"), *plain]


def test_special_tokens_in_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"fox{requant_fakes.EOS}")
    assert tokens[-1] == requant_fakes.special(requant_fakes.EOS)
    assert tokenizer.decode(tokens) == f"fox{requant_fakes.EOS}"
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "fox"
    assert tokenizer.token_text(tokens[-1]) == requant_fakes.EOS


def test_end_of_sequence_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == {requant_fakes.special(requant_fakes.EOS)}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, set()),
        (2, None, {2}),
        (2, {"eos_token_id": [3, 4]}, {2, 3, 4}),
        ([1, 2], {"eos_token_id": 5}, {1, 2, 5}),
        (None, {"temperature": 1}, set()),
        (0, {"eos_token_id": None}, {0}),
    ],
)
def test_end_of_sequence_of_the_model(tmp_path: Path, config: object, generation: object, expected: set[int]) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path, SimpleNamespace(eos_token_id=config)) == expected


@pytest.mark.parametrize("content", ["[1]", "", "{", "[" * 100_000])
def test_a_damaged_generation_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config.json is not a JSON object"):
        eos_token_ids(tmp_path, SimpleNamespace())


@pytest.mark.parametrize("value", ["end", ["end"], 1.5, True, {}, [[1]]])
def test_an_end_of_sequence_that_is_no_token(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"eos_token_id in .* accepted: a token id or a list of them"):
        eos_token_ids(tmp_path, SimpleNamespace(eos_token_id=0))


def test_chat(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat(USER) == "<|user|>fox<|assistant|>"
    assert tokenizer.render_chat(USER, add_generation_prompt=False, shout="!") == "<|user|>fox!"
    with pytest.raises(RequestError, match="refuses these messages: unknown role wizard"):
        tokenizer.render_chat([{"role": "wizard", "content": ""}])
    with pytest.raises(RequestError, match="refuses these messages"):
        tokenizer.render_chat([{}])


def test_a_template_of_the_users(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}!")
    config = ModelConfig(model=str(tiny_model))
    for given in (str(file), "{{ messages[0].content }}!"):
        assert load_tokenizer(config, given).render_chat(USER) == "fox!"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "not a Jinja template: line 1"),
        ("/no/such/file", "No such file"),
        ("no\0file", "accepted: a file"),
        ("~nosuchuser/x", "accepted: a file"),
    ],
)
def test_a_bad_template(tiny_model: Path, template: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_tokenizer(ModelConfig(model=str(tiny_model)), template)
    assert "--chat-template" in str(caught.value)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ range(10 ** 9) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_a_template_that_fails_in_its_own_way(tiny_model: Path, template: str) -> None:
    """It loads, since other messages may suit it; each request that does not is refused."""
    tokenizer = load_tokenizer(ModelConfig(model=str(tiny_model)), template)
    with pytest.raises(RequestError, match="refuses these messages"):
        tokenizer.render_chat(USER)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000])
def test_a_damaged_tokenizer(tiny_model: Path, tmp_path: Path, file: str, content: str) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match="no tokenizer can be loaded from") as caught:
        load_tokenizer(ModelConfig(model=str(folder)))
    assert "\n" not in str(caught.value)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer can be loaded from") as caught:
        load_tokenizer(ModelConfig(model=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_said_as_for_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load_tokenizer(ModelConfig(model=str(tmp_path / "none")))


def test_the_tokenizer_may_lie_elsewhere(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(model=str(tmp_path), tokenizer=str(tiny_model)))
    assert tokenizer.encode("fox")
