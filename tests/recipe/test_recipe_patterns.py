import dataclasses
import fnmatch
import itertools
import random
import re

import pytest

from requant.errors import RecipeError
from requant.recipe.patterns import Pattern

QKV = ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_proj")
ROUTER = ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate")
EXPERT = ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts.7.gate_proj")


def matches(text, part):
    return Pattern(text).hits(part[0], [part[1]])[0]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        # Exact: module, own checkpoint name, both with .weight, every parent.
        ("model.layers.0.self_attn.qkv_proj", QKV),
        ("model.layers.0.self_attn.qkv_proj.weight", QKV),
        ("model.layers.0.self_attn.q_proj", QKV),
        ("model.layers.0.self_attn.q_proj.weight", QKV),
        ("model.layers.0.self_attn", QKV),
        ("model.layers.0", QKV),
        ("model", QKV),
        ("model.layers.0.mlp.experts.7", EXPERT),
        ("model.layers.0.mlp.experts", EXPERT),
        # Globs: over a whole name, across dots.
        ("*.gate.*", ROUTER),
        ("*.mlp.gate", ROUTER),
        ("*.qkv_proj", QKV),
        ("*.q_proj", QKV),
        ("*self_attn", QKV),
        ("*expert*", EXPERT),
        ("model.*.mlp.experts.[0-9].gate_proj", EXPERT),
        ("model.layers.?.mlp.experts.?", EXPERT),
        ("*.experts.7.*", EXPERT),
        ("*", QKV),
        # Regular expressions: searched.
        ("re:q_proj$", QKV),
        ("re:qkv_proj$", QKV),
        (r"re:^model\.layers\.0\.", QKV),
        (r"re:layers\.[0-3]\.mlp", EXPERT),
        (r"re:experts\.7\b", EXPERT),
    ],
)
def test_matches(text, part):
    assert matches(text, part)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("q_proj", QKV),
        ("self_attn", QKV),
        ("model.layers.1", QKV),
        ("model.layers.0.self_attn.k_proj", QKV),
        ("Model.layers.0.self_attn.qkv_proj", QKV),
        ("model.layers.0.self_attn.qkv_proj.bias", QKV),
        ("model.layers.0.self_attn.weight", QKV),
        ("", QKV),
        ("*.Gate.*", ROUTER),
        ("*.gate.*", EXPERT),
        ("*.gate", EXPERT),
        ("*.expert.*", EXPERT),
        ("*.GATE_PROJ", EXPERT),
        ("q_proj*", QKV),
        ("layers.*", QKV),
        ("*.experts.?", ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts.17.gate_proj")),
        # A regular expression sees no parent and no .weight.
        ("re:weight", QKV),
        ("re:self_attn$", QKV),
        ("re:Q_PROJ", QKV),
    ],
)
def test_does_not_match(text, part):
    assert not matches(text, part)


def test_a_part_name_leaves_the_other_parts():
    parts = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    module = "model.layers.0.self_attn.qkv_proj"
    assert Pattern("*.q_proj").hits(module, parts) == [True, False]
    assert Pattern("*.qkv_proj").hits(module, parts) == [True, True]


def naive(text, module, part):
    """Straight from the definition: does the pattern match any of the part's names?"""
    if text.startswith("re:"):
        return any(re.search(text[3:], name) for name in (module, part))
    names = []
    for own in (module, part, module + ".weight", part + ".weight"):
        pieces = own.split(".")
        names += [".".join(pieces[:n]) for n in range(1, len(pieces) + 1)]
    if any(c in text for c in "*?["):
        return any(fnmatch.fnmatchcase(name, text) for name in names)
    return text in names


def test_hits_are_the_definition_on_random_names_and_patterns():
    random_ = random.Random(0)
    words = ["a", "b", "ab", "0", "weight"]
    seen = set()
    for _ in range(3000):
        module, *parts = (".".join(random_.choices(words, k=random_.randint(1, 4))) for _ in range(4))
        prefix, pieces = random_.choice(
            [
                ("", ["a", "b", "0", ".", "*", "?", "[ab]", "weight"]),
                ("re:", ["a", "b$", "^0", ".", ".*", r"\.", "[ab]+"]),
            ]
        )
        pattern = Pattern(prefix + "".join(random_.choices(pieces, k=random_.randint(1, 5))))
        hits = pattern.hits(module, parts)
        assert hits == [naive(pattern.text, module, part) for part in parts], (pattern.text, module, parts)
        # Asked again, with parents known, the answer stays; and it has a name wherever it is yes.
        assert pattern.hits(module, parts) == hits
        assert [pattern.matched_name(module, part) is not None for part in parts] == hits
        seen.update(hits)
    assert seen == {True, False}


def test_matched_name():
    assert Pattern("*.gate.*").matched_name(*ROUTER) == "model.layers.0.mlp.gate.weight"
    assert Pattern("*.experts.7").matched_name(*EXPERT) == "model.layers.0.mlp.experts.7"
    assert Pattern("re:gate_proj").matched_name(*EXPERT) == EXPERT[1]
    assert Pattern("*.nothing").matched_name(*EXPERT) is None


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("*.mlp.gate", "gate"),
        ("*.mlp.gate.weight", "gate"),
        ("lm_head", "lm_head"),
        ("*.gate.*", "*"),
        ("*gate", "*gate"),
        ("re:gate", None),
    ],
)
def test_last_component(text, last):
    assert Pattern(text).last_component == last


def test_bad_regular_expression_says_where():
    with pytest.raises(RecipeError, match=r"'re:a\(b' is not a valid regular expression: missing \).* at position 1"):
        Pattern("re:a(b")


@pytest.mark.filterwarnings("error")
def test_a_regular_expression_python_has_doubts_about():
    assert Pattern("re:[[a]").hits("layer.a", ["x"]) == [True]


@pytest.mark.parametrize("text", ["[", "[z-a]", "a[", "[!", "*[]*", "[[a]"])
def test_every_glob_compiles(text):
    names = ["".join(p) for p in itertools.product("a[]z!", repeat=2)]
    assert [Pattern(text).hits(name, ["x"])[0] for name in names] == [fnmatch.fnmatchcase(n, text) for n in names]


def test_is_frozen_and_compares_by_text():
    assert Pattern("a*") == Pattern("a*") != Pattern("b*")
    assert len({Pattern("a*"), Pattern("a*")}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Pattern("a").text = "b"
