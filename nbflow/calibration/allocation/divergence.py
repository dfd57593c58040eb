"""KL divergence of a quantized model from the stored model on a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.distributed import SelfComm
from nbflow.engine.llm import LLM
from nbflow.engine.load import load
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Divergence:
    """Divergence and perplexity of one model."""

    kld: float
    """Mean Kullback-Leibler divergence from the stored model, in nats per token."""
    kld_stderr: float
    """Standard error of `kld` for independent tokens."""
    perplexity: float


class DivergenceProbe:
    """Reference logits of the stored model on a text.

    Memory: tokens x vocabulary x 4 bytes.

    Parameters
    ----------
    model : str or path
        As for `nbflow.load`.
    text : path, optional
        UTF-8; by default ``eval.txt`` in the folder of the model.
    n_tokens, window : int
        Number of tokens, from the beginning of the text, and tokens per window.
    options
        Further options of `nbflow.load` for every model.
    """

    def __init__(
        self,
        model: str | Path,
        text: str | Path | None = None,
        *,
        n_tokens: int = 2048,
        window: int = 256,
        **options: Any,
    ) -> None:
        self._model, self._options = str(model), {"kv": "f32", **options}
        with self._load() as stored:
            window = min(window, stored.spec.max_context)
            if window < 2 or n_tokens < window:
                raise UsageError(f"tokens must be at least a window of 2 or more, got {n_tokens}")
            tokenizer = stored.tokenizer
            if tokenizer is None:
                raise UsageError(
                    f"{stored.spec.name} has no tokenizer, which reading a text requires"
                )
            ids = np.asarray(tokenizer.encode(_read_text(self._model, text)), np.int64)
            n = n_tokens // window
            if len(ids) < n * window:
                raise UsageError(
                    f"the text has {len(ids)} tokens, fewer than {n_tokens}; give a longer text or "
                    "fewer tokens"
                )
            self.windows = ids[: n * window].reshape(n, window)
            bos = tokenizer.bos_id
            if bos is not None and tokenizer.encode("a", add_special_tokens=True)[:1] == [bos]:
                self.windows[:, 0] = bos
            self._reference = [_logits(stored, w) for w in self.windows]
        self.stored = self._compared(self._reference)

    def measure(self, **changes: Any) -> Divergence:
        """Load the model with some options of `nbflow.load` and compare it."""
        with self._load(**changes) as model:
            return self._compared([_logits(model, w) for w in self.windows])

    def _load(self, **changes: Any) -> LLM:
        return load(self._model, comm=SelfComm(), **{**self._options, **changes})

    def _compared(self, logits: list[NDArray[np.float32]]) -> Divergence:
        divergences, losses = [], []
        for reference, found, window in zip(self._reference, logits, self.windows, strict=True):
            divergences.append(nk.kl_divergence(reference, found))
            losses.append(-nk.token_log_probs(found, window[1:].astype(np.int32)))
        kld = np.concatenate(divergences)
        loss = float(np.concatenate(losses).astype(np.float64).mean())
        return Divergence(
            float(kld.mean()), float(kld.std() / len(kld) ** 0.5), float(np.exp(loss))
        )


def _logits(model: LLM, window: NDArray[np.int64]) -> NDArray[np.float32]:
    return model.logits(window[:-1])  # nothing follows the last token


def _read_text(model: str, text: str | Path | None) -> str:
    if text is None:
        from nbflow.spec import resolve

        path = resolve(model).path
        text = (path if path.is_dir() else path.parent) / "eval.txt"
    file = Path(text)
    if not file.is_file():
        raise UsageError(f"{file} does not exist; name a text with --text (text=)")
    return file.read_text(encoding="utf-8")
