"""Whole models on CUDA kernels: every family, weight and cache formats, batches, ranks, errors.

In the emulator with all its checks on; the same models on a device with ``-m gpu``.
"""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_checkpoints import write_packed

import nbflow
from nbflow.distributed.device import Device, find_device
from nbflow.planner.memory_plan import plan_memory
from nbflow_kernels.errors import UsageError

FOLDER = Path(__file__).parents[1] / "golden" / "families"
ENCODERS = ("bert", "distilbert", "roberta")
PAIRS = (
    "bart", "blenderbot", "flan_t5", "m2m_100", "marian", "mbart", "pegasus", "plbart", "t5",
)  # fmt: skip
NAMES = sorted(path.name for path in FOLDER.iterdir())
STORED_OTHERWISE = ("gpt_oss_floats", "llama_fp8", "qwen3_fp8")  # other files of such models
SAME_OPS = {
    "afmoe", "arcee", "baichuan2_13b", "bailing_moe_v2", "bamba", "chatglm2", "cohere", "cohere2",
    "cwm", "deepseek_moe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone4_full", "exaone_moe", "falcon_7b", "falcon_rw",
    "flex_olmo", "gemma3", "gemma3_images", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "gpt_bigcode_heads", "gpt_neo", "gpt_neox", "gpt_neox_sequential", "granite", "granite4",
    "granite4_dense", "granitemoe", "granitemoeshared", "helium", "hunyuan", "hunyuan_moe",
    "hy_v3", "hyperclovax", "internlm", "internlm3", "iquestcoder", "jais2", "llama31",
    "llama4_text", "mellum", "minicpm", "minicpm3", "minimax_m2", "ministral", "mistral",
    "mixtral", "nemotron_3_nano", "nemotron_h", "olmo3", "olmo_hybrid", "olmoe", "opt", "orion",
    "phi", "phi3", "phi4_mini", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_moe_mixed",
    "qwen2_window", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe",
    "seed_oss", "smollm3", "solar_open", "stablelm", "stablelm2_12b", "starcoder2", "vaultgemma",
    "youtu",
}  # fmt: skip
"""Models of which the others have every op with its options, every three neighbouring ops,
every part of the specification and every shape of heads: in the emulator too slow for what they
would show.  They run on a device."""
DECODERS = sorted(set(NAMES) - {*ENCODERS, *PAIRS, *STORED_OTHERWISE})
IN_EMULATOR = sorted(set(DECODERS) - {"gpt_oss"} - SAME_OPS)  # its steps are in test_decode_step
N_TOKENS = 9  # in steps of at most 5
TOLERANCE = 4e-6
"""Relative to the largest logit: float32 sums in another order than the published computation, for
which the CPU's kernels are allowed 2e-6."""


def golden(name: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(FOLDER / name / "golden.npz") as file:
        logits = file["short_logits" if "short_logits" in file else "logits"]
        return file["ids"][:N_TOKENS], logits[:N_TOKENS]


def error(a: Any, b: Any) -> float:
    return float(np.abs(np.subtract(a, b)).max() / np.abs(b).max())


def on(device: str, name: str, **options: Any) -> nbflow.LLM:
    return nbflow.load(FOLDER / name, device=device, max_step_tokens=5, **options)


def check_family(device: str, name: str) -> None:
    ids, logits = golden(name)
    with on(device, name, kv="f32") as model:
        assert error(model.logits(ids), logits) < TOLERANCE


@pytest.mark.compiler
@pytest.mark.parametrize("name", IN_EMULATOR)
def test_family(name: str, cupy: Any) -> None:
    check_family("emulator", name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODERS)
def test_family_on_a_device(name: str) -> None:
    check_family("cuda", name)


@pytest.mark.compiler
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name: str, cupy: Any) -> None:
    """With float32 caches: rounded to float16, a key may fall to the other side."""
    ids = np.arange(3, 11)
    with nbflow.load(FOLDER / name, kv="f32") as model:
        expected = model.hidden(ids)
    with on("emulator", name, kv="f32") as model:
        assert error(model.hidden(ids), expected) < TOLERANCE


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_encoder_with_decoder(name: str, cupy: Any) -> None:
    source, target = [5, 9, 7, 3], [2, 8, 4]
    with nbflow.load(FOLDER / name, kv="f32") as model:
        expected = model.logits(target, encoder_ids=source)
    with on("emulator", name, kv="f32") as model:
        assert error(model.logits(target, encoder_ids=source), expected) < TOLERANCE


