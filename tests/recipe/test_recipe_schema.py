import dataclasses
import json
from collections import OrderedDict
from types import MappingProxyType

import pytest

from requant.errors import RecipeError
from requant.recipe import FORMATS, Recipe, canonical_format

FULL = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*expert*": "mxfp4", "*.o_proj": "per_block_fp8"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}
FORMATS_TEXT = "ptpc_fp8, per_block_fp8, mxfp4, per_block128_fp8 (= per_block_fp8)"


def message_of(value):
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(value)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_three_fields():
    recipe = Recipe.parse(FULL)
    assert recipe.global_format == "ptpc_fp8"
    assert recipe.overrides == (("*expert*", "mxfp4"), ("*.o_proj", "per_block_fp8"))
    assert recipe.exclude == ("lm_head", "*.gate.*")


@pytest.mark.parametrize(
    "empty", [None, "", "  ", {}, "{}", " {} ", {"global_quant_config": ""}, '{"exclude_layer": []}']
)
def test_empty_recipe(empty):
    recipe = Recipe.parse(empty)
    assert recipe == Recipe()
    assert recipe.is_empty
    assert not recipe
    assert recipe.to_dict() == {}


@pytest.mark.parametrize(
    "recipe", [{"global_quant_config": "mxfp4"}, {"layer_quant_config": {"a": "mxfp4"}}, {"exclude_layer": "a"}]
)
def test_each_field_alone_is_a_recipe(recipe):
    assert Recipe.parse(recipe)
    assert Recipe.parse(recipe).to_dict() == {k: ["a"] if v == "a" else v for k, v in recipe.items()}


def test_exclude_is_one_pattern_or_a_list():
    assert Recipe.parse({"exclude_layer": "lm_head"}) == Recipe.parse({"exclude_layer": ["lm_head", "lm_head"]})
    assert Recipe.parse({"exclude_layer": ""}).exclude == ()


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().global_format = "mxfp4"


@pytest.mark.parametrize("wrap", [dict, OrderedDict, MappingProxyType, json.dumps, lambda r: " \n" + json.dumps(r)])
def test_objects_and_json_text_mean_the_same(wrap):
    assert Recipe.parse(wrap(FULL)) == Recipe.parse(FULL)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_file_as_path_or_string(tmp_path, encoding):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(FULL), encoding=encoding)
    assert Recipe.parse(path) == Recipe.parse(str(path)) == Recipe.parse(FULL)


def test_a_string_that_is_json_is_never_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "3").write_text("{}")
    assert "3 (a number)" in message_of("3")


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("ptpc_fp8", "ptpc_fp8"),
        (" PTPC_FP8\n", "ptpc_fp8"),
        ("Per_Block_FP8", "per_block_fp8"),
        ("per_block128_fp8", "per_block_fp8"),
        ("PER_BLOCK128_FP8 ", "per_block_fp8"),
        ("MXFP4", "mxfp4"),
    ],
)
def test_formats_ignore_case_and_blanks(given, canonical):
    assert canonical_format(given) == canonical
    assert canonical in FORMATS
    recipe = Recipe.parse({"global_quant_config": given, "layer_quant_config": {"x": given}})
    assert recipe == Recipe(canonical, (("x", canonical),))


@pytest.mark.parametrize("unknown", ["ptpc_i8", "mxi4", "mxfp8", "fp8", "ptpc-fp8", "none", "bf16"])
def test_unknown_format_lists_the_known_ones(unknown):
    expected = f"is the unknown format {unknown!r}; accepted: {FORMATS_TEXT}"
    assert message_of({"global_quant_config": unknown}) == f'global_quant_config {expected}, or "" for none'
    assert message_of({"layer_quant_config": {"*.o_proj": unknown}}) == f"layer_quant_config['*.o_proj'] {expected}"
    with pytest.raises(RecipeError, match=r"unknown format .* accepted: ptpc_fp8, per_block_fp8, mxfp4"):
        canonical_format(unknown)


