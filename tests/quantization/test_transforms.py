"""Function-preserving weight transforms, loaded and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_models import write_llama

import nbflow
import nbflow_kernels as nk
from nbflow import cli
from nbflow.checkpoint import WeightFile, open_weights
from nbflow.distributed import make_plan
from nbflow.executor import WeightLoader
from nbflow.executor.reference import ReferenceExecutor
from nbflow.program import build, fuse
from nbflow.program import partition as cut
from nbflow.quantization.prepare import parse_quantizer, prepare
from nbflow.quantization.quantizer_options import QuantizerOptions
from nbflow.quantization.transforms import TransformedFile, rotate, scale_columns
from nbflow.quantization.transforms.transform import ChannelScale, HadamardRotation
from nbflow.spec import check, resolve
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers.hadamard import Rotation

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
IDS = np.array([1, 5, 9, 2, 7, 3])
AWQ_ONLY = [
    "gpt2",
    "gpt_neox",
    "opt",
    "cohere",
    "gemma2",
    "nemotron",
    "olmo2",
    "baichuan2_7b",
    "stablelm",
]
BOTH = [
    "mistral",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v32",
    "granite",
    "qwen3",
    "chatglm2",
    "glm",
]


def reference_logits(spec: ModelSpec, file: WeightFile) -> np.ndarray:
    program = build(spec)
    return ReferenceExecutor(program, WeightLoader(program, file, None)).logits(IDS)


def in_float32(family: str, folder: Path) -> Path:
    """Return a copy of a tiny checkpoint in float32, without float16 rounding."""
    source = FAMILIES / family
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors = {n: t.astype(np.float32) if t.dtype == np.float16 else t for n, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def some_statistics(spec: ModelSpec) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: np.exp(2 * rng.normal(size=shape[1]))
        for name, shape in spec.tensor_shapes().items()
        if len(shape) == 2 and name.startswith("layers.")
    }


@pytest.mark.parametrize("family", AWQ_ONLY + BOTH)
def test_folded_models_compute_the_same(family: str, tmp_path: Path) -> None:
    model = in_float32(family, tmp_path / family)
    spec = resolve(model).spec
    with open_weights(model) as file:
        wanted = reference_logits(spec, file)
        if family in BOTH:
            turned = rotate(spec, file, seed=3)
            file, spec = TransformedFile(file, spec, turned), turned.spec
            check(spec, file)
            assert not spec.tied_head
        else:
            with pytest.raises(UsageError, match="cannot be rotated exactly"):
                rotate(spec, file)
        scaled = scale_columns(spec, file, lambda name: "q4", some_statistics(spec))
        assert scaled.columns
        found = reference_logits(scaled.spec, TransformedFile(file, spec, scaled))
    # each layer multiplies weights that were rounded to float32 once more, 2**-24 of each: sums of
    # some 100 products and a few layers stay far below 1e-5 of the largest logit
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_maps_by_hand() -> None:
    w, x = np.arange(6.0).reshape(2, 3), np.array([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
    factors = ChannelScale(np.array([2.0, 0.5, 0.0]))
    assert np.array_equal(factors.apply(w), [[0, 0.5, 0], [6, 2, 0]])
    divided = x / [2.0, 0.5, np.inf]
    assert np.allclose(factors.moments(x.T @ x), divided.T @ divided)
    assert np.allclose(factors.moments(np.square(x).sum(0)), np.square(divided).sum(0))
    turn = HadamardRotation(Rotation(4, 1))
    assert np.array_equal(turn.moments(np.array([1.0, 2, 3, 6, 0, 0, 0, 4])), [3] * 4 + [1] * 4)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small float16 Llama with a tied head, and importance for it."""
    folder = tmp_path_factory.mktemp("tied") / "model"
    write_llama(folder, dtype=np.float16, n_layers=2, tied_head=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return folder


def moments_of(model: Path) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(1), {}
    for name, shape in resolve(model).spec.tensor_shapes().items():
        if len(shape) == 2 and name.startswith("layers."):
            x = rng.normal(size=(64, shape[1])) * np.exp(rng.normal(size=shape[1]))
            found[name] = (x.T @ x / 64).astype(np.float32)
    return found


def rank_bytes(model: Path, partition: str, quantizer: str, moments: Any) -> list[bytes]:
    """Return the bytes of every operand of the ranks of a partition."""
    spec, found = resolve(model).spec, []
    with open_weights(model) as stored:
        ready = prepare(spec, stored, lambda name: "q4_b32t1a", quantizer, moments)
        file = ready.apply_to(stored)
        for rank in make_plan(ready.spec, partition, 32).ranks:
            program = fuse(cut(build(ready.spec), rank))
            ours = WeightLoader(program, file, "q4", encoding=ready.quantizer)
            tensors = [t for operands in ours.operands for t in operands]
            found += [(t.data if isinstance(t, nk.QuantTensor) else t).tobytes() for t in tensors]
    return found


@pytest.mark.parametrize("quantizer", ["gptq", "hadamard+awq+gptq"])
def test_what_is_written_is_what_loading_gives(tied: Path, tmp_path: Path, quantizer: str) -> None:
    moments = moments_of(tied)
    out = tmp_path / "out"
    done = nbflow.quantize_checkpoint(tied, out, "q4", quantizer=quantizer, importance=moments)
    with open_weights(done.path) as file:
        written = resolve(done.path).spec
        check(written, file)
        program = fuse(build(written))
        ours = WeightLoader(program, file, None)
        tensors = [t for operands in ours.operands for t in operands]
        found = [(t.data if isinstance(t, nk.QuantTensor) else t).tobytes() for t in tensors]
    assert found == rank_bytes(tied, "0", quantizer, moments)
    rotated = "hadamard" in quantizer
    assert written.tied_head != rotated
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] != rotated
    assert any("no longer tied to the embedding" in note for note in done.notes) == rotated