FORMATS = [("q4_0", "f16", "f32"), ("q3h", "f16/q8_0", "f32"), ("q8_0", "q8_0/q4_0", "int8")]


@pytest.mark.compiler
@pytest.mark.parametrize(("weights", "kv", "activations"), FORMATS)
def test_formats(weights: str, kv: str, activations: str, cupy: Any) -> None:
    """Against the CPU with the same formats.

    Tensor cores take float16 operands, rounded to 2**-11 = 5e-4; activations in int8 are the same
    on both sides.  What is rounded when it is written to the cache may fall to the other side.
    """
    options = {"weights": weights, "kv": kv, "activations": activations}
    ids, _ = golden("qwen3")
    with nbflow.load(FOLDER / "qwen3", **options) as model:
        expected = model.logits(ids)
    with on("emulator", "qwen3", **options) as model:
        assert error(model.logits(ids), expected) < 5e-3


@pytest.mark.compiler
def test_the_bundled_model(cupy: Any) -> None:
    options = {"weights": "q4_k", "kv": "f16"}
    with nbflow.load("tiny_python", **options) as model:
        ids = model.tokenizer.encode("def main(")[:2]
        expected = model.logits(ids)
    with nbflow.load("tiny_python", device="emulator", **options) as model:
        assert error(model.logits(ids), expected) < 5e-3  # as above


@pytest.mark.compiler
@pytest.mark.parametrize(("method", "group"), [("gptq_act_order", 8), ("modelopt_awq", 16)])
def test_columns_with_an_order_or_factors(
    method: str, group: int, cupy: Any, tmp_path: Path
) -> None:
    """Matrices and experts; groups of 8 columns in any order are filled up to blocks of 16."""
    source, ids = FOLDER / "mixtral", [5, 6, 7]
    packed, plain = write_packed(tmp_path, method, source, group=group)
    with nbflow.load(plain, kv="f32") as model:
        expected = model.logits(ids)
    with nbflow.load(packed, device="emulator", max_step_tokens=3, kv="f32") as model:
        assert error(model.logits(ids), expected) < TOLERANCE
        held = model.workers[0].executor.weights.operands
        assert sum(getattr(w, "column_order", None) is not None for ws in held for w in ws) > 20


