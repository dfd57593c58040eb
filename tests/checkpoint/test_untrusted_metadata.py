"""Numbers and texts of configurations and tokenizers that no model has: each is refused by name."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from metadata_mutations import tokenizer_jsons
from tokenizer_files import ugm_gguf, wpm_gguf
from tokenizer_files import write_gguf as write_vocabulary

import nbflow
import nbflow_kernels as nk
from nbflow.checkpoint.readers import gguf
from nbflow.spec import load_tokenizer, resolve
from nbflow.spec.fields import FIELDS, MAX_CONTEXT, MAX_LAYERS, Field, check_field
from nbflow.spec.model_file import load_model_file, published
from nbflow.tokenization import Tokenizer
from nbflow.tokenization.package_errors import is_panic, package_errors
from nbflow_kernels.errors import UsageError
from nbflow_specs import CHECKPOINTS

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA = GOLDEN / "families" / "llama31"
HUGE = 10**400


def model(path: Path, **config: Any) -> Path:
    """Write a small Llama with other numbers in its config.json."""
    content = json.loads((LLAMA / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(content))
    shutil.copy(LLAMA / "model.safetensors", path)
    return path


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("head_dim", 0, "must be 1 to"),
        ("head_dim", -3, "must be 1 to"),
        ("head_dim", 7, "rope.dim must be even"),
        ("hidden_size", HUGE, "must be 1 to"),
        ("rms_norm_eps", HUGE, "must be a number that fits a float"),
        ("rms_norm_eps", float("nan"), "must be a number from 0 to"),
        ("rms_norm_eps", float("inf"), "must be a number from 0 to"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e39}, "theta: must be a"),
        ("num_hidden_layers", 10**6, f"must be 1 to {MAX_LAYERS}"),
        ("num_hidden_layers", 2**31, f"must be 1 to {MAX_LAYERS}"),
        ("num_hidden_layers", 2000, "states 2000 layers; .* the checkpoint holds"),
        ("num_attention_heads", 2**20, "must be 1 to"),
        ("num_key_value_heads", 0, "must be 1 to"),
        ("max_position_embeddings", 2**31 - 1, f"must be 1 to {MAX_CONTEXT}"),
        ("eos_token_id", 2**31, "must be 0 to 2147483647"),
        ("eos_token_id", [1, -7], "must be 0 to 2147483647"),
        ("bos_token_id", HUGE, "must be 0 to 2147483647"),
        ("rope_scaling", {"rope_type": "linear", "factor": HUGE}, r"factor: must be a finite"),
        ("rope_scaling", {"rope_type": "linear", "factor": 1e-320}, "not finite"),
        (
            "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": "x"},
            "dim: must be a",
        ),
        (
            "rope_scaling",
            {"rope_type": "yarn", "original_max_position_embeddings": 0},
            "division by zero",
        ),
    ],
)
def test_configuration(tmp_path: Path, key: str, value: Any, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted) as caught:
        resolve(model(tmp_path, **{key: value}))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_ids_that_models_state(tmp_path: Path) -> None:
    """Ids beyond the vocabulary stay; the numbers that mean none are absent."""
    spec = resolve(model(tmp_path, bos_token_id=-1, eos_token_id=[3, 100_000, -1, 2**32 - 1])).spec
    assert spec.vocab_size < 100_000
    assert (spec.bos_token_id, spec.eos_token_ids) == (None, (3, 100_000))
    shutil.copy(CHECKPOINTS / "tiny_python" / "tokenizer.json", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, (3, 100_000))


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", HUGE), ("temperature", float("nan")), ("top_p", 2), ("top_k", 2**31)],
)
def test_generation_settings(tmp_path: Path, key: str, value: Any) -> None:
    path = model(tmp_path) / "generation_config.json"
    path.write_text(json.dumps({key: value}))
    with pytest.raises(UsageError, match=f"{re.escape(str(path))}: {key}: must be"):
        resolve(tmp_path)


def test_model_and_family_files(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    for text, message in (
        (f'family = "llama"\n[override]\nn_layers = {MAX_LAYERS + 1}', "n_layers: must be 1 to"),
        (f'family = "llama"\n[override]\nnorm_eps = {HUGE}', "norm_eps: must be a number that"),
        ('family = "llama"\n[override]\nsm_scale = nan', "sm_scale: must be a number from"),
        (f'family = "llama"\n[defaults]\ntemperature = {HUGE}', "temperature: must be a number"),
        ('description = "x"\n[structure]\nhead_dim = 0', "head_dim: must be 1 to"),
        ('description = "x"\n[config]\nwindow = { default = -1 }', "window: must be 1 to"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message) as caught:
            load_model_file(path)
        assert str(path) in str(caught.value)


def test_experts_of_all_layers(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(
        'family = "mixtral"\n[override]\nn_layers = 1000\nn_experts = 4096\n[config]\n'
        "vocab_size = 8\nhidden_size = 16\nintermediate_size = 16\nnum_attention_heads = 2\n"
        'num_experts_per_tok = 2\nhidden_act = "silu"\n'
    )
    with pytest.raises(UsageError, match="4096 in each of 1000 layers"):
        published(load_model_file(path))


def test_every_number_has_bounds() -> None:
    """NaN, infinity and numbers beyond 32 bits are rejected, unless one means no value."""
    for name, field in FIELDS.items():
        if field.kind is float:
            wrong: list[Any] = [float("nan"), float("inf"), -float("inf"), 1e39, HUGE]
        elif field.kind in (int, [int]):
            wrong = [2**31, 2**63, HUGE, -5]
        else:
            continue
        for value in wrong:
            if value in field.absent:
                continue
            with pytest.raises(UsageError, match=f"here: {name}: must be"):
                check_field(value, f"here: {name}", field)
    with pytest.raises(UsageError, match="at most 4096 entries"):
        check_field([0] * 5000, "here", Field([int], ""))


def gguf_model(path: Path, **changes: int) -> Path:
    """Write a small Llama as GGUF, with other numbers."""
    write_gguf(LLAMA, "llama", path)
    data = path.read_bytes()
    for key, value in changes.items():
        name = f"llama.{key.replace('__', '.')}".encode()
        at = data.index(name) + len(name)
        assert data[at : at + 4] == struct.pack("<I", 4), "a uint32"
        data = data[: at + 4] + struct.pack("<I", value) + data[at + 8 :]
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("block_count", 10**6, "llama.block_count: must be 1 to"),
        ("block_count", 2**31, "llama.block_count: must be 1 to"),
        ("block_count", 4000, "llama.block_count states 4000 layers"),
        ("rope__dimension_count", 2**31 - 1, "llama.rope.dimension_count: must be 0 to"),
        ("context_length", 2**31 - 1, "llama.context_length: must be 1 to"),
        ("attention__head_count", 0, "llama.attention.head_count: must be 1 to"),
    ],
)
def test_gguf_numbers(tmp_path: Path, key: str, value: int, wanted: str) -> None:
    path = gguf_model(tmp_path / "m.gguf", **{key: value})
    with pytest.raises(UsageError, match=wanted) as caught:
        resolve(path)
    assert str(path) in str(caught.value)


# ---- tokenizers ---------------------------------------------------------------------------------


def tokenizer_json(path: Path, kind: str, **changes: Any) -> Path:
    """Write a tokenizer.json with replaced sections; those of the model are under ``model``."""
    content = tokenizer_jsons()[kind]
    content["model"] = content["model"] | changes.pop("model", {})
    (path / "tokenizer.json").write_text(json.dumps(content | changes))
    return path


def charsmap(n_bytes: int) -> str:
    return base64.b64encode(struct.pack("<I", n_bytes) + b"abcd").decode()


TEMPLATE = {
    "type": "TemplateProcessing", "special_tokens": {},
    "single": [
        {"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
}  # fmt: skip
LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}


@pytest.mark.parametrize(
    ("kind", "changes", "wanted"),
    [
        (
            "unigram",
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
            "charsmap",
        ),
        (
            "unigram",
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(2**31)}},
            "says it has 2147483648 bytes, but 8 are there",
        ),
        ("word_level", {"model": {"vocab": {"[UNK]": 0, "a": 2**30}}}, "id of 'a' must be 0 to"),
        (
            "word_level",
            {"added_tokens": [{"id": 2**30, "content": "a", "special": True}]},
            "added_tokens: the id of 'a' must be 0 to",
        ),
        ("word_level", {"model": {"vocab": {"[UNK]": 0, "a" * 70_000: 1}}}, "at most 65536 charac"),
        (
            "bpe",
            {"normalizer": {"type": "Sequence", "normalizers": [LONGER] * 3}},
            "normalizer: its replacements may lengthen a text",
        ),
    ],
)
def test_tokenizer_json(tmp_path: Path, kind: str, changes: Any, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted) as caught:
        load_tokenizer(tokenizer_json(tmp_path, kind, **changes))
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("word_level", {"pre_tokenizer": {"type": "FixedLength", "length": 0}}),
        ("bpe", {"post_processor": TEMPLATE}),
        ("unigram", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(0)}}),
        ("word_piece", {"model": {"vocab": {"the": 0}}, "post_processor": None}),
        ("word_level", {"model": {"vocab": {"the": 0}}, "pre_tokenizer": None}),
    ],
)
def test_tokenizers_that_fail_when_used(tmp_path: Path, kind: str, changes: Any) -> None:
    """The package panics, or raises bare Exception, only once there is a text."""
    tokenizer = load_tokenizer(tokenizer_json(tmp_path, kind, **changes))
    with pytest.raises(UsageError, match=r"tokenizer\.json: cannot encode the text: "):
        tokenizer.encode("hello world", add_special_tokens=True)


def test_interrupts_pass_where_panics_do_not() -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    assert is_panic(panic("index out of bounds"))
    with pytest.raises(UsageError, match="file: index out of bounds"), package_errors("file"):
        raise panic("index out of bounds")
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), package_errors("file"):
            raise error


def test_load_goes_on_without_the_tokenizer(tmp_path: Path) -> None:
    """A tokenizer that panics is missed only where one is needed."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": ""}
    tokenizer_json(model(tmp_path), "unigram", normalizer=normalizer)
    with nbflow.load(tmp_path, threads=1) as loaded:
        assert len(loaded.generate([1, 2, 3], 2, ignore_eos=True).ids) == 2
        with pytest.raises(UsageError, match=r"cannot be used .*tokenizer\.json"):
            loaded.generate("hello", 2)


