"""Windows of a text for the analysis."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nbflow_experiments import engine
from nbflow_experiments.evaluation import text_windows


def analysis_windows(
    model: str,
    text: str | os.PathLike[str] | None = None,
    tokens: int = 2048,
    window: int = 256,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Return windows of a text, as sweeps choose them.

    Parameters
    ----------
    model : str
        What `nbflow.load` takes.
    text : path, optional
        A UTF-8 text; by default the ``eval.txt`` beside the model.
    tokens : int
        How many tokens in all; a remainder that fills no window is left out.
    window : int
        Tokens of a window.  Each begins with BOS if the tokenizer adds one.
    seed : int
        Which windows are taken where the text has more.

    Returns
    -------
    array of int64, shape (tokens // window, window)

    Raises
    ------
    UsageError
        If there is no text, or it is too short.

    Examples
    --------
    >>> analysis_windows("tiny_python", tokens=512).shape
    (2, 256)
    """
    given = "" if text is None else str(Path(text).resolve())
    path = engine.evaluation_text(given, engine.identify(model), Path())
    return text_windows(model, path, tokens, window, seed)
