"""Checkpoints of other quantizers, from GPTQ to Quark."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import packed_checkpoints
import pytest
from packed_checkpoints import GOLDEN, stated
from safetensors.numpy import load_file, save_file

import nbflow
import nbflow_kernels as nk
from nbflow import cli
from nbflow.checkpoint import WeightFile, open_weights
from nbflow.checkpoint.grouped_tensors import unpack_words
from nbflow.planner import planned_model
from nbflow.planner.memory_plan import plan_memory
from nbflow_kernels.errors import UsageError

FAMILIES = GOLDEN.parent / "families"
FORMATS = {
    "awq_4_64": "uint4_g64",
    "bnb_fp4": "fp4_b64",
    "bnb_fp4_double_as_bf16": "fp4_b64",
    "bnb_int8": "int8_g128_f32",
    "bnb_nf4": "nf4_b64",
    "bnb_nf4_double": "nf4_b64",
    "ct_mixed": "int3_g32",
    "ct_mxfp4": "mxfp4",
    "ct_nvfp4": "e2m1_g16_f32",
    "gptq_2_32_sym": "int2_g32",
    "gptq_3_64": "uint3_g64",
    "gptq_4_128_sym": "int4_g128",
    "gptq_4_32": "uint4_g32",
    "gptq_4_32_act": "uint4_g32",
    "gptq_8_128": "uint8_g128",
    "hqq_1_32_axis1_float16": "uint1_g32_base",
    "hqq_2_16_axis1_float16": "uint2_g16_base",
    "hqq_3_32_axis1_bfloat16": "uint3_g32_f32_base",
    "hqq_3_64_axis0_float16": "f32",
    "hqq_4_64_axis0_float16": "f32",
    "hqq_4_64_axis1_float16": "uint4_g64_base",
    "hqq_4_64_axis1_float32": "f32",
    "hqq_6_64_axis1_float16": "uint6_g64_base",
    "hqq_8_row_axis1_bfloat16": "uint8_g128_f32_base",
    "int_8_128": "int8_g128",
    "modelopt_nvfp4": "e2m1_g16_f32",
    "pack_3_32": "int3_g32",
    "pack_4_32": "int4_g32_f32",
    "pack_4_64_zero": "uint4_g64",
    "pack_8_128": "int8_g128_f32",
    "quark_int4": "int4_g32",
    "quark_uint4": "uint4_g32",
    "torchao_float8": "f32",
    "torchao_int4": "uint4_g64_f32_base",
    "torchao_int8": "int8_g128_f32",
    "torchao_intx": "int8_g32_f32",
    "torchao_nvfp4": "e2m1_g16_f32",
    "torchao_nvfp4_plain": "e2m1_g16_f32",
    "torchao_nvfp4_tiles": "e2m1_g16_f32",
}
"""Golden file -> the format its matrix is read as."""
X = "layers.0.X.weight"
NF4 = "weight.quant_state.bitsandbytes__nf4"


def opened(
    folder: Path, tensors: dict[str, np.ndarray] | Path, config: dict[str, Any]
) -> WeightFile:
    """Write a checkpoint and open it."""
    path = folder / "model.safetensors"
    if isinstance(tensors, Path):
        shutil.copy(tensors, path)
    else:
        save_file(tensors, path)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return open_weights(path)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_method_s_library(name: str, tmp_path: Path):
    """The libraries compute products in float32 here, as they were made to for the golden files."""
    with opened(tmp_path, GOLDEN / f"{name}.safetensors", stated(name)) as weights:
        expected, found = weights.array("expected"), weights.array(X)
        assert weights.dtype(X) == FORMATS[name]
        assert sorted(weights.names()) == ["expected", X]
        if name == "bnb_int8":  # scale / 127 is rounded before the product, not after it
            np.testing.assert_array_almost_equal_nulp(found, expected, nulp=1)
        else:
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(weights.array(X, (5, 41), (32, 96)), found[5:41, 32:96])
        np.testing.assert_array_equal(weights.array(X, (7, 8)), found[7:8])
        assert weights.n_bytes(X) < expected.nbytes / 3
        if FORMATS[name] == "f32":
            return
        whole = weights.quantized(X)
        np.testing.assert_array_equal(nk.dequantize(whole), found)
        block = whole.format.block_size
        some = weights.quantized(X, (16, 48), (block, 128) if block < 128 else None)
        start = block if block < 128 else 0
        np.testing.assert_array_equal(nk.dequantize(some), found[16:48, start:])
        if whole.column_order is not None:  # any columns
            some = weights.quantized(X, (16, 48), (17, 100))
            np.testing.assert_array_equal(nk.dequantize(some), found[16:48, 17:100])


def test_mxfp4_of_quark(tmp_path: Path):
    """It is that of compressed-tensors under other names."""
    tensors = load_file(GOLDEN / "ct_mxfp4.safetensors")
    names = {"layers.0.X.weight_packed": X}
    tensors = {names.get(name, name): array for name, array in tensors.items()}
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    with opened(tmp_path, tensors, config) as weights:
        assert weights.dtype(X) == "mxfp4"
        np.testing.assert_array_equal(weights.array(X), tensors["expected"])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hqq_4_64_axis1_float16", {"zero": None}, "needs layers.0.X.zero, which is missing"),
        ("hqq_4_64_axis1_float16", {"nbits": 5}, "nbits must lie in 1..4 with 4bit_u8, got 5"),
        ("hqq_4_64_axis1_float16", {"group_size": 7}, "group_size must divide 8192 weights, got 7"),
        ("hqq_4_64_axis1_float16", {"axis": 2}, "shape, axis and packing must be"),
        ("hqq_4_64_axis1_float16", {"shape": [1 << 40, 1 << 40]}, "must be u8"),
        ("hqq_4_64_axis1_float16", {"quant_zero": 1}, "quant_zero is not supported"),
        ("hqq_6_64_axis1_float16", {"nbits": 3}, "codes must be below 8, as its nbits says"),
        ("hqq_4_64_axis1_float16", {"group_size": np.float32("nan")}, "must be finite numbers"),
        ("bnb_nf4", {NF4: {"blocksize": 1 << 30}}, "blocksize must be at most 65536"),
        ("bnb_nf4", {NF4: {"nested_offset": 10**400}}, "must be a finite number"),
        ("torchao_int8", {"_weight_qdata": np.zeros((64, 0))}, "0 columns must be equal groups"),
        ("torchao_int8", {"_weight_scale": None}, "codes with scales, layers.0.X._weight_scale"),
        (
            "torchao_int8",
            {"_weight_act_pre_scale": 1},
            "act_pre_scale.* must be 128 floats, one for each column",
        ),
        ("torchao_int8", {"_weight_scale": [[1.0]]}, r"must be f32 or bf16 or f16 \(64, 1\)"),
    ],
)
def test_tensors_that_describe_themselves_are_checked(name, changes, message, tmp_path: Path):
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    for part, value in changes.items():
        key = f"layers.0.X.{part}"
        if value is None:
            del tensors[key]
        elif part == NF4:
            text = json.dumps({"shape": [64, 128], "blocksize": 64} | value)
            tensors[key] = np.frombuffer(text.encode(), np.uint8)
        else:
            dtype = tensors.get(key, np.zeros(1, np.uint8)).dtype
            tensors[key] = np.array(value, np.float32 if part == "group_size" else dtype)
    with pytest.raises(UsageError, match=message), opened(tmp_path, tensors, stated(name)) as found:
        found.array(X)


@pytest.mark.parametrize(
    ("part", "old", "new", "message"),
    [
        ("scale", "[64,8]", "[8,64]", r"\(64, 8\), one scale for 16 weights, or \(32, 32\)"),
        ("per_tensor_scale", "F32", "I32", "must be one float32, got i32"),
    ],
)
def test_nvfp4_of_torchao_is_checked(part, old, new, message, tmp_path: Path):
    data = (GOLDEN / "torchao_nvfp4.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = data[8:end].decode()
    at = header.index(f"layers.0.X._weight_{part}")
    header = header[:at] + header[at:].replace(old, new, 1)
    path = tmp_path / "changed.safetensors"
    path.write_bytes(data[:8] + header.encode() + data[end:])
    with pytest.raises(UsageError, match=message):
        opened(tmp_path, path, stated("torchao_nvfp4"))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_words_hold_a_stream_of_bits(bits: int):
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64))
    np.testing.assert_array_equal(
        unpack_words(packed_checkpoints.pack_words(numbers, bits), bits), numbers
    )


def pack_planes(numbers: np.ndarray, widths: tuple[int, ...]) -> np.ndarray:
    """Pack rows of numbers, 32 by 32, into the words of their planes, low ones first."""
    groups, words, low = numbers.reshape(len(numbers), -1, 32), [], 0
    for width in widths:
        plane = (groups >> low) & ((1 << width) - 1)
        words.append(packed_checkpoints.pack_words(plane.reshape(-1, 32), width))
        low += width
    return np.concatenate(words, axis=1).reshape(len(numbers), -1)


@pytest.mark.parametrize("widths", [(2, 1), (4, 1), (4, 2, 1)])
def test_planes_of_gptqmodel(widths: tuple[int, ...], tmp_path: Path):
    """`gptq_p`: 3, 5 to 7 bits in planes, zero points as they are."""
    bits, rng = sum(widths), np.random.default_rng(5)
    codes, zeros = rng.integers(0, 1 << bits, (64, 96)), rng.integers(0, 1 << bits, (64, 3))
    scales = rng.uniform(0.1, 0.2, (64, 3)).astype(np.float16)
    tensors = {
        "layers.0.X.qweight": np.ascontiguousarray(pack_planes(codes, widths).T),
        "layers.0.X.qzeros": pack_planes(np.ascontiguousarray(zeros.T), widths),
        "layers.0.X.scales": np.ascontiguousarray(scales.T),
        "layers.0.X.g_idx": np.arange(96, dtype=np.int32) // 32,
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "format": "gptq_p"}
    steps = (codes - zeros.repeat(32, axis=1)).astype(np.float32)
    expected = steps * scales.astype(np.float32).repeat(32, axis=1)
    with opened(tmp_path, tensors, config) as weights:
        assert weights.dtype(X) == f"uint{bits}_g32"
        np.testing.assert_array_equal(weights.array(X), expected)
        np.testing.assert_array_equal(weights.array(X, (33, 40), (32, 96)), expected[33:40, 32:])
    tensors["layers.0.X.qweight"] = tensors["layers.0.X.qweight"][:, :8].copy()
    with pytest.raises(UsageError, match="whole planes"):
        opened(tmp_path, tensors, config)


@pytest.mark.parametrize("method", ["gptq", "gptq_act_order", "awq", "hqq", "modelopt_awq", "nf4"])
def test_a_model_computes_with_the_stored_codes(method: str, tmp_path: Path):
    packed, plain = packed_checkpoints.write_packed(tmp_path, method)
    ids = list(range(5, 45))
    with nbflow.load(plain, kv="f32") as model:
        wanted = model.logits(ids)
    largest = np.abs(wanted).max()
    for partition in ("0", "0&1", "0;1"):
        with nbflow.load(packed, partition=partition, kv="f32") as model:
            found = model.logits(ids)
        # sums of 256 and 768 products in another order, through 4 layers; measured 1e-6
        assert np.abs(found - wanted).max() < 1e-5 * largest, partition
    if method == "nf4":  # its products stay those of floats
        with nbflow.load(packed, kv="f32", activations="int8") as model:
            assert np.abs(model.logits(ids) - wanted).max() < 1e-5 * largest


@pytest.mark.parametrize(("activations", "most"), [("bf16", 6e-3), ("int8", 2e-2)])
def test_act_order_in_other_arithmetic(activations: str, most: float, tmp_path: Path):
    """Within twice what products in this arithmetic lose here (measured 2.6e-3 and 8e-3)."""
    packed, plain = packed_checkpoints.write_packed(tmp_path, "gptq_act_order")
    ids = list(range(5, 45))
    with nbflow.load(plain, kv="f32") as model:
        wanted = model.logits(ids)
    for partition in ("0", "0&1"):
        with nbflow.load(packed, partition=partition, kv="f32", activations=activations) as model:
            found = model.logits(ids)
        assert 0 < np.abs(found - wanted).max() < most * np.abs(wanted).max(), partition


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("is of a matrix that is missing", {"weight": None}),
        ("must be 256 floats, one for each column, got f32", {"pre_quant_scale": 255}),
        ("must be of a quantized matrix", {"weight": 256}),
        ("must be finite and not zero, got nan for column 3", {"pre_quant_scale": [math.nan]}),
        ("must be finite and not zero, got -inf for column 3", {"pre_quant_scale": [-math.inf]}),
        ("must be finite and not zero, got 0.0 for column 3", {"pre_quant_scale": [0.0]}),
    ],
)
def test_factors_of_columns_are_checked(message: str, change: dict, tmp_path: Path):
    packed, _ = packed_checkpoints.write_packed(tmp_path, "modelopt_awq")
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    for part, n in change.items():
        if n is None:
            del tensors[f"{name}.{part}"]
        elif isinstance(n, list):
            tensors[f"{name}.{part}"][3] = n[0]
        else:
            tensors[f"{name}.{part}"] = np.ones((8, n) if part == "weight" else n, np.float32)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(UsageError, match=message), open_weights(packed):
        pass


@pytest.mark.parametrize("partition", ["0", "0&1"])
def test_memory_of_act_order_is_planned(partition: str, tmp_path: Path):
    """A rank's columns have a part of each group, in blocks of its own size with padding."""
    packed, _ = packed_checkpoints.write_packed(tmp_path, "gptq_act_order")
    options: dict[str, Any] = {"activations": "int8", "partition": partition, "max_step_tokens": 64}
    with nbflow.load(packed, **options) as model:
        model.logits(range(5, 69))
        held = model.memory()
        worker = model.workers[-1]
        operands = zip(worker.program.ops, worker.executor.weights.operands, strict=True)
        (qk, v), (o,) = (w for op, w in operands if op.layer == 0 and ".attn." in str(op.weights))
        assert not np.array_equal(qk.column_order, v.column_order)
        assert o.n_stored_columns > o.shape[1] or partition == "0"
    planned = plan_memory(packed, **options).ranks
    assert [rank["weight_bytes"] for rank in held] == [rank.weight_bytes for rank in planned]
    without = plan_memory(packed, **{**options, "activations": "f32"}).ranks
    assert all(a.workspace_bytes > b.workspace_bytes for a, b in zip(planned, without, strict=True))


