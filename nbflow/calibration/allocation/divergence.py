"""How far a model with other weights is from the model as it is stored, on a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow
import nbflow_kernels as nk
from nbflow.distributed import SelfComm
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class Divergence:
    """What was measured of one model."""

    kld: float
    """Mean Kullback-Leibler divergence from the stored model, in nats per token."""
    kld_stderr: float
    """Its standard error; tokens count as independent."""
    perplexity: float
    """Of the text."""


class Probe:
    """The stored model's logits on a text, to compare others with.

    The logits are kept in memory: tokens x vocabulary x 4 bytes.

    Parameters
    ----------
    model : str or path
        What `nbflow.load` takes.
    text : path, optional
        UTF-8; the ``eval.txt`` beside the model if not given.
    n_tokens, window : int
        Tokens that are compared, from the beginning of the text, and how many are read at once.
    options
        Further options of `nbflow.load` for every model.

    Raises
    ------
    UsageError
        If there is no text, or it has not so many tokens.
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
            ids = _ids(stored, _text(stored, self._model, text))
            n = n_tokens // window
            if len(ids) < n * window:
                raise UsageError(
                    f"the text has {len(ids)} tokens, and {n_tokens} are to be compared; give a "
                    "longer one, or fewer tokens"
                )
            self.windows = ids[: n * window].reshape(n, window)
            bos = stored.tokenizer.bos_id if stored.tokenizer is not None else None
            if bos is not None and _begins_with(stored, bos):
                self.windows[:, 0] = bos
            self._reference = [_logits(stored, w) for w in self.windows]
        self.stored = self._compared(self._reference)

    def measure(self, **changes: Any) -> Divergence:
        """Load the model with some options of `nbflow.load` and compare it."""
        with self._load(**changes) as model:
            return self._compared([_logits(model, w) for w in self.windows])

    def _load(self, **changes: Any) -> nbflow.LLM:
        return nbflow.load(self._model, comm=SelfComm(), **{**self._options, **changes})

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


def _logits(model: nbflow.LLM, window: NDArray[np.int64]) -> NDArray[np.float32]:
    return model.logits(window[:-1])  # nothing follows the last token


def _text(model: nbflow.LLM, name: str, text: str | Path | None) -> str:
    if text is None:
        from nbflow.spec import resolve

        path = resolve(name).path
        text = (path if path.is_dir() else path.parent) / "eval.txt"
    file = Path(text)
    if not file.is_file():
        raise UsageError(f"there is no text {file}; name one with --text (text=)")
    return file.read_text(encoding="utf-8")


def _ids(model: nbflow.LLM, text: str) -> NDArray[np.int64]:
    if model.tokenizer is None:
        raise UsageError(f"{model.spec.name} has no tokenizer, and a text is to be read")
    return np.asarray(model.tokenizer.encode(text), np.int64)


def _begins_with(model: nbflow.LLM, bos: int) -> bool:
    assert model.tokenizer is not None
    return model.tokenizer.encode("a", add_special_tokens=True)[:1] == [bos]
