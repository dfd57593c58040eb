#!/usr/bin/env python3
"""Measure KV caches of the bundled model after large channels are planted in its keys.

    python tools/measure/planted_keys.py results/kv_cache/MACHINE/planted_keys.jsonl

``outliers_8`` and ``outliers_16``: one pair of channels of every key head is 8 or 16 times as
large, and the same channels of the queries are divided by that.  The model is the same to the last
bit, because the pair is one of RoPE and the factor a power of two.  ``bias_64``: the projection of
the keys gets a bias in this pair, 64 times the spread of its channels, as in Qwen 2's checkpoints.
The pair turns slowest, so that the bias adds nearly the same to all scores of a query.

A row has the perplexity of 4096 tokens of the model's text in windows of 256, and the mean
divergence from the same planted model with a float32 cache.  The numbers are the same on every
machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published_rows import append, conditions
from safetensors.numpy import load_file, save_file

import nbflow
from nbflow.spec import resolve

MODEL, WINDOW, N_TOKENS = "tiny_python", 256, 4096
FACTORS, BIAS = (8, 16), 64
EXACT: dict[str, str] = {"kv": "f32"}
CACHES: tuple[dict[str, str], ...] = (
    {"kv": "f16"},
    {"kv": "q4_0/f16"},
    {"kv": "q4_0/f16", "kv_rotation": "hadamard"},
    {"kv": "q4_0/f16", "kv_keys": "pre_rope"},
    {"kv": "lm4/f16", "kv_rotation": "hadamard"},
    {"kv": "lm3/f16", "kv_rotation": "hadamard"},
    {"kv": "lm3/f16", "kv_keys": "pre_rope"},
)
Tensors = dict[str, NDArray[Any]]


def plant_outliers(tensors: Tensors, head: int, factor: int) -> None:
    """Enlarge the last pair of channels of all keys, and divide that of the queries."""
    for name, matrix in tensors.items():
        for part, times in (("k_proj.weight", factor), ("q_proj.weight", 1 / factor)):
            if name.endswith(part):
                matrix.reshape(-1, head, matrix.shape[1])[:, _pair(head)] *= np.float32(times)


def plant_bias(tensors: Tensors, head: int, spread: dict[int, NDArray[Any]]) -> None:
    """Give queries, keys and values biases: zeros, but for the last pair of the keys' channels."""
    parts = tuple(f"{part}_proj.weight" for part in "qkv")
    for name in [n for n in tensors if n.endswith(parts)]:
        bias = np.zeros(len(tensors[name]), np.float32)
        if "k_proj" in name:
            layer = int(name.split(".layers.")[1].split(".")[0])
            bias.reshape(-1, head)[:, _pair(head)] = BIAS * spread[layer][:, _pair(head)]
        tensors[name.removesuffix("weight") + "bias"] = bias


def _pair(head: int) -> list[int]:
    """Return the channels of the pair of RoPE that turns slowest."""
    return [head // 2 - 1, head - 1]


def spread_of_keys(ids: NDArray[np.int64]) -> dict[int, NDArray[Any]]:
    """Return the standard deviation of each channel of the keys before RoPE, (G, D) by layer."""
    found = {}
    with nbflow.load(MODEL, kv="f32", kv_keys="pre_rope") as model:
        model.logits(ids)
        for layer, (keys, _) in model.workers[0].storage.layers.items():
            heads = keys.transpose(1, 0, 2, 3).reshape(keys.shape[1], -1, keys.shape[3])
            used = np.abs(heads).sum(axis=(0, 2)) > 0
            found[layer] = heads[:, used].std(axis=1)
    return found


def log_probabilities(path: Path, options: dict[str, str], ids: NDArray[Any]) -> NDArray[Any]:
    """Return the log-probabilities after all but the last token of each window."""
    with nbflow.load(path, **options) as model:
        logits = np.concatenate([model.logits(window)[:-1] for window in ids]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    found: NDArray[Any] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return found


def rows_of(name: str, path: Path, ids: NDArray[Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each cache of a planted model."""
    exact, targets = log_probabilities(path, EXACT, ids), ids[:, 1:].ravel()
    for options in (EXACT, *CACHES):
        found = exact if options is EXACT else log_probabilities(path, options, ids)
        nll = -found[np.arange(len(targets)), targets]
        kld = (np.exp(exact) * (exact - found)).sum(axis=1)
        yield {
            "planted": name, "kv": "", "kv_rotation": "none", "kv_keys": "post_rope", **options,
            "perplexity": float(np.exp(nll.mean())), "kld_mean_nats": float(kld.mean()),
            "kld_mean_nats_stderr": float(kld.std(ddof=1) / np.sqrt(len(kld))),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    out, facts = parser.parse_args().out, conditions()
    resolved = resolve(MODEL)
    source, head = Path(resolved.path), resolved.spec.head_dim
    with nbflow.load(MODEL) as model:
        text = (source / "eval.txt").read_text(encoding="utf-8")
        ids = np.array(model.tokenizer.encode(text))[:N_TOKENS].reshape(-1, WINDOW)
    spread, stored = spread_of_keys(ids[0]), load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    for factor in (1, *FACTORS, None):
        tensors = {name: array.astype(np.float32) for name, array in stored.items()}
        if factor is None:
            name, change = f"bias_{BIAS}", {"model_type": "qwen2"}
            plant_bias(tensors, head, spread)
        else:
            name, change = f"outliers_{factor}" if factor > 1 else "none", {}
            plant_outliers(tensors, head, factor)
        with tempfile.TemporaryDirectory() as folder:
            save_file(tensors, Path(folder) / "model.safetensors")
            (Path(folder) / "config.json").write_text(json.dumps(config | change))
            shutil.copy(source / "tokenizer.json", folder)
            rows = list(rows_of(name, Path(folder), ids))
        append(out, facts, rows)
        for row in rows:
            print(row)


if __name__ == "__main__":
    main()