def test_an_override_needs_a_format():
    assert "layer_quant_config['x'] is the unknown format ''" in message_of({"layer_quant_config": {"x": ""}})


def test_unknown_field_lists_the_known_ones():
    assert message_of({"global_quant": "mxfp4"}) == (
        "online_quant_config has the unknown field 'global_quant'; "
        "accepted fields: global_quant_config, layer_quant_config, exclude_layer"
    )
    assert "unknown field 5" in message_of({5: "mxfp4"})
    assert "unknown field 'Exclude_Layer'" in message_of({"Exclude_Layer": []})


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("[]", "[] (a list)"),
        ('["lm_head"]', "['lm_head'] (a list)"),
        ([FULL], "(a list)"),
        ("null", "null"),
        ("true", "True (a boolean)"),
        (True, "True (a boolean)"),
        (0, "0 (a number)"),
        ('"ptpc_fp8"', "'ptpc_fp8' (a string)"),
        (b"{}", "(of type bytes)"),
    ],
)
def test_anything_but_an_object_is_refused(value, shown):
    message = message_of(value)
    assert message.startswith("online_quant_config is ")
    assert f"{shown}; accepted: a JSON object with the fields global_quant_config, layer_quant_config" in message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("global_quant_config", None, f'global_quant_config is null; accepted: {FORMATS_TEXT}, or "" for none'),
        ("global_quant_config", True, "global_quant_config is True (a boolean); accepted: ptpc_fp8"),
        ("global_quant_config", 8, "global_quant_config is 8 (a number); accepted: ptpc_fp8"),
        ("global_quant_config", ["mxfp4"], "global_quant_config is ['mxfp4'] (a list); accepted: ptpc_fp8"),
        (
            "global_quant_config",
            {"*": "mxfp4"},
            "global_quant_config is {'*': 'mxfp4'} (an object); accepted: ptpc_fp8",
        ),
        ("layer_quant_config", None, "layer_quant_config is null; accepted: an object of patterns and their formats"),
        ("layer_quant_config", "mxfp4", "layer_quant_config is 'mxfp4' (a string); accepted: an object of"),
        (
            "layer_quant_config",
            [["*", "mxfp4"]],
            "layer_quant_config is [['*', 'mxfp4']] (a list); accepted: an object",
        ),
        ("layer_quant_config", {"*a*": None}, f"layer_quant_config['*a*'] is null; accepted: {FORMATS_TEXT}"),
        ("layer_quant_config", {"*a*": False}, "layer_quant_config['*a*'] is False (a boolean); accepted: ptpc_fp8"),
        ("layer_quant_config", {"*a*": ["mxfp4"]}, "layer_quant_config['*a*'] is ['mxfp4'] (a list); accepted: ptpc"),
        (
            "layer_quant_config",
            {3: "mxfp4"},
            "layer_quant_config has a pattern that is 3 (a number); accepted: strings",
        ),
        ("exclude_layer", None, "exclude_layer is null; accepted: a pattern or a list of patterns"),
        ("exclude_layer", True, "exclude_layer is True (a boolean); accepted: a pattern or a list of patterns"),
        ("exclude_layer", {"lm_head": 1}, "exclude_layer is {'lm_head': 1} (an object); accepted: a pattern or a list"),
        ("exclude_layer", ["lm_head", 1.5], "exclude_layer has a pattern that is 1.5 (a number); accepted: strings"),
        ("exclude_layer", [None], "exclude_layer has a pattern that is null; accepted: strings"),
        ("exclude_layer", [["a"]], "exclude_layer has a pattern that is ['a'] (a list); accepted: strings"),
    ],
)
def test_wrong_type_names_the_field(field, value, message):
    assert message_of({field: value}).startswith(message)


def test_long_values_are_cut():
    assert len(message_of({"exclude_layer": {"x" * 1000: "y\n" * 1000}})) < 200