def test_memory_of_factors_is_planned(tmp_path: Path):
    packed, _ = packed_checkpoints.write_packed(tmp_path, "modelopt_awq")
    options: dict[str, Any] = {"partition": "0&1", "max_step_tokens": 64}
    with nbflow.load(packed, **options) as model:
        held = model.memory()
    planned = plan_memory(packed, **options).ranks
    assert [rank["weight_bytes"] for rank in held] == [rank.weight_bytes for rank in planned]


def test_experts_in_act_order(tmp_path: Path):
    """Groups of 8 columns are filled up to blocks of 16."""
    packed, plain = packed_checkpoints.write_packed(
        tmp_path, "gptq_act_order", FAMILIES / "mixtral", 8
    )
    ids = [5, 6, 7]
    with nbflow.load(plain, kv="f32") as model:
        wanted = model.logits(ids)
    with nbflow.load(packed, kv="f32") as model:
        found = model.logits(ids)
        held = model.workers[0].executor.weights.operands
    formats = {w.format.name for ws in held for w in ws if isinstance(w, nk.QuantTensor)}
    assert "uint4_g16" in formats
    # float32 sums in another order
    assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max()


def test_formats_are_kept_planned_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    packed, _ = packed_checkpoints.write_packed(tmp_path, "gptq")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["inspect", str(packed), "--json"])
    facts = json.loads(capsys.readouterr().out)
    names = {tensor["name"]: tensor for tensor in facts["tensors"]}
    q = names["model.layers.0.self_attn.q_proj.weight"]
    assert (q["dtype"], q["shape"]) == ("uint4_g64", [256, 256])
    assert not any(name.endswith((".scales", ".qzeros", ".qweight")) for name in names)
    assert "act_order" not in q
    name = "layers.0.attn.q.weight"
    assert planned_model(packed).format_of(name) == "uint4_g64"
    assert planned_model(packed / "config.json").format_of(name) == "uint4_g64"


