"""Windows of a text, and their scored tokens.

Three conventions are in use, and their perplexities differ: `SCORED` names them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbflow_kernels.errors import UsageError, unknown_name

SCORED = ("second-half", "all", "new")
"""Conventions for the scored tokens of a window.

``second-half``: those that have at least half a window before them (llama-perplexity);
``all``: every token but the first, which has no prediction;
``new``: those that no earlier window has scored (Transformers' documentation, with a stride below
the context; the first window scores all).
"""


@dataclass(frozen=True)
class Window:
    """Tokens evaluated from an empty cache."""

    ids: np.ndarray
    """int64 (T,): the tokens, the first replaced by BOS where the tokenizer adds one."""
    first: int
    """Index of the first scored token, at least 1; all later ones are scored."""

    @property
    def targets(self) -> np.ndarray:
        """Return the scored tokens."""
        return self.ids[self.first :]

    @property
    def n_scored(self) -> int:
        """Return the number of scored tokens."""
        return len(self.ids) - self.first


def cut(
    ids: np.ndarray,
    context: int,
    stride: int = 0,
    scored: str = "second-half",
    bos: int | None = None,
) -> list[Window]:
    """Cut a text into windows.

    Parameters
    ----------
    ids : array of int, shape (N,)
        The text, without special tokens.
    context : int
        Tokens of a window, at least 2.
    stride : int
        Distance between the starts of two windows, at most `context`; 0: `context`.
    scored : {"second-half", "all", "new"}
        See `SCORED`.
    bos : int, optional
        Replaces the first token of every window, as in llama-perplexity; with "new", it is put
        before the text instead.

    Returns
    -------
    list of Window
        With "new" the last window may be shorter; otherwise an incomplete window is
        dropped.

    Raises
    ------
    UsageError
        If no window fits.
    """
    stride = stride or context
    if scored not in SCORED:
        raise unknown_name("choice of scored tokens", scored, SCORED)
    if context < 2 or not 1 <= stride <= context:
        raise UsageError(
            f"context must be at least 2 and stride in 1..context, got {context} and {stride}"
        )
    ids = np.asarray(ids, np.int64)
    if scored == "new":
        if bos is not None:
            ids = np.concatenate([[bos], ids])
        return _sliding(ids, context, stride)
    windows = []
    for start in range(0, len(ids) - context + 1, stride):
        tokens = ids[start : start + context].copy()
        if bos is not None:
            tokens[0] = bos
        # llama-perplexity predicts from the logits of token context / 2 on
        windows.append(Window(tokens, context // 2 + 1 if scored == "second-half" else 1))
    if not windows or windows[0].n_scored == 0:
        raise UsageError(
            f"the text has {len(ids)} tokens, too few for a window of {context} of which a part is "
            "scored; lower the context or give a longer text"
        )
    return windows


def _sliding(ids: np.ndarray, context: int, stride: int) -> list[Window]:
    if len(ids) < 2:
        raise UsageError(f"the text has {len(ids)} tokens; at least 2 are needed")
    windows, done = [], 1
    for start in range(0, len(ids), stride):
        end = min(start + context, len(ids))
        if end > done:
            windows.append(Window(ids[start:end], max(done - start, 1)))
            done = end
        if end == len(ids):
            break
    return windows
