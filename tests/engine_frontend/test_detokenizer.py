import random

import pytest

from requant.engine.detokenizer import Detokenizer, OutputText
from requant.engine.sampling_params import SamplingParams
from requant.engine.tokenizer import Tokenizer

TEXTS = ["the quick brown fox", "日本語 and ümläute", "👩‍👩‍👧‍👦 family 😀", "a\ufffdb", " lead and trail ", "\n\n\t"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("context", [0, 1, 9])
def test_pieces_make_the_text(tokenizer: Tokenizer, text: str, context: int) -> None:
    """Whatever the prompt ended with, the pieces are the text, and each is whole characters."""
    prompt = tokenizer.encode("über den 😀 dog")[-context:] if context else []
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces = [detokenizer.add(token) for token in tokenizer.encode(text)] + [detokenizer.flush()]
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_any_bytes_come_out_as_decoding_them_at_once(tokenizer: Tokenizer) -> None:
    """Also bytes that are no UTF-8, as an untrained model makes them."""
    generator = random.Random(0)
    for _ in range(200):
        tokens = [generator.randrange(9, 390) for _ in range(30)]
        detokenizer = Detokenizer(tokenizer)
        text = "".join(detokenizer.add(token) for token in tokens) + detokenizer.flush()
        assert text == tokenizer.decode(tokens)


def run(tokenizer: Tokenizer, text: str, **params: object) -> tuple[list[str], str | None, str]:
    """The pieces shown, the stop string found, and the whole text, fed one token after the other."""
    output = OutputText(tokenizer, [], SamplingParams(**params))  # type: ignore[arg-type]
    pieces, found = [], None
    for token in tokenizer.encode(text):
        found = output.add(token)
        pieces.append(output.take(finished=found is not None))
        if found is not None:
            break
    else:
        found = output.finish()
        pieces.append(output.take(finished=True))
    return pieces, found, output.text


@pytest.mark.parametrize("text", ["the quick brown fox jumps", "日本語の😀文字", "aaaab"])
def test_every_stop_string_is_found_and_never_shown(tokenizer: Tokenizer, text: str) -> None:
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            stop = text[start:end]
            expected = text[: text.index(stop)]
            pieces, found, whole = run(tokenizer, text, stop=stop)
            assert (found, whole, "".join(pieces)) == (stop, expected, expected)
            pieces, found, whole = run(tokenizer, text, stop=stop, include_stop_str_in_output=True)
            assert (found, whole, "".join(pieces)) == (stop, expected + stop, expected + stop)


def test_what_may_begin_a_stop_string_is_held_back_and_then_given(tokenizer: Tokenizer) -> None:
    text = "the quick brown foxes"
    pieces, found, _ = run(tokenizer, text, stop=["fox jumps", "zebra"])
    assert found is None
    assert "".join(pieces) == text
    shown, at = "", text.index("fox") + len("fox")
    for token, piece in zip(tokenizer.encode(text), pieces, strict=False):
        shown += piece
        seen = tokenizer.decode([token])
        if seen.endswith("fox"):
            assert shown == text[: at - len("fox")]


def test_nothing_is_held_back_needlessly(tokenizer: Tokenizer) -> None:
    pieces, _, _ = run(tokenizer, "the quick brown", stop=["zzz"])
    assert pieces == [tokenizer.decode([token]) for token in tokenizer.encode("the quick brown")] + [""]


def test_the_first_stop_string_in_the_text_wins(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, "the quick brown fox", stop=["fox", "brown", "own"])[1] == "brown"


def test_skipping_special_tokens(tokenizer: Tokenizer) -> None:
    text = "the<|user|> fox<|end|>"
    assert run(tokenizer, text)[2] == "the fox"
    assert run(tokenizer, text, skip_special_tokens=False)[2] == text