@pytest.mark.parametrize(
    ("method", "shown", "key"),
    [
        ("gptq_act_order", "uint4_g64 act-order", "act_order"),
        ("modelopt_awq", "int4_g64_f32 scaled-columns", "column_scales"),
    ],
)
def test_inspect_names_columns(
    method: str, shown: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    packed, _ = packed_checkpoints.write_packed(tmp_path, method)
    words = ["inspect", str(packed), "--tensor", "*.0.*q_proj.weight"]
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit, match="0"):
            cli.main([*words, *more])
    text, _, facts = capsys.readouterr().out.partition("{")
    assert shown in text
    assert [bool(t[key]) for t in json.loads("{" + facts)["tensors"]] == [True]


@pytest.mark.parametrize("method", ["gptq", "gptq_act_order"])
@pytest.mark.parametrize("to", ["f16", "uint4_g64", "q4_0"])
def test_packed_checkpoints_are_converted(to: str, method: str, tmp_path: Path):
    packed, plain = packed_checkpoints.write_packed(tmp_path, method)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["quantize", str(packed), "--to", to, "-o", str(tmp_path / "new")])
    name = "model.layers.1.mlp.down_proj.weight"
    with open_weights(plain) as weights, open_weights(tmp_path / "new") as new:
        wanted, found = weights.array(name), new.array(name)
        assert new.config().get("quantization_config") is None
    off = np.abs(found - wanted).max() / np.abs(wanted).max()
    # q4_0 halves the range of the largest weight of a block into 8 steps; blocks in another order
    # are not copied: steps of at most 2 / 15 of the largest weight, and the search may clip by one
    kept = 0 if method == "gptq" else 2 / 15
    assert off <= {"f16": 2**-11, "uint4_g64": kept, "q4_0": 1 / 8}[to]