@pytest.mark.parametrize("field", ["layer_quant_config", "exclude_layer"])
@pytest.mark.parametrize("text", ["re:(", "re:a{99999999999999}", "re:*"])
def test_bad_regular_expression(field, text):
    value = {text: "mxfp4"} if field == "layer_quant_config" else [text]
    assert message_of({field: value}).startswith(f"{field}: {text!r} is not a valid regular expression: ")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"global_quant_config": "mxfp4", "global_quant_config": "ptpc_fp8"}', "global_quant_config"),
        ('{"layer_quant_config": {"a": "mxfp4", "b": "mxfp4", "a": "mxfp4"}}', "a"),
    ],
)
def test_duplicate_key(text, key, tmp_path):
    expected = f"online_quant_config has {key!r} twice in one JSON object; accepted: each field and pattern once"
    assert message_of(text) == expected
    (tmp_path / "r.json").write_text(text)
    assert message_of(tmp_path / "r.json") == expected


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ('{"global_quant_config": "mxfp4",}', "line 1 column 3"),
        ('{"global_quant_config" "mxfp4"}', "line 1 column 24"),
        ('{"global_quant_config":\n mxfp4}', "line 2 column 2"),
        ("[", "line 1 column 2"),
    ],
)
def test_malformed_json_gives_the_position(text, position, tmp_path):
    message = message_of(text)
    assert message.startswith("online_quant_config is not valid JSON: ")
    assert position in message
    path = tmp_path / "r.json"
    path.write_text(text)
    message = message_of(str(path))
    assert message.startswith(f"online_quant_config file {str(path)!r} is not valid JSON: ")
    assert position in message


def test_a_string_that_is_neither_json_nor_a_file():
    assert message_of('"global_quant_config": "mxfp4"') == (
        'online_quant_config is \'"global_quant_config": "mxfp4"\'; it is no file, and not valid JSON: '
        "Extra data: line 1 column 22 (char 21)"
    )
    assert "'no/such.json'; it is no file, and not valid JSON" in message_of("no/such.json")
    assert "it is no file" in message_of("a\0b")
    assert "it is no file" in message_of("x" * 10_000)
    assert "nested too deeply" in message_of("[" * 200_000)


def test_unreadable_files(tmp_path):
    missing = tmp_path / "none.json"
    assert message_of(missing) == f"online_quant_config file {str(missing)!r} cannot be read: No such file or directory"
    assert message_of(str(tmp_path)) == f"online_quant_config file {str(tmp_path)!r} cannot be read: Is a directory"
    (tmp_path / "latin").write_bytes(b'{"exclude_layer": "\xe9"}')
    assert "cannot be read: 'utf-8' codec" in message_of(tmp_path / "latin")
    (tmp_path / "empty").write_text("")
    assert "is not valid JSON: Expecting value: line 1 column 1" in message_of(tmp_path / "empty")


def test_to_dict_is_canonical_and_comes_back():
    recipe = Recipe.parse({**FULL, "global_quant_config": " PER_BLOCK128_FP8", "exclude_layer": "lm_head"})
    assert recipe.to_dict() == {
        "global_quant_config": "per_block_fp8",
        "layer_quant_config": {"*expert*": "mxfp4", "*.o_proj": "per_block_fp8"},
        "exclude_layer": ["lm_head"],
    }
    assert Recipe.parse(json.dumps(recipe.to_dict())) == recipe


def test_digest():
    digest = Recipe.parse(FULL).digest()
    # Fixed for good: caches on disk are keyed by it.
    assert digest == "ac97c81a0e828da017ba3aed41626db612aedecd93f7a1e227f6320cd2c74c22"
    same = {**FULL, "global_quant_config": "PTPC_FP8", "exclude_layer": ["*.gate.*", "lm_head"]}
    assert Recipe.parse(same).digest() == digest
    reordered = {**FULL, "layer_quant_config": dict(reversed(FULL["layer_quant_config"].items()))}
    others = [Recipe.parse(r).digest() for r in ({}, reordered, {**FULL, "exclude_layer": []})]
    assert len({digest, *others}) == 4
