"""`nbflow choices`: answer multiple-choice questions.

Each line of the file is a JSON object::

    {"context": "...", "choices": ["...", "..."], "answer": 0}

The score of a choice is the sum of its tokens' log-probabilities after the context (acc), or that
sum per byte (acc_norm), as in lm-evaluation-harness.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nbflow.cli.options import add_model_arguments, is_printing_rank, load_model
from nbflow_experiments.scoring.multiple_choice import accuracies, ask, read_questions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("--data", metavar="FILE.jsonl", required=True, help="the questions")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    questions = read_questions(Path(arguments.data))[: arguments.limit or None]
    with load_model(arguments) as model:
        if not model.participates:
            return 0
        answers = list(ask(model, questions))
        if not is_printing_rank(model):
            return 0
    found = accuracies(answers)
    if arguments.json:
        result = {name: e.mean for name, e in found.items()}
        result |= {f"{name}_stderr": e.stderr for name, e in found.items()}
        print(json.dumps({"questions": len(answers), **result}, indent=1))
        return 0
    print(f"{len(answers)} questions")
    for name, e in found.items():
        print(f"{name:<8} {100 * e.mean:7.2f} % ± {100 * e.stderr:.2f}")
    return 0