def test_a_config_of_its_own_file(tmp_path: Path):
    packed, _ = packed_checkpoints.write_packed(tmp_path, "gptq")
    config = json.loads((packed / "config.json").read_text())
    table = config.pop("quantization_config")
    del table["quant_method"]
    (packed / "config.json").write_text(json.dumps(config))
    (packed / "quantize_config.json").write_text(json.dumps(table))
    with open_weights(packed) as weights:
        assert weights.dtype("model.layers.0.mlp.up_proj.weight") == "uint4_g64"
        assert weights.config()["quantization_config"]["quant_method"] == "gptq"


def test_a_config_of_modelopt(tmp_path: Path):
    config = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(config))
    shutil.copy(GOLDEN / "modelopt_nvfp4.safetensors", tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        assert weights.dtype(X) == "e2m1_g16_f32"
        np.testing.assert_array_equal(weights.array(X), weights.array("expected"))


def test_scales_of_the_kv_cache_are_left_out(tmp_path: Path):
    """llm-compressor writes them with any weights (`kv_cache_scheme`)."""
    tensors = load_file(GOLDEN / "gptq_4_32.safetensors")
    tensors |= {f"layers.0.{name}_scale": np.ones(1, np.float32) for name in ("k", "v")}
    with opened(tmp_path, tensors, GPTQ) as weights:
        assert sorted(weights.names()) == ["expected", X]
        assert "layers.0.k_scale" in weights.scales()


GPTQ = stated("gptq_4_32")
OTHER_BITS = {"bits": 8, "group_size": -1, "sym": False}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (
            "gptq_4_32",
            GPTQ | OTHER_BITS | {"dynamic": {"-:.*Y": {}, r"+:.*\.X$": GPTQ, ".*": OTHER_BITS}},
        ),
        (
            "quark_int4",
            {
                "quant_method": "quark",
                "export": stated("quark_int4")["export"],
                "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
                "exclude": ["lm_head"],
                "layer_quant_config": {"*.X": stated("quark_int4")["global_quant_config"]},
            },
        ),
        (
            "modelopt_nvfp4",
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "layers.0.Y": {"quant_algo": "FP8"},
                    "layers.0.X": {"quant_algo": "NVFP4", "group_size": 16},
                },
            },
        ),
    ],
)
def test_settings_of_single_modules(name: str, config: dict[str, Any], tmp_path: Path):
    with opened(tmp_path, GOLDEN / f"{name}.safetensors", config) as weights:
        assert weights.dtype(X) == FORMATS[name]
        np.testing.assert_array_equal(weights.array(X), weights.array("expected"))


