"""Windows of a text for the analysis."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from nbflow_experiments.backend import text_file
from nbflow_experiments.measures.evaluation import text_windows
from nbflow_kernels.errors import UsageError


def analysis_windows(
    model: str,
    text: str | os.PathLike[str] | None = None,
    tokens: int = 2048,
    window: int = 256,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Return windows of a text, chosen as in sweeps.

    Parameters
    ----------
    model : str
        Model, as `nbflow.load` takes it.
    text : path, optional
        A UTF-8 text; by default the ``eval.txt`` in the model's folder.
    tokens : int
        Total number of tokens; an incomplete last window is dropped.
    window : int
        Tokens of a window, at least 2.  Each begins with BOS if the tokenizer adds one.
    seed : int
        Seed of the choice of windows if the text has more.

    Returns
    -------
    array of int64, shape (tokens // window, window)

    Raises
    ------
    UsageError
        If the text is missing or too short, or `tokens` are less than a window.

    Examples
    --------
    >>> analysis_windows("tiny_python", tokens=512).shape
    (2, 256)
    """
    if window < 2 or tokens < window:
        raise UsageError(
            f"tokens must be at least one window, and a window 2 tokens; got tokens {tokens} and "
            f"window {window}"
        )
    return text_windows(model, text_file(model, text), tokens, window, seed)
