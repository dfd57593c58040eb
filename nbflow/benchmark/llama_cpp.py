"""llama.cpp in this process on the same GGUF file, the peer of `nbflow bench`.

It needs the package ``llama-cpp-python`` (extra ``bench``) and times the same calls as llama-bench:
``llama_decode`` of the prompt in batches of 512, then one decode per generated token with logits,
without sampling (ours samples greedily).
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np

from nbflow.benchmark.timing import Test
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command

STEP_TOKENS = 512  # n_batch and n_ubatch, the defaults of llama-bench


class LlamaCpp:
    """A model loaded by llama.cpp.

    `context` and `sequences` are the most tokens of a sequence and concurrent sequences.  `exact`
    selects a float32 KV cache without flash attention, which rounds to float16: for comparing
    results, not speed.
    """

    def __init__(
        self, path: Path, threads: int, context: int, sequences: int, exact: bool = False
    ) -> None:
        try:
            import llama_cpp
        except ImportError as error:
            raise MissingExtraError(
                f"the peer llama.cpp needs llama-cpp-python: {install_command('bench')} "
                "(it is built from source: a C++ compiler is needed)"
            ) from error
        self._lib: Any = llama_cpp
        self.name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"
        self._silent = self._lib.llama_log_callback(lambda *_: None)  # kept: C holds the address
        self._lib.llama_log_set(self._silent, ctypes.c_void_p())
        self._lib.llama_backend_init()
        options = self._lib.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise UsageError(f"{path}: llama.cpp cannot load this file")
        settings = self._lib.llama_context_default_params()
        settings.n_ctx = context * sequences
        settings.n_batch = settings.n_ubatch = STEP_TOKENS
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        if exact:
            settings.type_k = settings.type_v = self._lib.GGML_TYPE_F32
            settings.flash_attn_type = self._lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = self._lib.llama_init_from_model(self._model, settings)
        if not self._context:
            raise UsageError(f"{path}: llama.cpp cannot make a context of {settings.n_ctx} tokens")
        self._memory = self._lib.llama_get_memory(self._context)
        vocabulary = self._lib.llama_model_get_vocab(self._model)
        self._n_words = self._lib.llama_vocab_n_tokens(vocabulary)
        self._cached = (0, 0)

    def close(self) -> None:
        """Free the model."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Return the logits after each token of a sequence, float32 (T, V)."""
        self._lib.llama_memory_clear(self._memory, True)
        self._decode([(int(token), i, 0, True) for i, token in enumerate(ids)])
        rows = (self._lib.llama_get_logits_ith(self._context, i) for i in range(len(ids)))
        return np.array([np.ctypeslib.as_array(row, (self._n_words,)).copy() for row in rows])

    def seconds(self, test: Test) -> float:
        """Return the seconds of one repetition of a test."""
        tokens = np.random.default_rng(0).integers(3, self._n_words, test.context + STEP_TOKENS)
        sequences = range(test.batch)
        done = test.depth if not test.n_prompt else 0
        self._fill_cache(tokens[:done], sequences)
        started = time.perf_counter()
        self._prompt(tokens[: test.n_prompt], sequences, 0)
        done = max(done, test.n_prompt)
        for i in range(test.n_gen):
            self._decode([(int(tokens[done + i]), done + i, s, True) for s in sequences])
        return time.perf_counter() - started

    def _fill_cache(self, tokens: np.ndarray, sequences: range) -> None:
        """Fill the KV cache of each sequence with tokens, kept between repetitions."""
        wanted = len(tokens), len(sequences)
        if wanted == self._cached and len(tokens):
            for s in sequences:
                self._lib.llama_memory_seq_rm(self._memory, s, len(tokens), -1)
            return
        self._lib.llama_memory_clear(self._memory, True)
        self._prompt(tokens, sequences, 0)
        self._cached = wanted

    def _prompt(self, tokens: np.ndarray, sequences: range, start: int) -> None:
        for s in sequences:
            for first in range(0, len(tokens), STEP_TOKENS):
                chunk = tokens[first : first + STEP_TOKENS].tolist()
                last = first + len(chunk) == len(tokens)
                self._decode(
                    [
                        (token, start + first + i, s, last and i + 1 == len(chunk))
                        for i, token in enumerate(chunk)
                    ]
                )

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Decode a batch of (token, position, sequence, compute logits)."""
        batch = self._lib.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for i, (token, position, sequence, wanted) in enumerate(rows):
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = wanted
            if self._lib.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            self._lib.llama_synchronize(self._context)
        finally:
            self._lib.llama_batch_free(batch)
