"""`nbflow quantize` to GGUF: read back with the gguf package, and with our own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import write_gguf
from specs import write_llama

import nbflow
import nbflow_kernels as nk
from nbflow.spec import resolve
from nbflow.spec.family import get_family
from nbflow.weights import open_weights
from nbflow.weights.gguf import read_metadata, read_typed_metadata
from nbflow.writing.gguf_names import ARCHITECTURES, check_reading, model_metadata
from nbflow.writing.gguf_vocabulary import vocabulary
from nbflow_kernels.errors import UsageError

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
IDS = np.arange(1, 9)


def logits(model: Path, ids: np.ndarray = IDS, **options: Any) -> np.ndarray:
    with nbflow.load(model, threads=1, **options) as loaded:
        return loaded.logits(ids)


def neighbours(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Return rows j and j + D/2 of each head next to each other, spelt out."""
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


@pytest.mark.parametrize("model", ["llama31", "mixtral", "qwen2", "qwen3", "llama_linear"])
def test_golden_models(model: str, tmp_path: Path) -> None:
    folder, path = FAMILIES / model, tmp_path / "x.gguf"
    done = nbflow.quantize_checkpoint(folder, path, "f32", rules=["*=f32"])
    assert {tensor.format for tensor in done.tensors} == {"f32"}
    assert resolve(path).spec.family.startswith(ARCHITECTURES[resolve(folder).spec.family])
    with np.load(folder / "golden.npz") as file:
        ids, wanted = file["ids"], file["logits"]
    # as for the same models in test_families_gguf.py: sums in float32
    assert np.abs(logits(path, ids, kv="f32") - wanted).max() < 2e-6 * np.abs(wanted).max()


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
        ("gemma", "q8_0", "models of family 'gemma' cannot be written as GGUF"),
        ("qwen2", "q4", "GGUF has no type for q4_b32t1a"),
        ("llama_yarn", "f16", r"cannot say rope\.scaling"),
        ("mistral", "f16", "cannot say window"),
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
    with pytest.raises(UsageError, match=r"cannot say rope\.theta = 10000\.0"):
        check_reading(spec, family, metadata, names, "x")
    with pytest.raises(UsageError, match=r"would not be found as blk\.0"):
        check_reading(spec, family, metadata, names[:1], "x")


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
