"""Measure the speed-up of speculative decoding against its bounds.

    python tools/measure/speculation.py MODEL --draft SMALL [-o FILE] [--seconds 240]

Greedy generation with and without speculation, in turn (outputs must be equal); the ratio is the
median of the rounds' ratios.  One row per draft source ("ngram", and the draft model, if any),
number of draft tokens and batch size:

- ``speedup``: seconds without speculation over seconds with it.
- ``accepted_per_step``: accepted draft tokens per verification step, and ``acceptance_rate``, their
  share of all draft tokens.
- ``bound_ideal``: 1 + accepted_per_step, the bound for free drafting and verification at the cost
  of a decode step.
- ``bound_measured``: bound_ideal / (r + n d), where r is the time of a step with n + 1 rows over
  one with one row, n the number of draft tokens, and d the time of a draft model step over one of
  the model; all measured here, at the same batch size.  The remaining gap is Python overhead.

Prompts are Python snippets if the model has a tokenizer, else random tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import nbflow
from nbflow.utils.atomic_write import write_text
from nbflow.utils.system import processor_name

TEXTS = (
    "def __init__(self, name, value):\n    self.name = name\n",
    "import os\nimport sys\n\ndef main():\n    for name in",
    "class Node:\n    def __init__(self):\n        self.left = None\n",
    "x = 1\nx = 1\nx = 1\n",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "with open(path) as file:\n    for line in file:\n",
    "def test_add():\n    assert add(1, 2) == 3\n    assert",
    "return [item for item in items if item.name",
)
STEPS = 20
"""Timed steps for the bound."""


def prompts(model: nbflow.LLM, n: int) -> list[list[int]]:
    """Return `n` prompts."""
    tokenizer = model.optional_tokenizer
    if tokenizer is None:
        rng = np.random.default_rng(0)
        return [rng.integers(0, model.spec.vocab_size, 24).tolist() for _ in range(n)]
    return [tokenizer.encode(TEXTS[i % len(TEXTS)], add_special_tokens=True) for i in range(n)]


def once(model: nbflow.LLM, texts: list[list[int]], n_new: int, **more: Any) -> dict[str, Any]:
    """Return seconds, outputs and acceptance counts of a batch."""
    requests = [model.make_request(ids, n_new, "greedy", 0, True, **more) for ids in texts]
    for request in requests:
        request.wants_logprobs = False
    started = time.perf_counter()
    for _ in model.run_requests(requests, burst_s=0.1):
        pass
    return {
        "seconds": time.perf_counter() - started,
        "ids": [request.ids for request in requests],
        "drafted": sum(request.n_drafted for request in requests),
        "accepted": sum(request.n_accepted for request in requests),
        "new": sum(len(request.ids) for request in requests),
    }


def step_s(model: nbflow.LLM, n_sequences: int, n_rows: int) -> float:
    """Return the median seconds of a step with `n_rows` rows of each of `n_sequences`."""
    return statistics.median(steps_s(model, n_sequences, n_rows)[0])


def steps_s(model: nbflow.LLM, n_sequences: int, *n_rows: int) -> list[list[float]]:
    """Return the seconds of steps with each of `n_rows` rows per sequence; the kinds take turns."""
    rng = np.random.default_rng(1)
    seconds: list[list[float]] = [[] for _ in n_rows]
    with model.session() as session:
        held = [session.begin() for _ in range(n_sequences)]
        session.run({s: rng.integers(0, model.spec.vocab_size, 32).tolist() for s in held})
        for i in range(STEPS + 3):
            for n, some in zip(n_rows, seconds, strict=True):
                rows = {s: rng.integers(0, model.spec.vocab_size, n).tolist() for s in held}
                started = time.perf_counter()
                session.run(rows)
                if i >= 3:  # the first ones are bound to their buffers
                    some.append(time.perf_counter() - started)
                for sequence in held:
                    session.truncate(sequence, 32)
    return seconds


def measure(
    model: nbflow.LLM,
    draft: nbflow.LLM | str,
    n_draft: int,
    n_texts: int,
    n_new: int,
    repeats: int,
) -> dict[str, Any]:
    """Return one row."""
    texts, ratios, made = prompts(model, n_texts), [], dict[str, Any]()
    for round_ in range(repeats + 1):
        plain = once(model, texts, n_new)
        made = once(model, texts, n_new, draft=draft, n_draft=n_draft)
        if made["ids"] != plain["ids"]:
            sys.exit("the texts with proposals are others: this is an error of the engine")
        if round_:  # the first one compiles
            ratios.append(plain["seconds"] / made["seconds"])
    # every step gives its accepted tokens and one more; the first token comes from the prompt
    n_steps = made["new"] - n_texts - made["accepted"]
    accepted = made["accepted"] / n_steps
    ones, some = steps_s(model, n_texts, 1, n_draft + 1)
    several = statistics.median(b / a for a, b in zip(ones, some, strict=True))
    own = 0.0 if isinstance(draft, str) else step_s(draft, n_texts, 1) / statistics.median(ones)
    return {
        "draft": draft if isinstance(draft, str) else draft.spec.name,
        "n_draft": n_draft,
        "texts": n_texts,
        "new": n_new,
        "speedup": statistics.median(ratios),
        "accepted_per_step": accepted,
        "acceptance_rate": made["accepted"] / max(1, made["drafted"]),
        "bound_ideal": 1 + accepted,
        "bound_measured": (1 + accepted) / (several + n_draft * own),
        "verify_step_over_step": several,
        "draft_step_over_step": own,
        "speedups": ratios,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft", help="a smaller model with the same vocabulary")
    parser.add_argument("--n-draft", default="2,5", help="proposed tokens")
    parser.add_argument("--texts", default="1,4", help="at once")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--weights")
    parser.add_argument("--draft-weights")
    parser.add_argument("--activations", default="f32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("-o", "--output", type=Path, help="a JSON file")
    parser.add_argument("--seconds", type=float, default=0.0, help="start no row after S seconds")
    arguments = parser.parse_args()
    common = {k: getattr(arguments, k) for k in ("activations", "threads")}
    end = time.monotonic() + arguments.seconds if arguments.seconds else float("inf")
    about = {"model": Path(arguments.model).name, "processor": processor_name(), **common}
    about |= {"weights": arguments.weights, "draft_weights": arguments.draft_weights}
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(
            nbflow.load(arguments.model, weights=arguments.weights, **common)
        )
        drafts: list[nbflow.LLM | str] = ["ngram"]
        if arguments.draft is not None:
            drafts.append(
                stack.enter_context(
                    nbflow.load(arguments.draft, weights=arguments.draft_weights, **common)
                )
            )
        for n_texts in map(int, arguments.texts.split(",")):
            for n_draft in map(int, arguments.n_draft.split(",")):
                for draft in drafts:
                    if time.monotonic() > end:
                        sys.exit("no time for the other rows")
                    new, repeats = arguments.new, arguments.repeats
                    rows.append(measure(model, draft, n_draft, n_texts, new, repeats))
                    shown = {k: v for k, v in rows[-1].items() if not isinstance(v, list)}
                    print(json.dumps(shown), flush=True)
                    if arguments.output is not None:
                        text = json.dumps({**about, "rows": rows}, indent=1) + "\n"
                        write_text(arguments.output, text)


if __name__ == "__main__":
    main()
