"""Classification head of an encoder, computed on the host from the first token's hidden state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint import WeightFile
from nbflow.spec.layer_specs import ClassifierSpec
from nbflow.spec.model_spec import ModelSpec

_ACTIVATIONS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
}


@dataclass(frozen=True)
class ClassificationHead:
    """Weights of a classification head, float64: (E, E), (E,), (n, E), (n,)."""

    spec: ClassifierSpec
    pooler: NDArray[np.float64]
    pooler_bias: NDArray[np.float64]
    classifier: NDArray[np.float64]
    classifier_bias: NDArray[np.float64]

    @classmethod
    def read(cls, spec: ModelSpec, file: WeightFile) -> ClassificationHead:
        """Read the head from a checkpoint."""
        assert spec.classifier is not None
        names = ("pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias")
        arrays = [file.array(spec.checkpoint_name(name)).astype(np.float64) for name in names]
        return cls(spec.classifier, *arrays)

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logit of each label from the first token's hidden state."""
        pooled = self.pooler @ hidden.astype(np.float64) + self.pooler_bias
        pooled = _ACTIVATIONS[self.spec.activation](pooled)
        return np.asarray(self.classifier @ pooled + self.classifier_bias, np.float32)

    def scores(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the score of each label: probabilities, or the logits in a regression."""
        x = logits.astype(np.float64)
        if self.spec.problem_type == "single_label":
            x = np.exp(x - x.max())
            x = x / x.sum()
        elif self.spec.problem_type == "multi_label":
            x = 1.0 / (1.0 + np.exp(-x))
        return np.asarray(x, np.float32)
