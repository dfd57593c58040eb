"""`classify`: labels of texts from an encoder with a classification head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nbflow.engine.classification_head import ClassificationHead
from nbflow.engine.interfaces import ModelInfo
from nbflow.engine.llm import BATCH_MULTI_STEP_S, LLM
from nbflow.engine.request import Request
from nbflow.engine.request_validation import embedding_requests
from nbflow_kernels.errors import UsageError

Text = str | tuple[str, str] | Sequence[int]
"""A text, a pair of texts, or token ids with all special tokens."""


@dataclass(frozen=True)
class Classification:
    """Result for one text."""

    labels: tuple[str, ...]
    logits: NDArray[np.float32]
    """One for each label."""
    scores: NDArray[np.float32]
    """Probabilities: softmax, or sigmoids with several labels at once; logits in a regression."""

    @property
    def index(self) -> int:
        """Number of the label with the largest score."""
        return int(np.argmax(self.scores))

    @property
    def label(self) -> str:
        """The label with the largest score."""
        return self.labels[self.index]


def classify(
    model: LLM, texts: Sequence[Text], *, max_tokens: int | None = None
) -> list[Classification]:
    """Return the scores of the labels of texts or pairs of texts, computed in shared steps.

    Parameters
    ----------
    model : LLM
        An encoder with a classification head, e.g. ``BertForSequenceClassification``.
    texts : sequence
        Each a text, a pair of texts (their tokens get types, as in BERT), or token ids.
    max_tokens : int, optional
        Shorten longer texts to this number of tokens; by default they are refused where they exceed
        the context.

    Returns
    -------
    list of Classification

    Raises
    ------
    UsageError
        If the model has no classification head, or a text does not fit.
    """
    requests = classification_requests(model, texts, max_tokens)
    for _ in LLM.run_requests(model, requests, BATCH_MULTI_STEP_S):  # each replica runs all
        pass
    return [classification(model, request) for request in requests]


def head_of(model: ModelInfo) -> ClassificationHead:
    """Return the classification head of a model, or raise `UsageError`."""
    head = model.classification_head
    if head is None:
        raise UsageError(
            f"{model.spec.name} has no classification head (pooler and classifier of BERT's kind)"
        )
    return head


def classification_requests(
    model: ModelInfo, texts: Sequence[Text], max_tokens: int | None = None
) -> list[Request]:
    """Return a request for each text; parameters as in `classify`."""
    head_of(model)
    ids, types = [], []
    for text in texts:
        if isinstance(text, str):
            found = model.tokenizer.encode_pair(text, None, max_tokens)
        elif len(text) == 2 and all(isinstance(part, str) for part in text):
            found = model.tokenizer.encode_pair(str(text[0]), str(text[1]), max_tokens)
        else:
            found = [int(i) for i in text], [0] * len(text)
        ids.append(found[0])
        types.append(found[1])
    given = types if model.spec.type_vocab_size > 1 else None
    return embedding_requests(model.spec, ids, given, "first", False)


def classification(model: ModelInfo, request: Request) -> Classification:
    """Return the result of a finished request of `classification_requests`."""
    head = head_of(model)
    logits = head.logits(np.asarray(request.finished_vector(), np.float32))
    return Classification(head.spec.labels, logits, head.scores(logits))