def test_ranks_hold_pieces_of_what_one_rank_holds(tied: Path) -> None:
    moments = moments_of(tied)
    for quantizer in ("gptq", "hqq"):
        one, two = (b"".join(sorted(rank_bytes(tied, p, quantizer, moments))) for p in ("0", "0;1"))
        assert sorted(one) == sorted(two)
    spec = resolve(tied).spec
    encoding = QuantizerOptions("gptq", moments)
    down = "layers.1.ffn.down.weight"
    with open_weights(tied) as file:
        whole = encoding.quantize_matrix(down, file.array(spec.checkpoint_name(down)), "q4")
        ranks = make_plan(spec, "0&1", 32).ranks
        programs = [fuse(cut(build(spec), rank)) for rank in ranks]
        held = [WeightLoader(p, file, "q4", encoding=encoding) for p in programs]
    parts = [
        operand[0]
        for weights, program in zip(held, programs, strict=True)
        for op, operand in zip(program.ops, weights.operands, strict=True)
        if op.weights and op.weights[0].name == down
    ]
    half = whole.shape[1] // 2
    assert [p.shape[1] for p in parts] == [half, half]
    for part, first in zip(parts, (0, half), strict=True):
        assert np.array_equal(part.data, whole.columns(first, first + half).data)


def test_the_bundled_model_loses_less_with_inputs_known() -> None:
    ids = np.arange(5, 69)
    with nbflow.load("tiny_python", kv="f32") as model:
        from nbflow.calibration import collect_stats

        found = collect_stats(model, [np.arange(100, 228)], full=True)
        wanted = model.logits(ids)
    moments = {name: i.sums / i.n_rows for i in found for name in i.names}

    def kld(**options: Any) -> float:
        with nbflow.load("tiny_python", kv="f32", weights="q3h", **options) as model:
            return float(nk.kl_divergence(wanted, model.logits(ids)).mean())

    plain, best, rotated = kld(quantizer="reference"), kld(), kld(quantizer="hadamard")
    gptq = kld(quantizer="gptq", importance=moments)
    outliers = kld(quantizer="outliers", outliers=0.01)
    assert gptq < best < plain
    assert outliers < best
    assert rotated < plain


def test_wrong_use(tied: Path, tmp_path: Path, capsys: Any) -> None:
    for name, message in (
        ("gptk", "unknown quantizer 'gptk'; did you mean 'gptq'"),
        ("gptq+awq", "each once, and then one of"),
        ("awq+awq", "each once"),
        ("search+gptq", "each once"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_quantizer(name)
    squares = {"layers.0.attn.q.weight": np.ones(64)}
    for options, message in (
        ({"quantizer": "awq"}, "needs statistics of the inputs"),
        ({"quantizer": "gptq"}, "needs second moments"),
        ({"quantizer": "gptq", "importance": squares}, "needs second moments"),
        ({"quantizer": "outliers"}, "needs outliers"),
        ({"quantizer": "hqq", "outliers": 0.01}, "outliers go with"),
        ({"act_order": True}, "are for quantizer 'gptq'"),
        ({"importance": {"layers.0.attn.q.weight": np.ones(3)}}, r"must have shape \(64,\)"),
        ({"importance": {"x": np.ones(3)}}, "for none of the matrices"),
    ):
        with pytest.raises(UsageError, match=message):
            nbflow.load(tied, weights="q4", **options)
    with pytest.raises(UsageError, match="need a weight format"):
        nbflow.load(tied, quantizer="gptq")
    blocks = nbflow.quantize_checkpoint(tied, tmp_path / "b", "q8", rules=["*embed*=q8"]).path
    with pytest.raises(UsageError, match=r"is stored as q8_b32t2, and this quantizer changes it"):
        nbflow.load(blocks, weights="q4", quantizer="hadamard")
    for words, message in (
        (["--to", "q4", "--quantizer", "outliers"], "which no file format supports"),
        (["--to", "q4", "--quantizer", "gptq", "--damping", "0.1"], "needs second moments"),
        (["--to", "q4", "--damping", "0.1"], "are for quantizer 'gptq'"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["quantize", str(tied), "-o", str(tmp_path / "x"), *words])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
