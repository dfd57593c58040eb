#!/usr/bin/env python3
"""Write a GGUF file of a Llama with random weights, for measuring speed.

    python tools/measure/random_gguf.py 1.1b q4_0 model.gguf

Every matrix, the embedding and the head too, is stored in the format (as ``llama-quantize --pure``
does), the norms in float32.  Random weights are as fast as trained ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

import nbflow_kernels as nk

SHAPES = {
    # layers, width, feed-forward width, heads, key/value heads, vocabulary, context
    "15m": (6, 288, 768, 6, 6, 32000, 1024),
    "110m": (12, 768, 2048, 12, 12, 32000, 1024),
    "1.1b": (22, 2048, 5632, 32, 4, 32000, 8192),
    "7b": (32, 4096, 11008, 32, 32, 32000, 4096),
}
"""stories15M and stories110M of llama2.c, TinyLlama 1.1B, Llama 2 7B."""


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("format", help="e.g. q4_0, q8_0, q4_k, f16")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write(arguments.shape, arguments.format, arguments.out)


def write(shape: str, format: str, out: Path) -> None:
    """Write a model of one of `SHAPES`."""
    layers, width, inner, heads, kv_heads, vocabulary, context = SHAPES[shape]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_name(f"random-{shape}")
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(width // heads)
    _add_vocabulary(writer, vocabulary)
    rng = np.random.default_rng(0)
    kv_width = width // heads * kv_heads
    _add_matrix(writer, "token_embd.weight", rng, vocabulary, width, format)
    for i in range(layers):
        for name, rows, columns in (
            ("attn_q", width, width),
            ("attn_k", kv_width, width),
            ("attn_v", kv_width, width),
            ("attn_output", width, width),
            ("ffn_gate", inner, width),
            ("ffn_up", inner, width),
            ("ffn_down", width, inner),
        ):
            _add_matrix(writer, f"blk.{i}.{name}.weight", rng, rows, columns, format)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    _add_matrix(writer, "output.weight", rng, vocabulary, width, format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a dummy vocabulary."""
    writer.add_tokenizer_model("llama")
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += [f"w{i}" for i in range(size - len(words))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (size - 259)
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_matrix(
    writer: gguf.GGUFWriter,
    name: str,
    rng: np.random.Generator,
    rows: int,
    columns: int,
    format: str,
) -> None:
    """Add a matrix of N(0, 1 / columns) numbers; its rows repeat after 512."""
    some = rng.standard_normal((min(rows, 512), columns), dtype=np.float32) / columns**0.5
    if format in ("f32", "f16"):
        array = some.astype(np.float16 if format == "f16" else np.float32)
        writer.add_tensor(name, np.resize(array, (rows, columns)))
        return
    data = nk.quantize(some, format, quantizer="reference").data
    kind = gguf.GGMLQuantizationType[format.upper()]
    writer.add_tensor(name, np.resize(data, (rows, data.shape[1])), raw_dtype=kind)


if __name__ == "__main__":
    main()
