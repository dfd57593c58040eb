"""One pass of a model over the windows of a text, with a reference model or logits file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nbflow_experiments.scoring.logits_file import LogitsFile
from nbflow_experiments.scoring.token_scores import Scores, score
from nbflow_experiments.scoring.windows import Window

if TYPE_CHECKING:
    from nbflow.engine.llm import LLM


Reference = Callable[[Window], np.ndarray]
"""Callable that returns the logits (n_scored, V) of the next window, from a model or a file."""


def model_reference(model: LLM) -> Reference:
    """Return a reference model that runs in the same pass; nothing is stored."""
    return lambda window: predictions(model, window)


def file_reference(logits_file: LogitsFile) -> Reference:
    """Return a reference that reads a logits file; raises `UsageError` for other tokens."""
    n_read = 0

    def logits(window: Window) -> np.ndarray:
        nonlocal n_read
        rows = logits_file.rows(n_read, window.targets)
        n_read += window.n_scored
        return rows

    return logits


def predictions(model: LLM, window: Window) -> np.ndarray:
    """Return the logits (n_scored, V) that predict a window's scored tokens."""
    return model.logits(window.ids[:-1])[window.first - 1 :]  # nothing follows the last token


def score_text(
    model: LLM,
    windows: Sequence[Window],
    *,
    reference: Reference | None = None,
    save: LogitsFile | None = None,
    leads: bool = True,
    progress: Callable[[int, Scores], None] | None = None,
) -> Scores:
    """Run a model over windows and score it.

    Parameters
    ----------
    model : Model
        The model; collective over its ranks under mpirun.
    windows : sequence of Window
        Windows of the text.
    reference : Reference, optional
        Reference of the comparison; used only where `leads`.
    save : LogitsFile, optional
        File for the model's own logits, a reference for later runs.
    leads : bool
        True on the rank that scores; the others only run the model.
    progress : callable, optional
        Called with the number of windows done and the scores of the last one.
    """
    parts: list[Scores] = []
    failure: Exception | None = None
    for i, window in enumerate(windows):
        logits = predictions(model, window)
        if not leads or failure is not None:
            continue
        # An error on this rank alone must not leave the others waiting in the next window.
        try:
            expected = None if reference is None else reference(window)
            parts.append(score(logits, window.targets, expected))
            if save is not None:
                save.append(logits, window.targets)
            if progress is not None:
                progress(i + 1, parts[-1])
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    return Scores.join(parts)
