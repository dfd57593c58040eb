"""Multiple-choice questions, answered by the most probable continuation.

The score of a choice is the sum of its tokens' log-probabilities after the context; ``acc`` takes
the largest sum, ``acc_norm`` the largest sum per byte of the choice, as in lm-evaluation-harness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import nbflow_kernels as nk
from nbflow.utils.json_file import parse_lines
from nbflow_experiments.scoring.estimates import Estimate, estimate_share
from nbflow_kernels.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from nbflow.engine.llm import LLM
    from nbflow.tokenization import Tokenizer

KEYS = ("context", "choices", "answer")


@dataclass(frozen=True)
class Question:
    """A context, its possible continuations and the index of the right one."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Answer:
    """A model's scores of a question's choices."""

    question: Question
    log_probs: np.ndarray
    """float64 (choices,): sum of the log-probabilities of each choice's tokens."""

    @property
    def right(self) -> bool:
        """Return whether the most probable choice is the right one."""
        return int(np.argmax(self.log_probs)) == self.question.answer

    @property
    def right_per_byte(self) -> bool:
        """Return the same for sums divided by the bytes of the choice."""
        n_bytes = [max(1, len(choice.encode())) for choice in self.question.choices]
        return int(np.argmax(self.log_probs / n_bytes)) == self.question.answer


def read_questions(path: Path) -> list[Question]:
    """Read questions from JSON lines: ``{"context": ..., "choices": [...], "answer": 0}``."""
    if not path.is_file():
        raise UsageError(f"the file {path} does not exist")
    text = path.read_text(encoding="utf-8")
    questions = [_question(where, data) for where, data in parse_lines(text, str(path))]
    if not questions:
        raise UsageError(f"{path} holds no questions")
    return questions


def _question(where: str, data: dict[str, Any]) -> Question:
    for key in data:
        if key not in KEYS:
            raise UsageError(f"{where}: {unknown_name('key', key, KEYS)}")
    missing = [key for key in KEYS if key not in data]
    if missing:
        raise UsageError(f"{where} lacks {', '.join(missing)}")
    context, choices, answer = (data[key] for key in KEYS)
    if not isinstance(context, str):
        raise UsageError(f"{where}: context must be a string, got {context!r}")
    strings = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not strings or len(choices) < 2:
        raise UsageError(f"{where}: choices must be at least two strings, none empty")
    whole = isinstance(answer, int) and not isinstance(answer, bool)
    if not whole or not 0 <= answer < len(choices):
        raise UsageError(f"{where}: answer must be 0..{len(choices) - 1}, got {answer!r}")
    return Question(context, tuple(choices), answer)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """Return the tokens of a context with its continuation, and how many are the context's.

    Trailing spaces of the context move to the continuation, whose tokens may begin with one; both
    are encoded together, so the boundary is tokenized as in running text.  For an empty context the
    first token is predicted from the tokenizer's prefix, or from EOS.
    """
    stripped = context.rstrip(" ")
    continuation = context[len(stripped) :] + continuation
    prefix = tokenizer.encode(stripped, add_special_tokens=True)
    whole = tokenizer.encode(stripped + continuation, add_special_tokens=True)
    if not prefix:
        start = tokenizer.bos_id if tokenizer.bos_id is not None else next(iter(tokenizer.eos_ids))
        return [start, *whole], 1
    return whole, min(len(prefix), len(whole) - 1)


def continuation_log_prob(model: LLM, ids: Sequence[int], n_context: int) -> tuple[float, bool]:
    """Return the log-probability of the tokens from `n_context` on, and whether greedy finds them.

    Tokens that exceed the model's context are dropped on the left, as in the harness.
    """
    kept = list(ids)[-model.spec.max_context - 1 :]  # the last token is only predicted
    first = n_context - (len(ids) - len(kept))
    if first < 1:
        raise UsageError(
            f"a continuation of {len(ids) - n_context} tokens does not fit into the context of "
            f"{model.spec.name} ({model.spec.max_context} tokens)"
        )
    logits = np.ascontiguousarray(model.logits(kept[:-1])[first - 1 :])
    targets = np.array(kept[first:], np.int32)
    total = float(nk.token_log_probs(logits, targets).sum())
    return total, bool(np.array_equal(logits.argmax(axis=1), targets))


def ask(model: LLM, questions: Sequence[Question]) -> Iterator[Answer]:
    """Yield a model's answer to each question."""
    for question in questions:
        pairs = [encode_pair(model.tokenizer, question.context, c) for c in question.choices]
        found = [continuation_log_prob(model, ids, n)[0] for ids, n in pairs]
        yield Answer(question, np.array(found))


def accuracies(answers: Sequence[Answer]) -> dict[str, Estimate]:
    """Return ``acc`` and ``acc_norm`` with their standard errors."""
    return {
        "acc": estimate_share(np.array([a.right for a in answers])),
        "acc_norm": estimate_share(np.array([a.right_per_byte for a in answers])),
    }
