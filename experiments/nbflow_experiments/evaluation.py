"""One pass over the evaluated text, shared by the quality measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nbflow_experiments import engine
from nbflow_experiments.extras import require
from nbflow_experiments.measures.base import Context
from nbflow_experiments.statistics import kl_divergence, log_softmax, negative_log_likelihood
from nbflow_kernels.errors import UsageError

_ROWS = 64  # rows scored at a time: 64 rows of 128k float64 are 64 MB


@dataclass(frozen=True)
class Evaluation:
    """What one rank learned from the logits of every scored token, in the order of the text."""

    nll: np.ndarray
    """-log p(token) in nats, float64 (n,)."""
    reference_nll: np.ndarray
    """The same of the reference (n,); empty without one."""
    divergence: np.ndarray
    """KL(reference || model) in nats, float64 (n,); empty without a reference."""
    same_top: np.ndarray
    """Whether both give the highest logit to the same token, bool (n,); empty without one."""


def make_windows(ids: np.ndarray, n_tokens: int, window: int, seed: int) -> np.ndarray:
    """Cut a text into windows and choose those that are evaluated.

    Parameters
    ----------
    ids : array of int, shape (N,)
        The text.
    n_tokens : int
        Tokens to evaluate; a remainder that does not fill a window is left out.
    window : int
        Tokens of a window.  Windows do not overlap.
    seed : int
        Which of the windows are taken where the text has more than are asked for: a random choice
        without repetition, in the order of the text, the same for every point of a sweep.

    Returns
    -------
    array of int64, shape (n_tokens // window, window)
        The windows.

    Raises
    ------
    UsageError
        If the text is too short.
    """
    wanted, available = n_tokens // window, len(ids) // window
    if wanted > available:
        raise UsageError(
            f"eval_tokens = {n_tokens} asks for {wanted} windows of {window} tokens, but the text "
            f"has {len(ids)} tokens ({available} windows); lower eval_tokens or give a longer text"
        )
    cut = np.asarray(ids[: available * window], np.int64).reshape(available, window)
    if wanted == available:
        return cut
    chosen = np.random.default_rng(seed).choice(available, wanted, replace=False)
    return np.ascontiguousarray(cut[np.sort(chosen)])


def text_windows(model: str, text: Path, n_tokens: int, window: int, seed: int) -> np.ndarray:
    """Return the windows of a text file; each begins with BOS if the tokenizer adds one."""
    ids, bos = engine.tokenize(model, text.read_text(encoding="utf-8"))
    windows = make_windows(ids, n_tokens, window, seed)
    if bos is not None:
        windows = windows.copy()
        windows[:, 0] = bos
    return windows


def evaluate(context: Context) -> Evaluation:
    """Score every window; called in step on every rank, scored on the one that leads.

    The result is kept in ``context.shared``, so that the measures of one point pay for one pass.
    """
    if "evaluation" not in context.shared:
        context.shared["evaluation"] = _evaluate(context)
    done: Evaluation = context.shared["evaluation"]
    return done


def _evaluate(context: Context) -> Evaluation:
    assert context.windows is not None
    first = context.number("eval_context") - 1
    reference, stream = None, None
    parts: list[Evaluation] = []
    failure: Exception | None = None
    try:
        if context.leads and context.reference is not None:
            stream = require("h5py").File(context.reference, "r")
            reference = stream["logits"]
    except Exception as error:
        failure = error
    for i, window in enumerate(context.windows):
        logits = context.model.logits(window)
        if not context.leads or failure is not None:
            continue
        # An error of this rank alone must not leave the others waiting in the next window.
        try:
            row = None if reference is None else reference[i]
            parts.append(score(logits[first:-1], window[first + 1 :], row))
        except Exception as error:
            failure = error
    if stream is not None:
        stream.close()
    if failure is not None:
        raise failure
    return _join(parts)


def score(logits: Any, targets: np.ndarray, reference: np.ndarray | None) -> Evaluation:
    """Score the logits (T, V) that predict `targets` (T,) against the reference's (T, V)."""
    parts = []
    for a in range(0, len(targets), _ROWS):
        rows = slice(a, a + _ROWS)
        log_q = log_softmax(logits[rows])
        nll = negative_log_likelihood(log_q, targets[rows])
        nothing = np.empty(0)
        if reference is None:
            parts.append(Evaluation(nll, nothing, nothing, np.empty(0, bool)))
            continue
        log_p = log_softmax(reference[rows])
        parts.append(
            Evaluation(
                nll,
                negative_log_likelihood(log_p, targets[rows]),
                kl_divergence(log_p, log_q),
                np.argmax(log_p, axis=-1) == np.argmax(log_q, axis=-1),
            )
        )
    return _join(parts)


def _join(parts: list[Evaluation]) -> Evaluation:
    """Return one evaluation from those of consecutive pieces of text."""
    if not parts:
        return Evaluation(np.empty(0), np.empty(0), np.empty(0), np.empty(0, bool))
    return Evaluation(
        np.concatenate([p.nll for p in parts]),
        np.concatenate([p.reference_nll for p in parts]),
        np.concatenate([p.divergence for p in parts]),
        np.concatenate([p.same_top for p in parts]),
    )
