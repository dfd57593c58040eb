"""Structured output: the text matches for any logits."""

from __future__ import annotations

import json
import pickle
import re

import numpy as np
import pytest
import tokenizer_files
import tokenizers

import nbflow
from nbflow.options import SamplingParams
from nbflow.sampling import Filters, Grammar, build_strategy
from nbflow.sampling.structured_output import StructureError
from nbflow.tokenization.token_bytes import vocabulary_bytes
from nbflow_kernels.errors import UsageError

pytest.importorskip("llguidance", reason="needs the extra structured")
jsonschema = pytest.importorskip("jsonschema", reason="judges the results; in the extra dev")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": -5, "maximum": 300},
        "kind": {"enum": ["a", "bé", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(
    scope="module", params=["tiny_python", "bpe", "sp_bpe", "sp_unigram", "gguf", "llama"]
)
def tokenizer(request, tmp_path_factory):
    if request.param == "gguf":
        path = tmp_path_factory.mktemp("gguf") / "bpe.gguf"
        return nbflow.load_tokenizer(tokenizer_files.bpe_gguf(path, "gpt-2"))
    if request.param == "llama":
        return nbflow.load_tokenizer(llama_file(tmp_path_factory.mktemp("llama")))
    if request.param in ("sp_bpe", "sp_unigram"):
        pytest.importorskip("sentencepiece", reason="needs the extra sentencepiece")
    known = request.param == "tiny_python"
    return nbflow.load_tokenizer(request.param if known else tokenizer_files.GOLDEN / request.param)


def llama_file(folder):
    """A tokenizer.json like that of Llama 2: U+2581 for spaces, byte fallback."""
    parts = tokenizers.decoders
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *'abcdefghijklmnopqrstuvwxyz0123456789-(),:{}[]"', "\u2581t", "th"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab, [("\u2581", "t"), ("t", "h")], unk_token="<unk>", byte_fallback=True
        )
    )
    space = tokenizers.normalizers.Replace(" ", "\u2581")
    before = tokenizers.normalizers.Prepend("\u2581")
    made.normalizer = tokenizers.normalizers.Sequence([before, space])
    made.decoder = parts.Sequence(
        [parts.Replace("\u2581", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def generate(tokenizer, seed, most=400, **structure):
    """Generate from random logits, with padding rows beyond the tokenizer."""
    n_vocab = tokenizer.vocab_size + 5
    ends = tuple(tokenizer.eos_ids) or (0,)
    made = build_strategy(SamplingParams(temperature=1.0, **structure), n_vocab, tokenizer, ends)
    rng, state, ids = np.random.default_rng(seed), made.begin([1, 2], seed), []
    for _ in range(most):
        token = state.choose(rng.normal(0, 1, n_vocab).astype(np.float32))
        if token in ends:
            return tokenizer.decode(ids)
        assert token < tokenizer.vocab_size
        state.accept(token)
        ids.append(token)
    return None  # too long: not judged


def test_json_follows_its_schema(tokenizer):
    judged = 0
    for seed in range(12):
        text = generate(tokenizer, seed, json_schema=SCHEMA)
        if text is not None:
            jsonschema.validate(json.loads(text), SCHEMA)
            judged += 1
    assert judged == 12


@pytest.mark.parametrize(
    ("text", "blank", "n_allowed"),
    [("{", " ", 1), ("{", "\n", 2), ("{", "\t", 0), ("{\n", " ", 20), ('{"a"', " ", 1),
     ('{"a": ', "\n", 0), ('{"a": 1,\n\n', "\t", 20), ("", " ", 0), ('{"a": 1}', " ", 0)],
)  # fmt: skip
def test_blanks_between_tokens_of_json_are_bounded(text, blank, n_allowed):
    tokenizer = nbflow.load_tokenizer("tiny_python")
    n, ids = tokenizer.vocab_size, vocabulary_bytes(tokenizer)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema["x-guidance"] = {"whitespace_pattern": "[ \\n\\t]*"}  # of a request: without effect
    state = Grammar("json_schema", schema, tokenizer, n, (0,)).begin()
    for character in text:
        state.accept(ids.index(character.encode()))
    token = ids.index(blank.encode())
    for count in range(n_allowed + 1):
        words = state.bitmask(n).view(np.uint32)[0]
        assert bool(words[token // 32] >> token % 32 & 1) == (count < n_allowed)
        state.accept(token) if count < n_allowed else None


@pytest.mark.parametrize("seed", range(4))
def test_regex_choice_and_grammar(tokenizer, seed):
    pattern = r"[a-z]{2,5}-[0-9]{3}(é|x)"
    assert re.fullmatch(pattern, generate(tokenizer, seed, regex=pattern))
    encode_errors = ["yes", "no", "not at all"]
    assert generate(tokenizer, seed, choice=encode_errors) in encode_errors
    gbnf = 'root ::= "(" item ("," item)? ")"\nitem ::= [0-9] | "x" [a-c]'
    item = "([0-9]|x[a-c])"
    assert re.fullmatch(rf"\({item}(,{item})?\)", generate(tokenizer, seed, grammar=gbnf))


def test_tokens_put_together_are_the_bytes_of_the_text(tokenizer):
    texts = vocabulary_bytes(tokenizer)
    assert len(texts) == tokenizer.vocab_size
    for text in ("def f(x):\n    return x + 1", "für 漢字 and 😀!"):
        ids = tokenizer.encode("a" + text)
        joined = b"".join(texts[i] or b"" for i in ids)
        assert joined.decode().lstrip() == tokenizer.decode(ids).replace(" ⁇ ", "").lstrip()


def test_many_choices():
    """More choices than llguidance allows as grammar alternatives."""
    tokenizer = nbflow.load_tokenizer("tiny_python")
    choices = [f"choice number {i}." for i in range(3000)] + ["a.b", "a|b", "[x]\\", "(", "a", "a*"]
    found = {generate(tokenizer, seed, choice=choices) for seed in range(4)}
    assert found <= set(choices)
    only = [text for text in choices if not text.startswith("choice")]
    assert {generate(tokenizer, seed, choice=only) for seed in range(12)} <= set(only)


def test_vocabularies_of_few_end_tokens_are_kept():
    """Each choice of end tokens has a separate vocabulary."""
    tokenizer = nbflow.load_tokenizer("tiny_python")
    for end in range(20):
        grammar = Grammar("regex", "a", tokenizer, 2048, (end,))
        assert grammar.begin().bitmask(2048).any()
    assert len(tokenizer.__dict__["_grammar_vocabularies"]) <= 8


def test_what_is_too_much_is_refused_before_a_step():
    tokenizer = nbflow.load_tokenizer("tiny_python")
    for kind, text in (
        ("json_schema", {"$ref": "#"}),
        ("regex", "a{1000000}"),
        ("grammar", "start: start"),
        ("regex", ".*" * 500),
    ):
        with pytest.raises(StructureError, match=kind) as refused:
            Grammar(kind, text, tokenizer, 2048, (0,))
        again = pickle.loads(pickle.dumps(refused.value))
        assert (str(again), again.kind) == (str(refused.value), kind)


def test_what_cannot_be_is_refused():
    tokenizer = nbflow.load_tokenizer("tiny_python")
    assert Grammar("json_schema", "true", tokenizer, tokenizer.vocab_size, (0,)).begin()
    for kind, text, message in (
        ("regex", "(", "regex"),
        ("json_schema", "false", "json_schema"),
        ("json_schema", {"type": "nonsense"}, "json_schema"),
        ("json_schema", "{", "json_schema"),
        ("choice", [], "choice must be non-empty"),
        ("grammar", "root ::= missing", "grammar"),
        ("yaml", "", "unknown structure"),
    ):
        with pytest.raises(UsageError, match=message):
            Grammar(kind, text, tokenizer, tokenizer.vocab_size, (0,))
    with pytest.raises(UsageError, match="needs an end token"):
        Grammar("regex", "a", tokenizer, tokenizer.vocab_size, ())


def test_a_structure_can_be_sent_to_another_rank():
    tokenizer = nbflow.load_tokenizer("tiny_python")
    grammar = Grammar("regex", "[ab]{3}-x", tokenizer, tokenizer.vocab_size, (0,))
    there = pickle.loads(pickle.dumps(grammar)).begin()
    here, n = grammar.begin(), tokenizer.vocab_size
    for token in (tokenizer.token_id("a"), tokenizer.token_id("b"), tokenizer.token_id("b")):
        np.testing.assert_array_equal(here.bitmask(n), there.bitmask(n))
        here.accept(token)
        there.accept(token)
    with pytest.raises(UsageError, match="structured output"):
        there.accept(tokenizer.token_id("x"))


def test_a_fork_of_a_place_goes_on_by_itself():
    tokenizer = nbflow.load_tokenizer("tiny_python")
    made = build_strategy(
        SamplingParams(temperature=1.0, choice=["ab", "cd"]), tokenizer.vocab_size, tokenizer, (0,)
    )
    assert isinstance(made.strategy, Filters)
    state, row = made.begin([], 0), np.zeros(tokenizer.vocab_size, np.float32)
    a, c = tokenizer.token_id("a"), tokenizer.token_id("c")
    other = state.fork()
    state.accept(a)
    assert other.probs(row.copy())[c] > 0.0
    assert state.probs(row.copy())[c] == 0.0
