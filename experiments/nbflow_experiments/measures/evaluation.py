"""One pass over the evaluated text, shared by the quality measures."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nbflow_experiments import backend
from nbflow_experiments.scoring.logits_file import open_logits
from nbflow_experiments.scoring.score_text import file_reference, score_text
from nbflow_experiments.scoring.token_scores import Scores
from nbflow_experiments.scoring.windows import Window
from nbflow_kernels.errors import UsageError

if TYPE_CHECKING:
    from nbflow_experiments.measures.measure import Context


def make_windows(ids: np.ndarray, n_tokens: int, window: int, seed: int) -> np.ndarray:
    """Cut a text into windows and choose those that are evaluated.

    Parameters
    ----------
    ids : array of int, shape (N,)
        The text.
    n_tokens : int
        Tokens to evaluate; an incomplete last window is dropped.
    window : int
        Tokens per window.  Windows do not overlap.
    seed : int
        Seed of the choice of windows if the text has more than needed: random, without
        replacement, in text order, the same for every point of a sweep.
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
    ids, bos = backend.tokenize(model, text)
    windows = make_windows(ids, n_tokens, window, seed)
    if bos is not None:
        windows = windows.copy()
        windows[:, 0] = bos
    return windows


def scored_windows(windows: np.ndarray, first: int) -> list[Window]:
    """Return windows whose tokens from index `first` (`eval_context`) on are scored."""
    return [Window(window, first) for window in windows]


def evaluate(context: Context) -> Scores:
    """Score every window; collective over the ranks, scored on the leading rank.

    The result is cached in ``context.shared``: the measures of one point share one pass.
    """
    if "evaluation" not in context.shared:
        assert context.windows is not None
        windows = scored_windows(context.windows, context.number("eval_context"))
        with contextlib.ExitStack() as stack:
            reference = None
            if context.leads and context.reference is not None:
                reference = file_reference(stack.enter_context(open_logits(context.reference)))
            context.shared["evaluation"] = score_text(
                context.model, windows, reference=reference, leads=context.leads
            )
    done: Scores = context.shared["evaluation"]
    return done
