"""Checkpoints written as GPTQ, AWQ and compressed-tensors store them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.conversion.packed_layouts import pack_words
from nbflow_kernels.errors import UsageError

DOWN = "model.layers.3.mlp.down_proj"


@pytest.mark.parametrize(
    ("to", "format", "tensors"),
    [
        ("gptq", "int4_g128", {"qweight", "qzeros", "scales", "g_idx"}),
        ("gptq:uint3_g64", "uint3_g64", {"qweight", "qzeros", "scales", "g_idx"}),
        ("AWQ", "uint4_g128", {"qweight", "qzeros", "scales"}),
        ("compressed-tensors", "int4_g128", {"weight_packed", "weight_scale", "weight_shape"}),
        (
            "compressed-tensors:uint8_g32",
            "uint8_g32",
            {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"},
        ),
    ],
)
def test_the_reader_gives_the_weights_of_the_format(to, format, tensors, tmp_path: Path):
    nbflow.quantize_checkpoint("tiny_python", tmp_path / "own", format, quantizer="reference")
    done = nbflow.quantize_checkpoint("tiny_python", tmp_path / "new", to, quantizer="reference")
    assert done.n_bytes == sum(t.n_bytes for t in done.tensors)
    with open_weights(tmp_path / "own") as own, open_weights(tmp_path / "new") as new:
        assert sorted(own.names()) == sorted(new.names())
        for name in own.names():
            assert own.dtype(name) == new.dtype(name), name
            np.testing.assert_array_equal(own.array(name), new.array(name))
        assert new.dtype(f"{DOWN}.weight") == format
        parts = {n.removeprefix(f"{DOWN}.") for n in new.scales() if n.startswith(f"{DOWN}.")}
        assert parts == tensors


def test_configurations_are_those_of_the_methods(tmp_path: Path):
    stated = {}
    for to in ("gptq", "gptq:uint4_g64", "awq", "compressed-tensors"):
        out = tmp_path / to.replace(":", "_")
        nbflow.quantize_checkpoint("tiny_python", out, to, quantizer="reference")
        stated[to] = json.loads((out / "config.json").read_text())["quantization_config"]
    gptq = {"quant_method": "gptq", "bits": 4, "desc_act": False}
    assert stated["gptq"] == {**gptq, "group_size": 128, "sym": True, "checkpoint_format": "gptq"}
    more = {"group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"}
    assert stated["gptq:uint4_g64"] == gptq | more
    assert stated["awq"]["modules_to_not_convert"] == ["model.embed_tokens", "lm_head"]
    weights = stated["compressed-tensors"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["symmetric"], weights["group_size"]) == (4, True, 128)
    assert stated["compressed-tensors"]["ignore"] == ["model.embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("to", "out", "rules", "message"),
    [
        ("gptq:q4_k", "new", [], r"gptq stores grouped formats with float16 scales of 2 or 3 or"),
        ("gptq:int5_g64", "new", [], "got int5_g64"),
        ("awq:int4_g128", "new", [], "awq stores zero points; use uint4_g128"),
        ("awq:uint4_g128_f32", "new", [], "with float16 scales"),
        ("gptq", "new.gguf", [], "is a layout of folders, not of GGUF files"),
        ("gptq", "new.safetensors", [], "gptq needs a folder"),
        ("gptq", "new", ["*.q_proj.weight=f16"], "q_proj is not in int4_g128: a GPTQ checkpoint"),
        ("gptq:q9", "new", [], "unknown format 'q9'"),
    ],
)
def test_refusals(to, out, rules, message, tmp_path: Path):
    with pytest.raises(UsageError, match=message):
        nbflow.quantize_checkpoint("tiny_python", tmp_path / out, to, rules=rules)
    assert not (tmp_path / out).exists()


def test_words_are_little_endian_streams():
    numbers = np.arange(32, dtype=np.uint8)[None] % 8
    stream = sum(int(n) << 3 * i for i, n in enumerate(numbers[0]))
    words = [stream >> 32 * i & 0xFFFFFFFF for i in range(3)]
    np.testing.assert_array_equal(pack_words(numbers, 3).view("<u4")[0], words)