def test_positions_that_memory_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of millions of positions is legal; the out-of-memory error names a remedy."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(nk, "rope_cos_sin_cache", fail)
    wanted = "out of memory on cpu: the rotary angles asked for .* bytes .*a shorter max_context"
    with (
        pytest.raises(UsageError, match=wanted),
        nbflow.load(model(tmp_path), threads=1, max_context=64) as loaded,
    ):
        loaded.generate([1, 2, 3], 2, ignore_eos=True)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"bos_token": "\ud800"}, "bos_token: must be valid Unicode"),
        ({"eos_token": {"content": "a\udfff"}}, "eos_token: must be valid Unicode"),
        ({"added_tokens_decoder": {"1" * 5000: {"content": "x"}}}, "is not an id and a token"),
        ({"added_tokens_decoder": {str(2**40): {"content": "x"}}}, "'x': must have an id, 0 to"),
        ({"added_tokens_decoder": {"5": {"content": "\ud800"}}}, "must be valid Unicode"),
    ],
)
def test_tokenizer_config(tmp_path: Path, content: Any, wanted: str) -> None:
    path = tokenizer_json(tmp_path, "bpe") / "tokenizer_config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=wanted) as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)


def refused(path: Path, wanted: str) -> None:
    """Assert that a tokenizer file is refused by name."""
    with pytest.raises(UsageError, match=wanted) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_gguf_bert_vocabulary_that_is_not_utf8(tmp_path: Path) -> None:
    path = wpm_gguf(tmp_path / "m.gguf")
    word = load_tokenizer(path).token_id("the")
    assert word is not None
    data = path.read_bytes().replace("\u2581the".encode(), b"\xffxthex", 1)
    path.write_bytes(data)
    refused(path, "the vocabulary is damaged")


