"""From a checkpoint's weights to a token with `nbflow_kernels` alone, on one or two ranks.

    python notebooks/from_weights_to_token.py --weights q3h -p "def read(self"
    mpirun -n 2 python notebooks/from_weights_to_token.py --weights q3h -p "def read(self"

A Llama of some 200 lines: read a safetensors file, quantize its matrices, multiply, attend over
pages of a key/value cache, sample.  With two ranks, each holds half of the heads and half of the
feed-forward columns, and MPI sums the partial results (tensor parallelism).  It imports neither
`nbflow` nor a deep learning framework.  The notebook `01_from_weights_to_token.ipynb` explains the
steps; the tests compare the tokens with the engine's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from tokenizers import Tokenizer

import nbflow_kernels as nk

PAGE_SIZE = 64


@dataclass(frozen=True)
class Config:
    """Numbers of config.json that the model needs."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    eps: float
    rope_theta: float
    max_context: int
    end_of_text: int

    @classmethod
    def read(cls, folder: Path) -> Config:
        """Read config.json of a Llama."""
        data = json.loads((folder / "config.json").read_text())
        if data.get("model_type") != "llama" or data.get("rope_scaling"):
            raise SystemExit(f"{folder}: this script reads Llamas without RoPE scaling")
        n_heads = data["num_attention_heads"]
        return cls(
            n_layers=data["num_hidden_layers"],
            n_heads=n_heads,
            n_kv_heads=data.get("num_key_value_heads", n_heads),
            head_size=data.get("head_dim") or data["hidden_size"] // n_heads,
            eps=data["rms_norm_eps"],
            rope_theta=data.get("rope_theta", 10000.0),
            max_context=data["max_position_embeddings"],
            end_of_text=data["eos_token_id"],
        )