@pytest.mark.parametrize("groups", ["permuted", "zeros", None])
def test_groups_of_columns_count_whatever_the_configuration_says(groups, tmp_path: Path):
    """Libraries read g_idx always; some packers write zeros, or nothing, for columns in order."""
    tensors = load_file(GOLDEN / "gptq_4_32.safetensors")
    expected, g_idx = tensors["expected"], tensors.pop("layers.0.X.g_idx")
    if groups is not None:
        tensors["layers.0.X.g_idx"] = np.roll(g_idx, 8) if groups == "permuted" else 0 * g_idx
    skipped = {"-:.*lm_head": {}, "+:.*": {}}
    with opened(tmp_path, tensors, GPTQ | {"desc_act": False, "dynamic": skipped}) as weights:
        found = weights.array(X)
        assert (weights.column_groups(X) is not None) == (groups == "permuted")
    assert (found == expected).all() == (groups != "permuted")
    moved = np.roll(g_idx, 8) != g_idx if groups == "permuted" else np.zeros(128, bool)
    np.testing.assert_array_equal(found[:, ~moved], expected[:, ~moved])


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"scales": None}, {}, r"qweight' needs scales, layers\.0\.X\.scales"),
        ({"scales": np.ones((3, 64), np.float16)}, {}, r"scales must have shape \(4, 64\), got"),
        ({"qzeros": np.ones((4, 7), np.int32)}, {}, r"zero points must have shape \(4, 8\)"),
        ({"qweight": np.ones((16, 64), np.int16)}, {}, "must be a matrix of i32"),
        (
            {"qweight": np.ones((15, 64), np.int32)},
            {"bits": 3},
            r"scales must have shape \(5, 64\)",
        ),
        ({"g_idx": np.full(128, 9, np.int32)}, {"desc_act": True}, r"must lie in 0\.\.3, got 9"),
        ({"g_idx": np.ones(5, np.int32)}, {"desc_act": True}, r"g_idx' must be int32 \(128,\)"),
        ({}, {"sym": True}, r"zero points are 8 \(sym\), but .* has others; set sym to false"),
        ({}, {"group_size": 0}, None),
    ],
)
def test_wrong_tensors(change, config, message, tmp_path: Path):
    tensors = load_file(GOLDEN / "gptq_4_32.safetensors")
    tensors |= {f"layers.0.X.{name}": value for name, value in change.items()}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    if message is None:  # a config that is refused: tensors stay as they are stored
        with opened(tmp_path, tensors, GPTQ | config) as weights:
            assert "layers.0.X.qweight" in weights.names()
        return
    with (
        pytest.raises(UsageError, match=message),
        opened(tmp_path, tensors, GPTQ | config) as weights,
    ):
        weights.array(X)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bnb_nf4", {"weight.absmax": np.ones(5, np.float32)}, r"needs .*absmax, f32 \(128,\)"),
        ("bnb_nf4", {"weight": np.ones((7, 1), np.uint8)}, "must hold the 8192 codes"),
        (
            "bnb_nf4",
            {"weight.quant_state.bitsandbytes__nf4": np.frombuffer(b"{}", np.uint8)},
            "needs shape, two numbers, and blocksize",
        ),
        ("ct_nvfp4", {"weight_global_scale": None}, "needs the scale of the tensor"),
        ("ct_nvfp4", {"weight_scale": np.ones((64, 8), np.float32)}, "scales must be f8_e4m3"),
    ],
)
def test_wrong_tensors_of_four_bit_floats(name, change, message, tmp_path: Path):
    with opened(tmp_path, GOLDEN / f"{name}.safetensors", stated(name)) as weights:
        stored = {n: weights.entry(n) for n in (*weights.names(), *weights.scales())}
    raw = (GOLDEN / f"{name}.safetensors").read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + n]), raw[8 + n :]
    del header["__metadata__"]
    assert stored
    parts, end = {}, 0
    body = b""
    for tensor, facts in header.items():
        key = tensor.removeprefix("layers.0.X.")
        first, last = facts["data_offsets"]
        bits, dtype, shape = data[first:last], facts["dtype"], facts["shape"]
        if key in change:
            if change[key] is None:
                continue
            bits, shape = change[key].tobytes(), list(change[key].shape)
            dtype = {"float32": "F32", "uint8": "U8"}[change[key].dtype.name]
        body += bits
        parts[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(bits)]}
        end += len(bits)
    text = json.dumps(parts).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    with pytest.raises(UsageError, match=message), open_weights(tmp_path / "model.safetensors"):
        pass
