"""Write a Llama, Qwen 3 MoE or Granite 4 of random weights to a GGUF file, for measuring speed.

    python -m nbflow.first_gpu_run.random_model 1.1b q4_0 model.gguf

Every matrix, the embedding and the head too, is stored in the format (as ``llama-quantize --pure``
does), the norms in float32.  Random weights are as fast as trained ones.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.checkpoint.readers.gguf import ARRAY, STRING
from nbflow.checkpoint.writers.gguf import F32, I32, U32, Kind, write_gguf
from nbflow.checkpoint.writers.tensor_plan import TensorPlan, float32_plan

ROWS_MADE = 256
"""Different rows of a matrix; they repeat, which changes no speed."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, with experts of a Qwen 3 MoE, with Mamba-2 layers of a Granite 4."""

    n_layers: int
    width: int
    ffn_width: int
    n_heads: int
    n_kv_heads: int
    vocabulary: int
    context: int
    n_experts: int = 0
    """Experts of a layer, each of `ffn_width`; 0 for one feed-forward network."""
    n_used: int = 0
    """Experts of a token."""
    state_dim: int = 0
    """Numbers of a Mamba-2 state per value; 0 for attention in all layers."""

    @property
    def architecture(self) -> str:
        """Name of the architecture in GGUF."""
        if self.state_dim:
            return "granitehybrid"
        return "qwen3moe" if self.n_experts else "llama"

    def is_recurrent(self, layer: int) -> bool:
        """Return True for a layer with Mamba-2: nine of ten in a hybrid."""
        return bool(self.state_dim) and layer % 10 != 5


SHAPES = {
    "tiny": Shape(1, 64, 128, 2, 1, 300, 64),
    "15m": Shape(6, 288, 768, 6, 6, 32000, 1024),
    "110m": Shape(12, 768, 2048, 12, 12, 32000, 1024),
    "1.1b": Shape(22, 2048, 5632, 32, 4, 32000, 8192),
    "7b": Shape(32, 4096, 11008, 32, 32, 32000, 4096),
    "tiny-moe": Shape(1, 64, 32, 2, 1, 300, 64, 8, 2),
    "3.4b-moe": Shape(8, 2048, 1024, 16, 4, 32000, 4096, 64, 8),
    "tiny-hybrid": Shape(6, 64, 128, 2, 1, 300, 64, state_dim=32),
    "1.4b-hybrid": Shape(40, 1536, 4096, 12, 4, 32000, 8192, state_dim=128),
}
"""A model for the emulated device, stories15M and stories110M of llama2.c, TinyLlama 1.1B, Llama 2
7B, a model for tests, half the layers of a model with 8 of 64 experts per token (0.5B active), a
hybrid for tests, Granite 4.0 H 1B with another vocabulary."""
SSM_HEAD = 64
"""Values of a head of Mamba-2, which has twice the model's width of them."""
CONV_KERNEL = 4


def write(path: Path, shape: Shape, format: str, n_layers: int | None = None) -> None:
    """Write the model, all matrices in one format."""
    kv_width = shape.width // shape.n_heads * shape.n_kv_heads
    tensors = [_matrix("token_embd", shape.vocabulary, shape.width, format)]
    layers = shape.n_layers if n_layers is None else n_layers
    for i in range(layers):
        attention = (
            ("attn_q", shape.width, shape.width),
            ("attn_k", kv_width, shape.width),
            ("attn_v", kv_width, shape.width),
            ("attn_output", shape.width, shape.width),
        )
        if shape.is_recurrent(i):
            tensors += _mamba2(shape, f"blk.{i}", format)
        else:
            tensors += (_matrix(f"blk.{i}.{n}", rows, cols, format) for n, rows, cols in attention)
        tensors += _feed_forward(shape, f"blk.{i}", format)
        norms = {"attn_norm": shape.width, "ffn_norm": shape.width}
        if shape.n_experts:
            norms |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), shape.width // shape.n_heads)
        for name, size in norms.items():
            tensors.append(float32_plan(f"blk.{i}.{name}.weight", np.ones(size)))
    tensors.append(float32_plan("output_norm.weight", np.ones(shape.width)))
    tensors.append(_matrix("output", shape.vocabulary, shape.width, format))
    with path.open("wb") as file:
        write_gguf(file, _metadata(shape, layers), tensors)


def _mamba2(shape: Shape, layer: str, format: str) -> list[TensorPlan]:
    """Return the plans of a layer's Mamba-2, which remembers 1 to 60 tokens."""
    inner, n = 2 * shape.width, shape.state_dim
    heads = inner // SSM_HEAD
    rng = np.random.default_rng(0)
    vectors = {
        "ssm_a": -np.geomspace(0.05, 1.0, heads)[:, None],
        "ssm_d": np.ones((heads, 1)),
        "ssm_dt.bias": np.zeros(heads),
        "ssm_conv1d.weight": rng.standard_normal((inner + 2 * n, CONV_KERNEL)) / 2.0,
        "ssm_conv1d.bias": np.zeros(inner + 2 * n),
        "ssm_norm.weight": np.ones((1, inner)),
    }
    return [
        _matrix(f"{layer}.ssm_in", 2 * inner + 2 * n + heads, shape.width, format),
        _matrix(f"{layer}.ssm_out", shape.width, inner, format),
        *(float32_plan(f"{layer}.{name}", values) for name, values in vectors.items()),
    ]