class Checkpoint:
    """Tensors of model.safetensors, of which a rank reads only its own rows or columns."""

    def __init__(self, folder: Path, rank: int, n_ranks: int) -> None:
        self._file = safe_open(str(folder / "model.safetensors"), "numpy")
        self._rank, self._n_ranks = rank, n_ranks

    def __contains__(self, name: str) -> bool:
        return name in self._file.keys()  # noqa: SIM118  (safe_open lacks __contains__)

    def whole(self, name: str) -> np.ndarray:
        """Return a tensor as stored."""
        return self._file.get_tensor(name)

    def rows(self, name: str) -> np.ndarray:
        """Return this rank's share of the outputs of a matrix."""
        stored = self._file.get_slice(name)
        return stored[self._share(stored.get_shape()[0])]

    def columns(self, name: str) -> np.ndarray:
        """Return this rank's share of the inputs of a matrix."""
        stored = self._file.get_slice(name)
        return stored[:, self._share(stored.get_shape()[1])]

    def _share(self, n: int) -> slice:
        if n % self._n_ranks:
            raise SystemExit(f"{n} rows or columns are not divisible by {self._n_ranks} ranks")
        size = n // self._n_ranks
        return slice(self._rank * size, (self._rank + 1) * size)


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; the matrices are quantized."""

    attention_norm: np.ndarray
    qkv: Any
    o: Any
    ffn_norm: np.ndarray
    gate_up: Any
    down: Any


class Cache:
    """Paged key/value cache of one sequence: pages are taken in a shuffled order.

    A server gives the pages of one array to many sequences; the order shows that pages need not
    be adjacent.
    """

    def __init__(self, config: Config, n_kv_heads: int, kv_format: str) -> None:
        n_pages = -(-config.max_context // PAGE_SIZE)
        rows = nk.kv_formats(kv_format)  # of keys and of values
        self.layers = [
            tuple(
                np.zeros(
                    (n_pages, PAGE_SIZE, n_kv_heads, row.row_length(config.head_size)), row.dtype
                )
                for row in rows
            )
            for _ in range(config.n_layers)
        ]
        self._order = np.random.default_rng(0).permutation(n_pages).astype(np.int32)
        self.kv_format = kv_format
        self.length = 0

    def extend(self, n_tokens: int) -> None:
        """Make room for new tokens."""
        self.length += n_tokens

    @property
    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block table as FlashInfer has it: offsets, page numbers, tokens on the last page."""
        n_pages = -(-self.length // PAGE_SIZE)
        last = self.length - (n_pages - 1) * PAGE_SIZE
        return ints(0, n_pages), self._order[:n_pages], ints(last)


class Llama:
    """A Llama, or the share of it that one of several ranks holds.

    Parameters
    ----------
    folder : Path
        Hugging Face folder with model.safetensors.
    weights : str
        Format of the matrices, any of `nbflow_kernels.FORMATS`.
    kv_format : str
        Format of the cache, e.g. ``"f16"`` or ``"q8_0"``.
    all_reduce : callable
        Sums a float32 array over the ranks, in place.
    """

    def __init__(
        self,
        folder: Path,
        weights: str = "f32",
        kv_format: str = "f16",
        rank: int = 0,
        n_ranks: int = 1,
        all_reduce: Callable[[np.ndarray], None] = lambda x: None,
    ) -> None:
        self.config = config = Config.read(folder)
        self._all_reduce = all_reduce
        self._n_heads = config.n_heads // n_ranks
        self._n_kv_heads = config.n_kv_heads // n_ranks
        file = Checkpoint(folder, rank, n_ranks)
        self._table = file.whole("model.embed_tokens.weight")
        head = "lm_head.weight"
        self._head = nk.quantize(file.whole(head) if head in file else self._table, "f32")
        self._norm = file.whole("model.norm.weight").astype(np.float32)
        self._layers = [self._layer(file, i, weights) for i in range(config.n_layers)]
        self.cache = Cache(config, self._n_kv_heads, kv_format)
        self._attention = nk.BatchPrefillWithPagedKVCacheWrapper()

    @staticmethod
    def _layer(file: Checkpoint, index: int, weights: str) -> Layer:
        prefix = f"model.layers.{index}."

        def quantized(*parts: np.ndarray) -> Any:
            return nk.quantize(np.concatenate(parts).astype(np.float32), weights)

        q, k, v = (file.rows(f"{prefix}self_attn.{x}_proj.weight") for x in "qkv")
        gate, up = (file.rows(f"{prefix}mlp.{x}_proj.weight") for x in ("gate", "up"))
        return Layer(
            attention_norm=file.whole(f"{prefix}input_layernorm.weight").astype(np.float32),
            qkv=quantized(q, k, v),  # one product for the three
            o=quantized(file.columns(f"{prefix}self_attn.o_proj.weight")),
            ffn_norm=file.whole(f"{prefix}post_attention_layernorm.weight").astype(np.float32),
            gate_up=quantized(gate, up),
            down=quantized(file.columns(f"{prefix}mlp.down_proj.weight")),
        )

    def forward(self, ids: np.ndarray) -> np.ndarray:
        """Return the logits after the last of some new tokens, shape (1, V)."""
        T = len(ids)
        positions = np.arange(self.cache.length, self.cache.length + T, dtype=np.int32)
        self.cache.extend(T)
        self._plan(T)
        h = nk.embedding(ids.astype(np.int32), self._table)
        for index, layer in enumerate(self._layers):
            h += self._attend(
                layer, index, nk.rmsnorm(h, layer.attention_norm, self.config.eps), positions
            )
            h += self._feed_forward(layer, nk.rmsnorm(h, layer.ffn_norm, self.config.eps))
        last = nk.rmsnorm(h[-1:], self._norm, self.config.eps)
        return nk.qmatmul(last, self._head)

    def _plan(self, n_new: int) -> None:
        """Divide the attention of this step among threads; one plan serves all layers."""
        offsets, pages, last = self.cache.table
        self._attention.plan(
            ints(0, n_new), offsets, pages, last, self._n_heads, self._n_kv_heads,
            self.config.head_size, PAGE_SIZE, causal=True, kv_format=self.cache.kv_format,
        )  # fmt: skip

    def _attend(self, layer: Layer, index: int, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the output of self-attention; append keys and values to the cache."""
        T, H, G, D = len(x), self._n_heads, self._n_kv_heads, self.config.head_size
        qkv = nk.qmatmul(x, layer.qkv)
        q, k, v = np.split(qkv, [H * D, (H + G) * D], axis=1)
        q, k, v = (np.ascontiguousarray(part).reshape(T, -1, D) for part in (q, k, v))
        q, k = nk.apply_rope_pos_ids(q, k, positions, rope_theta=self.config.rope_theta)
        offsets, pages, last = self.cache.table
        nk.append_paged_kv_cache(
            k, v, np.zeros(T, np.int32), positions, self.cache.layers[index], pages, offsets, last,
            kv_format=self.cache.kv_format,
        )  # fmt: skip
        out = self._attention.run(q, self.cache.layers[index])
        return self._summed(nk.qmatmul(out.reshape(T, H * D), layer.o))

    def _feed_forward(self, layer: Layer, x: np.ndarray) -> np.ndarray:
        """Return the output of the gated feed-forward network."""
        return self._summed(nk.qmatmul(nk.silu_and_mul(nk.qmatmul(x, layer.gate_up)), layer.down))

    def _summed(self, partial: np.ndarray) -> np.ndarray:
        """Sum the ranks' partial results."""
        self._all_reduce(partial)
        return partial

    def generate(self, ids: list[int], n_tokens: int, temperature: float, seed: int) -> list[int]:
        """Continue a prompt; temperature 0 takes the most likely token."""
        found: list[int] = []
        new = np.array(ids)
        while len(found) < n_tokens and self.cache.length + len(new) <= self.config.max_context:
            logits = self.forward(new)
            if temperature == 0:
                token = int(nk.argmax(logits)[0])
            else:
                token = int(nk.sampling_from_logits(
                    logits, temperature=temperature, seed=seed, offset=len(found)
                )[0])  # fmt: skip
            if token == self.config.end_of_text:
                break
            found.append(token)
            new = np.array([token])
        return found


def ints(*values: int) -> np.ndarray:
    """Return an int32 array."""
    return np.array(values, np.int32)


def ranks() -> tuple[int, int, Callable[[np.ndarray], None]]:
    """Return rank, number of ranks, and the all-reduce: MPI's if it is installed."""
    try:
        from mpi4py import MPI
    except ImportError:
        return 0, 1, lambda x: None
    world = MPI.COMM_WORLD
    return world.rank, world.size, lambda x: world.Allreduce(MPI.IN_PLACE, x)


def main() -> None:
    parser = argparse.ArgumentParser(description="a Llama built from nbflow_kernels")
    bundled = Path(nk.__file__).parents[2] / "specs/nbflow_specs/checkpoints/tiny_python"
    parser.add_argument("folder", type=Path, nargs="?", default=bundled, help="Hugging Face folder")
    parser.add_argument("--weights", default="q3h", help="weight format (%(default)s)")
    parser.add_argument("--kv", default="f16", help="cache format (%(default)s)")
    parser.add_argument("-p", "--prompt", default="def read(self")
    parser.add_argument("-n", "--tokens", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    rank, n_ranks, all_reduce = ranks()
    tokenizer = Tokenizer.from_file(str(given.folder / "tokenizer.json"))
    model = Llama(given.folder, given.weights, given.kv, rank, n_ranks, all_reduce)
    ids = tokenizer.encode(given.prompt).ids
    tokens = model.generate(ids, given.tokens, given.temperature, given.seed)
    if rank == 0:
        print(json.dumps({"tokens": tokens, "text": tokenizer.decode(ids + tokens)}))


if __name__ == "__main__":
    sys.exit(main())
