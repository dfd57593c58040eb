"""`nbflow quantize` to GGUF: read back with the gguf package, and with our own reader."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import families_by_arch, write_gguf
from logits_of_files import logits, logits_of_llama_cpp
from safetensors.numpy import save_file
from small_models import write_checkpoint, write_llama

import nbflow
import nbflow_kernels as nk
from nbflow.checkpoint import open_weights
from nbflow.checkpoint.readers.gguf import read_metadata, read_typed_metadata
from nbflow.conversion.gguf_metadata import model_metadata
from nbflow.conversion.gguf_names import ARCHITECTURES, check_reading
from nbflow.conversion.gguf_vocabulary import vocabulary
from nbflow.quantization.importance import read_importance
from nbflow.spec import resolve
from nbflow.spec.family import get_family
from nbflow.tokenization import load_tokenizer_file
from nbflow.tokenization.sentencepiece_proto import read_settings
from nbflow_kernels.errors import UsageError

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
GOLDEN_TOKENIZERS = FAMILIES.parent / "tokenizers"


def neighbours(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Interleave rows j and j + D/2 of each head, in plain loops."""
    order = []
    for first in range(0, len(array), head_dim):
        for j in range(head_dim // 2):
            order += [first + j, first + head_dim // 2 + j]
    return array[order]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small random Llama in float16."""
    folder = tmp_path_factory.mktemp("source") / "model"
    write_llama(folder, dtype=np.float16, n_layers=2)
    return folder


def test_llama_as_the_gguf_package_reads_it(source: Path, tmp_path: Path) -> None:
    done = nbflow.quantize_checkpoint(
        source, tmp_path / "x.gguf", "q8_0", rules=["output.weight=q4_0"]
    )
    assert any("no vocabulary" in note for note in done.notes)
    reader = gguf.GGUFReader(done.path)
    tensors = {t.name: t for t in reader.tensors}
    with open_weights(source) as file:
        query = file.array("model.layers.1.self_attn.q_proj.weight")
        value = file.array("model.layers.1.self_attn.v_proj.weight")
        head = file.array("lm_head.weight")
        norm = file.array("model.norm.weight")
        embedding = file.array("model.embed_tokens.weight")
    for name, format, wanted in (
        ("blk.1.attn_q.weight", "q8_0", neighbours(query, 32)),
        ("blk.1.attn_v.weight", "q8_0", value),
        ("output.weight", "q4_0", head),
    ):
        assert tensors[name].tensor_type == gguf.GGMLQuantizationType[format.upper()]
        assert tensors[name].shape.tolist() == list(wanted.shape[::-1])
        assert tensors[name].data.tobytes() == nk.quantize(wanted, format).tobytes()
    assert np.array_equal(tensors["token_embd.weight"].data, embedding)
    assert tensors["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert np.array_equal(tensors["output_norm.weight"].data, norm.astype(np.float32))
    values = {key: field.contents() for key, field in reader.fields.items()}
    assert values["general.architecture"] == "llama"
    assert values["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert values["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    assert values["llama.attention.head_count_kv"] == 4
    assert values["llama.attention.layer_norm_rms_epsilon"] == np.float32(1e-5)
    assert values["tokenizer.ggml.eos_token_id"] == 0


def test_blocks_are_what_quantizing_on_load_gives(source: Path, tmp_path: Path) -> None:
    nbflow.quantize_checkpoint(source, tmp_path / "f16.gguf", "f16")
    nbflow.quantize_checkpoint(source, tmp_path / "q8.gguf", "q8_0")
    nbflow.quantize_checkpoint(tmp_path / "f16.gguf", tmp_path / "again.gguf", "q8_0")
    wanted = logits(tmp_path / "f16.gguf", weights="q8_0")
    assert np.array_equal(logits(tmp_path / "q8.gguf"), wanted)
    assert np.array_equal(logits(tmp_path / "again.gguf"), wanted)


WRITTEN = (
    "llama31", "llama_linear", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "gemma",
    "phi", "phi3", "phi3_long", "gpt2", "gpt_neox", "gpt_neox_sequential", "falcon_7b",
    "falcon_40b", "bloom", "stablelm", "granite", "minicpm", "orion", "deepseek_moe",
    "deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "olmo2", "olmoe", "cohere", "nemotron",
    "cohere_plus", "stablelm2_12b", "internlm2",
    "glm4", "granitemoe", "mpt", "gpt_oss", "gpt_oss_floats",
    "seed_oss", "arcee", "ernie4_5", "hunyuan", "exaone4_full", "exaone", "glm4_moe",
    "bailing_moe_v2", "mistral4", "ministral3", "olmo3", "hunyuan_moe", "minimax_m2",
    "gpt_bigcode", "chatglm2", "llama_yarn",
)  # fmt: skip
"""Golden models that GGUF can express; the windows and scales of others are in `PUBLISHED`."""
NOT_LIKE_LLAMA_CPP = {
    "phi3": "llama.cpp takes no heads that are not hidden_size / heads wide",
    "deepseek_v2_lite": "llama.cpp knows a model without q_lora_rank by its 27 layers",
    "deepseek_v2": "llama.cpp has no groups of experts with softmax scores",
    "cohere_plus": "llama.cpp knows a model with norms of queries and keys by its 64 layers",
    "olmoe": "llama.cpp takes as many key/value heads as query heads only",
    "arcee": "llama.cpp has no biases of feed-forward networks here",
    "ernie4_5": "llama.cpp has no biases here",
    "hunyuan": "llama.cpp has no biases of attention here",
}


@pytest.mark.parametrize("model", WRITTEN)
def test_golden_models(model: str, tmp_path: Path) -> None:
    folder, path = FAMILIES / model, tmp_path / "x.gguf"
    done = nbflow.quantize_checkpoint(folder, path, "f32", rules=["*=f32"])
    assert {tensor.format for tensor in done.tensors} == {"f32"}
    arch = ARCHITECTURES[resolve(folder).spec.family]
    assert resolve(path).spec.family == families_by_arch()[arch].name
    with np.load(folder / "golden.npz") as file:
        ids, wanted = file["ids"], file["logits"]
    # as for the same models in test_families_gguf.py: sums in float32
    assert np.abs(logits(path, ids, kv="f32") - wanted).max() < 2e-6 * np.abs(wanted).max()


def test_factors_that_gguf_has_no_keys_for(tmp_path: Path) -> None:
    """GGUF has one factor on cosines and sines for short and for long sequences."""
    shutil.copytree(FAMILIES / "phi3_long", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] |= {"short_mscale": 1.0, "long_mscale": 1.2}
    path.write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"phi3_gguf cannot store rope\.scaling"):
        nbflow.quantize_checkpoint(tmp_path / "model", tmp_path / "x.gguf", "f32")


SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_hidden_layers": 5,
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA = {**SIZES, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "tie_word_embeddings": False,
}
PUBLISHED = {
    "gemma2": {**GEMMA, "model_type": "gemma2", "num_hidden_layers": 2,
               "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3": {**GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "rope_theta": 1e6,
               "rope_local_base_freq": 1e4},
    "cohere2": {**SIZES, "model_type": "cohere2", "sliding_window": 6, "logit_scale": 0.25},
    "smollm3": {**SIZES, "model_type": "smollm3"},
    "starcoder2": {**SIZES, "model_type": "starcoder2", "use_bias": True},
    "afmoe": {**SIZES, **EXPERTS, "model_type": "afmoe", "sliding_window": 6, "mup_enabled": True,
              "num_dense_layers": 1, "head_dim": 8, "num_shared_experts": 1},
    "exaone_moe": {**SIZES, **EXPERTS, "model_type": "exaone_moe", "sliding_window": 6,
                   "sliding_window_pattern": 3, "num_shared_experts": 1},
    "dots1": {**SIZES, **EXPERTS, "model_type": "dots1", "n_routed_experts": 5, "head_dim": 8,
              "num_key_value_heads": 4,
              "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True},
    "ernie4_5_moe": {**SIZES, **EXPERTS, "model_type": "ernie4_5_moe", "moe_num_experts": 5,
                     "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "olmoe_heads": {**SIZES, "model_type": "olmoe", "num_key_value_heads": 4, "num_experts": 5,
                       "num_experts_per_tok": 2, "tie_word_embeddings": False},
}  # fmt: skip
"""Configurations with published windows, scales and layers without rotary embedding."""


@pytest.mark.parametrize("model", PUBLISHED)
def test_windows_and_scales(model: str, tmp_path: Path) -> None:
    """As from the checkpoint, which test_families.py compares with transformers."""
    write_checkpoint(tmp_path / "model", PUBLISHED[model])
    nbflow.quantize_checkpoint(tmp_path / "model", tmp_path / "x.gguf", "f32", rules=["*=f32"])
    with open_weights(tmp_path / "model") as first, open_weights(tmp_path / "x.gguf") as second:
        wanted = first.array("model.norm.weight") + np.float32(model.startswith("gemma"))
        np.testing.assert_array_equal(second.array("output_norm.weight"), wanted)
    ids = np.arange(1, 21)
    ours, theirs = (logits(tmp_path / name, ids, kv="f32") for name in ("model", "x.gguf"))
    assert np.abs(ours - theirs).max() < 2e-6 * np.abs(ours).max()


@pytest.mark.parametrize("model", [*WRITTEN, *PUBLISHED])
def test_llama_cpp_computes_the_same(model: str, tmp_path: Path) -> None:
    """llama.cpp loads the file and computes our logits.

    GELU it takes from a table of float16: one layer of Gemma 3 is off by 2.3e-4, and random layers
    amplify that, so that seven are off by 2.6e-3 (with or without windows).
    """
    pytest.importorskip("llama_cpp", reason="llama-cpp-python (extra bench) is compiled on install")
    if model in NOT_LIKE_LLAMA_CPP:
        pytest.skip(NOT_LIKE_LLAMA_CPP[model])
    folder, path = FAMILIES / model, tmp_path / "x.gguf"
    if model in PUBLISHED:
        folder = tmp_path / "model"
        write_checkpoint(folder, PUBLISHED[model])
    nbflow.quantize_checkpoint(folder, path, "f32", rules=["*=f32"])
    ids, options = np.arange(1, 33), {}
    if model.startswith("gpt_oss"):  # llama.cpp rounds YaRN's ramp to whole pairs
        options["spec"] = tmp_path / "rounds.toml"
        options["spec"].write_text('family = "gpt_oss"\n[override]\nrope_truncate = true\n')
    ours, theirs = logits(folder, ids, kv="f32", **options), logits_of_llama_cpp(path, ids)
    tolerance = 5e-3 if model == "gemma3" else 1e-3
    assert np.abs(ours - theirs).max() < tolerance * np.abs(ours).max()


def test_importances(tmp_path: Path) -> None:
    """Columns with more importance have smaller errors, in all three file formats."""
    write_llama(tmp_path / "model", n_layers=1)
    rng = np.random.default_rng(0)
    weight = np.where(np.arange(64) < 8, 100, 1).astype(np.float32)
    names = [f"blk.0.{part}.weight" for part in ("attn_q", "attn_k", "attn_v", "ffn_up")]
    write_imatrix(tmp_path / "new.gguf", dict.fromkeys(names, weight))
    write_old_imatrix(tmp_path / "old.dat", dict.fromkeys(names, weight))
    save_file(dict.fromkeys(names, weight), tmp_path / "x.safetensors")
    errors = {}
    for file in (None, "new.gguf", "old.dat", "x.safetensors"):
        out = tmp_path / f"{file}.gguf"
        importance = None if file is None else tmp_path / file
        done = nbflow.quantize_checkpoint(tmp_path / "model", out, "q4_0", importance=importance)
        assert any("3 matrices have no importances" in note for note in done.notes) == bool(file)
        with open_weights(out) as new, open_weights(tmp_path / "model") as old:
            change = new.array(names[2]) - old.array("model.layers.0.self_attn.v_proj.weight")
        errors[file] = [np.square(change[:, :8]).mean(), np.square(change[:, 8:]).mean()]
    assert errors["new.gguf"] == errors["old.dat"] == errors["x.safetensors"]
    assert errors["new.gguf"][0] < errors[None][0]
    assert errors["new.gguf"][1] > errors[None][1]
    own = {"layers.0.attn.q.weight": rng.random(64).astype(np.float32)}
    nbflow.quantize_checkpoint(tmp_path / "model", tmp_path / "y.gguf", "q4_0", importance=own)
    for wrong, message in (
        ({"blk.0.attn_q.weight": np.ones(63)}, r"must have shape \(64,\), the columns"),
        ({"other": np.ones(64)}, "importances for other, but for none of the matrices"),
    ):
        with pytest.raises(UsageError, match=message):
            nbflow.quantize_checkpoint(
                tmp_path / "model", tmp_path / "z.gguf", "q4_0", importance=wrong
            )


def test_importances_of_experts(tmp_path: Path) -> None:
    """Experts have separate importance; one without tokens has equal importance."""
    shape = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    config = json.loads((FAMILIES / "mixtral" / "config.json").read_text()) | shape
    write_checkpoint(tmp_path / "model", config)
    weight = np.ones((4, 64), np.float32)
    weight[2, :8] = 100
    name = "blk.0.ffn_up_exps.weight"
    write_imatrix(tmp_path / "i.gguf", {name: weight}, unused=1)
    blocks = []
    for importance in ({name: np.ones(64)}, tmp_path / "i.gguf"):
        out = tmp_path / "x.gguf"
        nbflow.quantize_checkpoint(
            tmp_path / "model", out, "q4_0", importance=importance, force=True
        )
        with open_weights(out) as file:
            blocks.append(file.array(name))
    same = [np.array_equal(a, b) for a, b in zip(*blocks, strict=True)]
    assert same == [True, True, False, True]


def write_imatrix(path: Path, weights: dict[str, np.ndarray], unused: int | None = None) -> None:
    """Write an importance file like llama.cpp's imatrix: sums of squares and counts."""
    writer = gguf.GGUFWriter(str(path), "")
    writer.add_type("imatrix")
    for name, weight in weights.items():
        counts = np.full((len(np.atleast_2d(weight)), 1), 5, np.float32)
        if unused is not None:
            counts[unused] = 0
        writer.add_tensor(f"{name}.in_sum2", np.atleast_2d(weight) * counts)
        writer.add_tensor(f"{name}.counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_old_imatrix(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Write an importance file in the older binary form."""
    data = struct.pack("<i", len(weights))
    for name, weight in weights.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 5, len(weight))
        data += (5 * weight).astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<i", 7))


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, struct.pack("<iiii", 1, 4, 0, 0)])
def test_what_is_no_importance_file(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.dat").write_bytes(data)
    with pytest.raises(UsageError, match=r"x\.dat"):
        read_importance(tmp_path / "x.dat")


def test_gguf_keeps_its_metadata_and_what_is_not_converted(tmp_path: Path) -> None:
    before, after = tmp_path / "before.gguf", tmp_path / "after.gguf"
    write_gguf(FAMILIES / "gemma2", "gemma2", before)
    done = nbflow.quantize_checkpoint(before, after, "f16")
    old, new = read_typed_metadata(before), read_typed_metadata(after)
    assert new.pop("general.file_type") == ((4,), gguf.LlamaFileType.MOSTLY_F16)
    assert new == old
    with open_weights(before) as first, open_weights(after) as second:
        assert first.names() == second.names()
        for tensor in done.tensors:
            same = first.sha256(tensor.name) == second.sha256(tensor.name)
            assert same == (tensor.format == "f32")


def test_vocabulary_of_the_bundled_model(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    done = nbflow.quantize_checkpoint("tiny_python", path, "f16")
    assert not done.notes
    text = "def f(x):\n    return 'a\u00e9' + str(x) * 1234  # <|endoftext|>"
    ours, theirs = nbflow.load_tokenizer(path), nbflow.load_tokenizer(resolve("tiny_python").path)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert read_metadata(path)["tokenizer.ggml.pre"] == "gpt-2"
    reader = gguf.GGUFReader(path)
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == 2048


@pytest.mark.parametrize(
    ("model", "to", "message"),
    [
        ("opt", "q8_0", "models of family 'opt' cannot be written as GGUF"),
        ("gemma2", "f16", r"cannot store sm_scale = 0\.204"),
        ("baichuan2_7b", "f16", "cannot store normalize_head = True"),
        ("ernie4_5_moe", "f16", r"cannot store moe = MoeSpec\("),
        ("qwen2", "q4", "GGUF has no type for q4_b32t1a"),
        ("afmoe", "f16", r"cannot store full_layers = frozenset\(\{1\}\)"),
        ("mistral", "f16", "cannot store window"),
    ],
)
def test_what_gguf_cannot_say_is_refused(model: str, to: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        nbflow.quantize_checkpoint(FAMILIES / model, tmp_path / "x.gguf", to)
    assert not list(tmp_path.iterdir())


def test_gguf_to_safetensors_is_refused(tmp_path: Path) -> None:
    nbflow.quantize_checkpoint(FAMILIES / "qwen2", tmp_path / "x.gguf", "f16")
    with pytest.raises(UsageError, match=r"write a \.gguf file"):
        nbflow.quantize_checkpoint(tmp_path / "x.gguf", tmp_path / "y", "f16")


def test_a_wrong_number_would_be_noticed(source: Path, tmp_path: Path) -> None:
    spec = resolve(source).spec
    done = nbflow.quantize_checkpoint(source, tmp_path / "x.gguf", "f16", dry_run=True)
    assert not list(tmp_path.iterdir())
    names = [tensor.name for tensor in done.tensors]
    metadata, family = model_metadata(spec, "llama"), get_family("llama_gguf", "x")
    check_reading(spec, family, metadata, names, "x")
    metadata["llama.rope.freq_base"] = ((6,), 5000.0)
    with pytest.raises(UsageError, match=r"cannot store rope\.theta = 10000\.0"):
        check_reading(spec, family, metadata, names, "x")
    with pytest.raises(UsageError, match=r"would not be found as blk\.0"):
        check_reading(spec, family, metadata, names[:2], "x")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizes text"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "GGUF has no name for"),
        ({"added_tokens": [7]}, "not a readable tokenizer"),
    ],
)
def test_other_tokenizers_are_left_out_with_a_note(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = resolve("tiny_python").tokenizer
    assert path is not None
    table = json.loads(path.read_text(encoding="utf-8")) | change
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(table), encoding="utf-8")
    entries, notes = vocabulary(other, 2048)
    assert why in notes[0]
    assert entries["tokenizer.ggml.model"][1] == "no_vocab"


def test_the_vocabulary_of_a_sentencepiece_file(tmp_path: Path) -> None:
    """The GGUF file alone gives the tokens of tokenizer.model and its added tokens."""
    pieces = GOLDEN_TOKENIZERS / "sp_bpe" / "tokenizer.model"
    n = load_tokenizer_file(pieces).vocab_size + 5
    folder = tmp_path / "model"
    write_llama(folder, n_layers=1, vocab_size=n)
    shutil.copy(pieces, folder / "tokenizer.model")
    added = {"content": "<|im_start|>", "special": True}
    config = {"added_tokens_decoder": {str(n - 5): added}, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    done = nbflow.quantize_checkpoint(folder, tmp_path / "x.gguf", "q8_0")
    assert not any("no vocabulary" in note for note in done.notes)
    own, written = (nbflow.load_tokenizer(path) for path in (folder, tmp_path / "x.gguf"))
    assert written.vocab_size == n
    for text in ("def f(x):\n    return x", "  a  b ", "café 漢字 🦩", "", "\t<|im_start|>"):
        for parse in (False, True):
            ids = own.encode(text, True, parse)
            assert written.encode(text, True, parse) == ids
        assert written.decode(own.encode(text)) == own.decode(own.encode(text))
    reader = gguf.GGUFReader(done.path)
    assert reader.fields["tokenizer.ggml.model"].contents() == "llama"


def test_sentencepiece_files_that_gguf_cannot_hold(tmp_path: Path) -> None:
    unigram = GOLDEN_TOKENIZERS / "sp_unigram" / "spiece.model"
    shutil.copy(unigram, tmp_path / "tokenizer.model")
    entries, (note,) = vocabulary(tmp_path / "tokenizer.model", 5000)
    assert entries["tokenizer.ggml.model"][1] == "no_vocab"
    assert "tokenizer.model is not of byte-pair encoding" in note
    pieces = GOLDEN_TOKENIZERS / "sp_bpe" / "tokenizer.model"
    shutil.copy(pieces, tmp_path / "tokenizer.model")
    _, (note,) = vocabulary(tmp_path / "tokenizer.model", 10)
    assert "tokens, not 10" in note
    for data in (b"\x12\xff", b"\x12\x05a", b"\x0b"):
        with pytest.raises(ValueError, match=r"cut off|longer|unknown kind"):
            read_settings(data)