@pytest.mark.compiler
@pytest.mark.parametrize(("name", "tied"), [("qwen3", False), ("cohere", True)])
def test_a_quantized_embedding_without_numba_cuda(
    name: str, tied: bool, cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA C++ computes all of a model.  A tied table is stored once, in the layout of products."""
    file, ids = tmp_path / f"{name}.gguf", [5]
    rules = ["token_embd.weight=q4_0", "*=f16"]
    nbflow.quantize_checkpoint(FOLDER / name, file, "q4_0", rules=rules)
    with nbflow.load(file, kv="f16") as model:
        expected = model.logits(ids)
    find_spec, asked = importlib.util.find_spec, []

    def without(name: str, *package: Any) -> Any:
        asked.append(name)
        return None if name == "numba_cuda" else find_spec(name, *package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with nbflow.load(file, device="emulator", max_step_tokens=5, kv="f16") as model:
        assert error(model.logits(ids), expected) < 5e-3  # as above
        (table,) = model.workers[0].executor.weights.operands[0]
        assert (table.format.name, table.on_device) == ("q4_0", True)
        assert (table.has_storage, table.units_nbytes > 0) == (not tied, tied)
        (rank,) = plan_memory(file, device="emulator", max_step_tokens=5, kv="f16").ranks
        assert model.memory()[0]["weight_bytes"] == pytest.approx(rank.weight_bytes, rel=0.02)
    assert "numba_cuda" not in asked  # importing nbflow_kernels.cuda does not ask


@pytest.mark.compiler
def test_long_and_short_sequences_in_one_step(cupy: Any) -> None:
    """LongRoPE with an original context of 16: one sequence outgrows it; prompts and single tokens.

    The rotations are fused into the products of the latter.
    """
    with np.load(FOLDER / "phi3_long" / "golden.npz") as file:
        ids = file["ids"].tolist()
    found = []
    for device in ("cpu", "emulator"):
        options = {"kv": "f32", "device": device, "max_step_tokens": 17}
        with nbflow.load(FOLDER / "phi3_long", **options) as model, model.session() as session:
            a, b, c = (session.begin() for _ in range(3))
            found.append([])
            for a_stop, b_stop, c_stop in ((4, 15, 17), (5, 16, 18), (6, 17, 19), (7, 18, 20)):
                stops = {a: a_stop, b: b_stop, c: c_stop}
                rows = session.run({s: ids[session.length(s) : n] for s, n in stops.items()})
                found[-1] += [row.logits[-1] for row in rows.values()]
    assert error(found[1], found[0]) < TOLERANCE


@pytest.mark.compiler
def test_batches_and_continuations(cupy: Any) -> None:
    """Greedy tokens equal the CPU's, alone and in a batch."""
    prompts = [[3, 9, 4], [7, 1, 8, 2, 6], [5]]
    with nbflow.load(FOLDER / "llama31", kv="f32") as model:
        expected = [r.ids for r in model.generate_batch(prompts, 4, ignore_eos=True)]
    with on("emulator", "llama31", kv="f32") as model:
        together = [r.ids for r in model.generate_batch(prompts, 4, ignore_eos=True)]
        alone = model.generate(prompts[1], 4, ignore_eos=True).ids
    assert together == expected
    assert alone == expected[1]


@pytest.mark.compiler
def test_rotated_cache(cupy: Any) -> None:
    ids, _ = golden("llama31")
    options = {"kv": "q8_0", "kv_rotation": "hadamard"}
    with nbflow.load(FOLDER / "llama31", **options) as model:
        expected = model.logits(ids)
    with on("emulator", "llama31", **options) as model:
        # a sum that rounds differently may move a code of 8 bits by one: 1/254 of its block's range
        assert error(model.logits(ids), expected) < 5e-3


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["qwen2", "glm4"])
def test_keys_before_rope(name: str, cupy: Any) -> None:
    """A bias of keys in each layer; pairs of neighbours."""
    ids, logits = golden(name)
    with on("emulator", name, kv="f32", kv_keys="pre_rope") as model:
        assert error(model.logits(ids), logits) < TOLERANCE


@pytest.mark.compiler
@pytest.mark.parametrize("partition", ["0;1", "0&1"])
def test_ranks(partition: str, cupy: Any) -> None:
    ids, logits = golden("llama31")
    with on("emulator", "llama31", kv="f32", partition=partition) as model:
        assert error(model.logits(ids), logits) < TOLERANCE


@pytest.mark.compiler
@pytest.mark.parametrize("partition", ["0;1", "0&1"])
def test_ranks_on_different_devices(partition: str, cupy: Any) -> None:
    ids, logits = golden("llama31")
    with on("cpu,emulator", "llama31", kv="f32", partition=partition) as model:
        assert [engine.executor.device.name for engine in model.workers] == ["cpu", "emulator"]
        assert error(model.logits(ids), logits) < TOLERANCE
    with pytest.raises(UsageError, match="names 3 devices for 2 ranks"):
        on("cpu,cpu,cpu", "llama31", partition=partition)


def test_every_thread_that_runs_steps_chooses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's current device is each thread's own, the first one if it has chosen none."""
    chosen: list[str] = []
    with nbflow.load(FOLDER / "llama31") as model:
        note = lambda place: chosen.append(threading.current_thread().name)  # noqa: E731
        monkeypatch.setattr(Device, "activate", note)
        for run in (
            lambda: model.generate([3], 2, ignore_eos=True),
            lambda: model.logits([3, 4]),
            lambda: model.workers[0].configure(max_pages=3),
        ):
            thread = threading.Thread(target=run, name="another")
            thread.start()
            thread.join()
            assert set(chosen) == {"another"}
            chosen.clear()


def test_a_full_device_says_what_did_not_fit(cupy: Any) -> None:
    cupy.reset(memory_bytes=1 << 16)
    place = Device("emulator", cupy).for_purpose("the key/value cache")
    with pytest.raises(
        UsageError,
        match=r"the key/value cache asked for 131,072 bytes; it holds 0 of 65,536 bytes",
    ):
        place.zeros((128, 256), np.float32)


def test_a_device_that_is_misspelt() -> None:
    with pytest.raises(UsageError, match="did you mean 'cuda'"):
        find_device("cudda")