@pytest.mark.parametrize("kind", [-1, 7, 2**31 - 1])
def test_gguf_type_of_a_piece(tmp_path: Path, kind: int) -> None:
    pytest.importorskip("sentencepiece")
    path = ugm_gguf(tmp_path / "m.gguf")
    tokens = gguf.read_metadata(path)["tokenizer.ggml.tokens"]
    types = [kind, *[1] * (len(tokens) - 1)]
    scores = [0.0] * len(tokens)
    refused(
        write_vocabulary(path, "t5", tokens, types, scores=scores),
        "token 0 must have a type from 0",
    )


def test_sentencepiece_model_that_is_not_utf8(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    path = tmp_path / "tokenizer.model"
    data = (GOLDEN / "tokenizers" / "sp_bpe" / "tokenizer.model").read_bytes()
    at = data.index("\u2581t".encode())
    path.write_bytes(data[:at] + b"\xff\xff\xff" + data[at + 3 :])
    refused(path, "not a readable SentencePiece model")


def ids_of(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("the cats", add_special_tokens=True)


def test_valid_ones_work(tmp_path: Path) -> None:
    """The files that are changed above are right without the change."""
    assert resolve(model(tmp_path)).spec.n_layers > 1
    for kind in tokenizer_jsons():
        assert ids_of(load_tokenizer(tokenizer_json(tmp_path, kind)))