def _feed_forward(shape: Shape, layer: str, format: str) -> list[TensorPlan]:
    """Return the plans of a layer's feed-forward network, or of its router and experts."""
    width, ffn = shape.width, shape.ffn_width
    sizes = {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}
    n, suffix = shape.n_experts, "_exps" if shape.n_experts else ""
    plans = [
        _matrix(f"{layer}.ffn_{name}{suffix}", rows, columns, format, n)
        for name, (rows, columns) in sizes.items()
    ]
    if n:
        router = np.random.default_rng(0).standard_normal((n, width)) / width**0.5
        plans.append(float32_plan(f"{layer}.ffn_gate_inp.weight", router))
    return plans


def _matrix(name: str, rows: int, columns: int, format: str, n_experts: int = 0) -> TensorPlan:
    """Return the plan of a matrix, or of one per expert, of N(0, 1 / columns) numbers."""
    blocks, shape = _blocks(columns, format), (rows, columns)

    def chunks() -> Iterator[bytes]:
        for _ in range(n_experts or 1):
            for row in range(0, rows, ROWS_MADE):
                yield blocks[: rows - row].tobytes()

    whole = (n_experts, *shape) if n_experts else shape
    return TensorPlan(f"{name}.weight", whole, format, chunks)


@functools.cache
def _blocks(columns: int, format: str) -> np.ndarray:
    """Return the bytes of the different rows, which all matrices of a width have."""
    rng = np.random.default_rng(columns)
    some = rng.standard_normal((ROWS_MADE, columns), dtype=np.float32) / np.float32(columns**0.5)
    if format in ("f32", "f16"):
        return some.astype("<f2" if format == "f16" else "<f4")
    blocks: np.ndarray = nk.quantize(some, format, quantizer="reference").data
    return blocks


def _metadata(shape: Shape, n_layers: int) -> dict[str, tuple[Kind, Any]]:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += [f"w{i}" for i in range(shape.vocabulary - len(words))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (shape.vocabulary - 259)
    numbers = {
        "vocab_size": shape.vocabulary,
        "context_length": shape.context,
        "embedding_length": shape.width,
        "block_count": n_layers,
        "feed_forward_length": shape.ffn_width,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
        "rope.dimension_count": shape.width // shape.n_heads,
    }
    if shape.n_experts:
        numbers |= {
            "expert_count": shape.n_experts,
            "expert_used_count": shape.n_used,
            "expert_feed_forward_length": shape.ffn_width,
            "attention.key_length": shape.width // shape.n_heads,
            "attention.value_length": shape.width // shape.n_heads,
        }
    name = shape.architecture
    kv_heads = [0 if shape.is_recurrent(i) else shape.n_kv_heads for i in range(n_layers)]
    of_hybrid: dict[str, tuple[Kind, Any]] = {
        "attention.head_count_kv": ((ARRAY, I32), kv_heads),
        "attention.scale": ((F32,), (shape.width // shape.n_heads) ** -0.5),
        "embedding_scale": ((F32,), 1.0),
        "residual_scale": ((F32,), 1.0),
        "logit_scale": ((F32,), 1.0),
        "ssm.conv_kernel": ((U32,), CONV_KERNEL),
        "ssm.state_size": ((U32,), shape.state_dim),
        "ssm.group_count": ((U32,), 1),
        "ssm.inner_size": ((U32,), 2 * shape.width),
        "ssm.time_step_rank": ((U32,), 2 * shape.width // SSM_HEAD),
    }
    return {
        "general.architecture": ((STRING,), name),
        "general.name": ((STRING,), "random"),
        **{f"{name}.{key}": ((U32,), number) for key, number in numbers.items()},
        **{f"{name}.{key}": value for key, value in of_hybrid.items() if shape.state_dim},
        f"{name}.attention.layer_norm_rms_epsilon": ((F32,), 1e-5),
        f"{name}.rope.freq_base": ((F32,), 10000.0),
        "tokenizer.ggml.model": ((STRING,), "llama"),
        "tokenizer.ggml.tokens": ((ARRAY, STRING), words),
        "tokenizer.ggml.scores": ((ARRAY, F32), [0.0] * shape.vocabulary),
        "tokenizer.ggml.token_type": ((ARRAY, I32), kinds),
        "tokenizer.ggml.bos_token_id": ((U32,), 1),
        "tokenizer.ggml.eos_token_id": ((U32,), 2),
    }


def main() -> None:
    """Write a file, see above."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("format", help="e.g. q4_0, q8_0, q4_k, f16")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write(arguments.out, SHAPES[arguments.shape], arguments.format)


if __name__ == "__main__":
    main()
