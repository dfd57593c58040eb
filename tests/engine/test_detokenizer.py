"""Incremental detokenization: characters and stop texts across token boundaries."""

from __future__ import annotations

import random

import pytest

import nbflow
from nbflow.engine.detokenizer import IncrementalDetokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return nbflow.load_tokenizer("tiny_python")


def cut(text, stops, include):
    """Return the text up to the stop text that ends first; ties by start."""
    found = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    return text[: min(found)[0 if include else 1]] if found else text


def test_random_texts_and_stops(tokenizer):
    rng = random.Random(5)
    for _ in range(300):
        text = "".join(rng.choices("abcab é漢😀\n", k=rng.randrange(1, 30)))
        stops = ["".join(rng.choices("abcé漢😀", k=rng.randrange(1, 5))) for _ in range(3)]
        include = rng.random() < 0.5
        # bytes one by one and whole pieces: both ways of cutting the same text
        ids = [i for part in text for i in tokenizer.encode(part)]
        ids = ids if rng.random() < 0.5 else tokenizer.encode(text)
        stream = IncrementalDetokenizer(tokenizer, stops, include)
        chunks = []
        for token in ids:
            chunks.append(stream.push(token))
            assert "\ufffd" not in chunks[-1]
        chunks.append(stream.finish())
        expected = cut(text, stops, include)
        assert "".join(chunks) == expected, (text, stops, include)
        assert (stream.stopped is not None) == any(s in text for s in stops)
        assert stream.push(ids[0]) == stream.finish() == ""


def test_text_is_not_held_back_longer_than_needed(tokenizer):
    stream = IncrementalDetokenizer(tokenizer, ["abcd"])
    shown = [stream.push(i) for part in "xabcx" for i in tokenizer.encode(part)]
    assert shown == ["x", "", "", "", "abcx"]
    plain = IncrementalDetokenizer(tokenizer)
    assert [plain.push(i) for part in "xab" for i in tokenizer.encode(part)] == ["x", "a", "b"]


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer):
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push(i) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert set(stream.finish()) == {"\ufffd"}


def test_ids_without_a_token_have_no_text(tokenizer):
    """The head of a model may have more rows than the vocabulary."""
    n = tokenizer.vocab_size
    stream = IncrementalDetokenizer(tokenizer, prompt_ids=[n + 5])
    assert [stream.push(i) for i in (n, *tokenizer.encode("x"), n + 1)] == ["", "x", ""]
    assert tokenizer.known([0, n - 1, n]) == [0, n - 1]
