"""`nbflow classify`: label texts with a classification head, or score a labelled file."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nbflow.cli.options import add_model_arguments, is_printing_rank, load_model
from nbflow.engine.classify import Classification, classify, head_of
from nbflow.utils.tables import text_table
from nbflow_experiments.scoring.classification import (
    Example,
    correlations,
    label_index,
    measures,
    read_examples,
)
from nbflow_experiments.scoring.estimates import Estimate
from nbflow_kernels.errors import UsageError

if TYPE_CHECKING:
    from nbflow.engine.llm import LLM

_BATCH = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("text", metavar="TEXT", nargs="?", help="text, before the options")
    parser.add_argument("pair", metavar="TEXT2", nargs="?", help="second text of a pair")
    group = parser.add_argument_group("labelled texts")
    group.add_argument("--data", metavar="FILE", help=".tsv with names of columns, or .jsonl")
    for name in ("text", "pair", "label"):
        group.add_argument(
            f"--{name}", metavar="COLUMN", dest=f"{name}_column",
            help="column of the file; a number from 1 if it has no names (GLUE's names)",
        )  # fmt: skip
    group.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N")
    parser.add_argument(
        "--max-length", type=int, metavar="N",
        help="shorten texts to N tokens (--data: the model's context)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if (arguments.text is None) == (arguments.data is None):
        raise UsageError("give TEXT or --data FILE")
    if arguments.max_length is not None and arguments.max_length < 3:
        raise UsageError(f"--max-length must be at least 3, got {arguments.max_length}")
    examples = None
    if arguments.data is not None:
        columns = (arguments.text_column, arguments.pair_column, arguments.label_column)
        examples = read_examples(Path(arguments.data), *columns)[: arguments.limit or None]
    with load_model(arguments) as model:
        if not model.participates:
            return 0
        if examples is not None:
            found = score(model, examples, arguments.max_length)
        else:
            pair = arguments.text if arguments.pair is None else (arguments.text, arguments.pair)
            (one,) = classify(model, [pair], max_tokens=arguments.max_length)
        if not is_printing_rank(model):
            return 0
    if examples is None:
        _print_labels(one, as_json=arguments.json)
    else:
        _print_measures(found, len(examples), as_json=arguments.json)
    return 0


def score(
    model: LLM, examples: Sequence[Example], max_tokens: int | None = None
) -> dict[str, Estimate]:
    """Return the measures of a classifier's answers; long texts are shortened."""
    spec = head_of(model).spec
    most = min(max_tokens or model.spec.max_context, model.spec.max_context)
    is_regression = spec.problem_type == "regression"
    if is_regression:
        truth = np.array([_number(example.label) for example in examples])
    else:
        truth = np.array([label_index(example.label, spec.labels) for example in examples])
    answers: list[Classification] = []
    for start in range(0, len(examples), _BATCH):
        part = [example.texts for example in examples[start : start + _BATCH]]
        answers += classify(model, part, max_tokens=most)
    if is_regression:
        return correlations(np.array([float(a.logits[0]) for a in answers]), truth)
    return measures(np.array([a.index for a in answers]), truth, len(spec.labels))


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        raise UsageError(f"the label of a regression must be a number, got {label!r:.60}") from None


def _print_labels(found: Classification, *, as_json: bool) -> None:
    order = np.argsort(-found.scores, kind="stable")
    rows = [(found.labels[i], float(found.scores[i]), float(found.logits[i])) for i in order]
    if as_json:
        entries = [dict(zip(("label", "score", "logit"), row, strict=True)) for row in rows]
        print(json.dumps(entries, indent=1))
        return
    shown = [(label, f"{score:.4f}", f"{logit:.4f}") for label, score, logit in rows]
    print(text_table(("label", "score", "logit"), shown))


def _print_measures(found: dict[str, Estimate], n: int, *, as_json: bool) -> None:
    if as_json:
        result = {name: e.mean for name, e in found.items()}
        print(json.dumps({"texts": n, **result}, indent=1))
        return
    print(f"{n} texts")
    for name, e in found.items():
        error = "" if math.isnan(e.stderr) else f" ± {e.stderr:.4f}"
        print(f"{name:<9} {e.mean:7.4f}{error}")
