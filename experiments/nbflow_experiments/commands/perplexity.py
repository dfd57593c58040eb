"""`nbflow perplexity`: score a text, alone or against a reference.

Statistics have the names and definitions of llama-perplexity.  With ``--reference`` every scored
token's distribution is compared with that of a reference model, which runs in the same pass, or
with logits stored by ``--save-reference`` (float32, HDF5).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import nbflow
from nbflow.cli.options import (
    add_model_arguments,
    is_printing_rank,
    load_model,
)
from nbflow.distributed import SelfComm
from nbflow_experiments import backend
from nbflow_experiments.scoring.estimates import estimate_perplexity
from nbflow_experiments.scoring.greedy_divergence import Parting, parting
from nbflow_experiments.scoring.logits_file import create, open_logits
from nbflow_experiments.scoring.score_text import (
    Reference,
    file_reference,
    model_reference,
    score_text,
)
from nbflow_experiments.scoring.statistics_table import as_json, statistics, table
from nbflow_experiments.scoring.token_scores import Scores
from nbflow_experiments.scoring.windows import Window, cut
from nbflow_experiments.store.json_files import plain
from nbflow_kernels.errors import UsageError

REFERENCE: dict[str, Any] = {"weights": "f32", "kv": "f32", "activations": "f32", "outliers": 0.0}
"""Load options of a reference: float32 throughout."""
GREEDY_PROMPTS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_arguments(parser)
    add_text_arguments(parser)
    parser.add_argument("--stride", type=int, default=0, help="from window to window (context)")
    parser.add_argument(
        "--scored",
        default="second-half",
        help="tokens of a window that count: second-half (as llama-perplexity), all, or new (those "
        "no earlier window scored)",
    )
    parser.add_argument(
        "--reference",
        nargs="?",
        const="",
        metavar="MODEL|FILE.h5",
        help="compare with a model in float32 (without a name: MODEL itself) or stored logits",
    )
    parser.add_argument(
        "--save-reference", metavar="FILE.h5", help="store the logits, to be a reference later"
    )
    parser.add_argument(
        "--noise-floor",
        action="store_true",
        help="also compare the reference with itself under bfloat16 rounding of all products: "
        "this is the noise floor of differences",
    )
    parser.add_argument(
        "--greedy",
        type=int,
        default=0,
        metavar="N",
        help=f"also generate N tokens greedily after {GREEDY_PROMPTS} windows with both models and "
        "report the first difference",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `text_windows`."""
    parser.add_argument("--text", metavar="FILE", help="text, UTF-8 (the bundled model's eval.txt)")
    parser.add_argument("-c", "--context", type=int, default=512, help="tokens of a window (512)")
    parser.add_argument("--windows", type=int, default=0, metavar="N", help="only the first N")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    _check(arguments)
    named = arguments.reference or ""  # "" is the model itself
    windows = text_windows(arguments, None if named.endswith(".h5") else named or None)
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(load_model(arguments))
        if not model.participates:
            return 0
        if arguments.context - 1 > model.spec.max_context:
            raise UsageError(
                f"--context: windows of {arguments.context} tokens do not fit into the context of "
                f"{model.spec.name}, {model.spec.max_context}"
            )
        leads = is_printing_rank(model)
        companion = _companion(arguments, stack) if leads else None
        reference = _reference(arguments, companion, stack) if leads else None
        save = None
        if leads and arguments.save_reference:
            facts = {"model": arguments.model, "kv": arguments.kv, "context": arguments.context}
            facts |= {"weights": arguments.weights or "as stored", "scored": arguments.scored}
            save = stack.enter_context(create(Path(arguments.save_reference), facts))
        show = _Progress(len(windows)) if leads and not arguments.json else None
        scores = score_text(
            model, windows, reference=reference, save=save, leads=leads, progress=show
        )
        if not leads:
            return 0
        floor = parted = None
        if arguments.noise_floor:
            assert companion is not None
            noisy = stack.enter_context(_load_reference(arguments, activations="bf16"))
            floor = score_text(noisy, windows, reference=model_reference(companion))
        if arguments.greedy:
            assert companion is not None
            prompts = [w.ids[: len(w.ids) // 2].tolist() for w in windows[:GREEDY_PROMPTS]]
            parted = parting(model, companion, prompts, arguments.greedy)
    _print(arguments, windows, scores, floor, parted)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Reject meaningless combinations."""
    if arguments.windows < 0 or arguments.greedy < 0:
        raise UsageError("--windows and --greedy must not be negative")
    needs = [f"--{n.replace('_', '-')}" for n in ("noise_floor", "greedy") if getattr(arguments, n)]
    if needs and (arguments.reference is None or arguments.reference.endswith(".h5")):
        raise UsageError(f"{needs[0]} runs the reference: give --reference with a model")
    if arguments.greedy and arguments.partition != "0":
        raise UsageError("--greedy compares with a reference on one rank: leave --partition out")


def text_windows(arguments: argparse.Namespace, reference: str | None = None) -> list[Window]:
    """Return the windows of the text that the arguments describe, by default the model's.

    A model without a text has that of the `reference`.
    """
    path = backend.text_file(arguments.model, arguments.text, arguments.spec, reference)
    ids, bos = backend.tokenize(arguments.tokenizer or arguments.model, path)
    windows = cut(ids, arguments.context, arguments.stride, arguments.scored, bos)
    return windows[: arguments.windows or None]


def _load_reference(arguments: argparse.Namespace, **changes: Any) -> nbflow.LLM:
    """Load the reference on this process alone."""
    name = arguments.reference or arguments.model
    options = {**REFERENCE, "threads": arguments.threads, **changes}
    if name == arguments.model:
        options |= {"spec": arguments.spec, "max_context": arguments.max_context}
    return nbflow.load(name, comm=SelfComm(), **options)


def _companion(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> nbflow.LLM | None:
    """Return the reference model, if it runs in this process."""
    if arguments.reference is None or arguments.reference.endswith(".h5"):
        return None
    return stack.enter_context(_load_reference(arguments))


def _reference(
    arguments: argparse.Namespace, companion: nbflow.LLM | None, stack: contextlib.ExitStack
) -> Reference | None:
    if companion is not None:
        return model_reference(companion)
    if arguments.reference is None:
        return None
    return file_reference(stack.enter_context(open_logits(Path(arguments.reference))))


class _Progress:
    """Running perplexity on standard error, if that is a terminal."""

    def __init__(self, n_windows: int) -> None:
        self._n_windows = n_windows
        self._parts: list[Scores] = []

    def __call__(self, n_done: int, scores: Scores) -> None:
        self._parts.append(scores)
        if sys.stderr.isatty():
            so_far = estimate_perplexity(Scores.join(self._parts).nll)
            end = "\n" if n_done == self._n_windows else ""
            text = f"\r[{n_done}/{self._n_windows}] PPL {so_far.mean:.4f} ± {so_far.stderr:.4f}"
            print(text, end=end, file=sys.stderr, flush=True)


def _as_json(
    arguments: argparse.Namespace,
    n_windows: int,
    scores: Scores,
    floor: Scores | None,
    parted: Parting | None,
) -> dict[str, Any]:
    """Return what --json prints."""
    names = ("kv", "kv_rotation", "state", "kv_keys", "activations", "context", "scored")
    result: dict[str, Any] = {
        "model": arguments.model,
        "weights": arguments.weights or "as stored",
        **{name: getattr(arguments, name) for name in names},
        "windows": n_windows,
        "tokens": int(scores.nll.size),
        **as_json(statistics(scores)),
    }
    if floor is not None:
        result["noise_floor"] = as_json(statistics(floor))
    if parted is not None:
        result["greedy_tokens"] = parted.n_tokens
        result["greedy_common"] = parted.common.tolist()
    return result


def _print(
    arguments: argparse.Namespace,
    windows: list[Window],
    scores: Scores,
    floor: Scores | None,
    parted: Parting | None,
) -> None:
    if arguments.json:
        result = _as_json(arguments, len(windows), scores, floor, parted)
        print(json.dumps(plain(result), indent=1))
        return
    print(
        f"{scores.nll.size:,} tokens scored in {len(windows)} windows of {arguments.context} "
        f"({arguments.scored})\n\n{table(statistics(scores))}"
    )
    if floor is not None:
        kld = {s.key: s for s in statistics(floor)}["kld_mean"]
        print(f"\nNoise floor (reference in bfloat16): mean KLD {kld.value:.6f} ± {kld.error:.6f}")
    if parted is not None:
        print(
            f"\nGreedy texts: {parted.identical_share:.0%} of {len(parted.common)} the same for "
            f"{parted.n_tokens} tokens; they part after {parted.median:g} tokens (median)"
        )
