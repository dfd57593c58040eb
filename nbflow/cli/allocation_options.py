"""Mixed-precision options of `nbflow quantize`, and the printed allocation."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from nbflow.calibration.allocation import Allocation, AllocationReport, allocate, check_allocation
from nbflow.calibration.allocation.divergence import DivergenceProbe
from nbflow.utils.tables import text_table
from nbflow_kernels.errors import UsageError

N_TOKENS = 2048
"""Default of --tokens."""


def add_allocation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("mixed precision")
    group.add_argument(
        "--bits-per-weight",
        type=float,
        metavar="B",
        help="average stored bits per weight over all matrices: choose one of the --formats for "
        "each so that the model loses least (instead of --to)",
    )
    group.add_argument(
        "--sensitivity",
        choices=("error", "kld"),
        default="error",
        help="error: relative output errors have equal weight in all matrices; kld: weighted by "
        "the KL divergence on --text, measured one matrix at a time (error)",
    )
    group.add_argument(
        "--text", metavar="FILE", help="text for kld and --check (the model's own eval.txt)"
    )
    group.add_argument(
        "--tokens", type=int, metavar="N", help=f"tokens of --text to use ({N_TOKENS})"
    )
    group.add_argument("--policy", metavar="FILE", help="also write the choice to a policy file")
    group.add_argument(
        "--check",
        action="store_true",
        help="measure the KL divergence afterwards, and that of single formats of at most its size",
    )


def check_options(arguments: argparse.Namespace) -> None:
    """Raise unless the options fit either --to or --bits-per-weight."""
    mixed = arguments.bits_per_weight is not None
    if mixed == (arguments.to is not None):
        raise UsageError("give --to FORMAT, or --bits-per-weight B with --formats F1,F2,...")
    names = candidate_formats(arguments.formats)
    if mixed and not names:
        raise UsageError("--bits-per-weight needs formats to choose from: --formats q2,q3,q3h,q4")
    given = {
        "--formats": names, "--policy": arguments.policy, "--check": arguments.check,
        "--sensitivity": arguments.sensitivity != "error",
    }  # fmt: skip
    for option, value in given.items():
        if value and not mixed:
            raise UsageError(f"{option} is for --bits-per-weight")
    if (arguments.text or arguments.tokens is not None) and not (
        arguments.check or arguments.sensitivity == "kld"
    ):
        raise UsageError("--text and --tokens are for --sensitivity kld and --check")
    if mixed and arguments.rule:
        raise UsageError(
            "--rule does not go with --bits-per-weight, whose choice it would change; write that "
            "with --policy FILE, add the rule there, and use --to FILE"
        )
    if arguments.policy and Path(arguments.policy).exists() and not arguments.force:
        raise UsageError(f"{arguments.policy}: exists; give another name, or --force")


def candidate_formats(given: list[str]) -> list[str]:
    """Return the names of formats in ``--formats``."""
    return [name for text in given for name in text.split(",") if name]


def quantizer_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that quantization with and without an allocation share."""
    names = ("quantizer", "importance", "act_order", "damping", "spec")
    return {name: getattr(arguments, name) for name in names}


class AllocationRun:
    """Allocation of the arguments, with its divergence probe."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._names = candidate_formats(arguments.formats)
        self._arguments = arguments
        self._options = quantizer_options(arguments)
        self._probe: DivergenceProbe | None = None
        if arguments.sensitivity == "kld" or arguments.check:
            n_tokens = N_TOKENS if arguments.tokens is None else arguments.tokens
            probe = {"n_tokens": n_tokens, "spec": arguments.spec}
            self._probe = DivergenceProbe(arguments.model, arguments.text, **probe)
        self.allocation: Allocation = allocate(
            arguments.model,
            arguments.bits_per_weight,
            self._names,
            sensitivity=arguments.sensitivity,
            probe=self._probe,
            progress=show_progress,
            **self._options,
        )

    def check(self) -> AllocationReport | None:
        """Measure the allocation, with --check."""
        if not self._arguments.check or self._probe is None:
            return None
        return check_allocation(self.allocation, self._probe, self._names, **self._options)


def show_progress(what: str, n_done: int, n: int) -> None:
    """Show progress on a terminal."""
    if sys.stderr.isatty():
        end = "\n" if n_done == n else ""
        print(f"\r{what} [{n_done}/{n}]", end=end, file=sys.stderr, flush=True)


def allocation_facts(allocation: Allocation, check: AllocationReport | None) -> dict[str, Any]:
    """Return plain data for ``--json``."""
    facts: dict[str, Any] = {**allocation.facts, "n_weights": allocation.n_weights}
    facts["formats"] = allocation.formats
    if check is not None:
        facts["check"] = {
            "measured": vars(check.measured),
            "predicted_kld": check.predicted,
            "stored_perplexity": check.stored.perplexity,
            "single_formats": {name: vars(found) for name, found in check.singles.items()},
        }
    return facts


def print_allocation(allocation: Allocation, check: AllocationReport | None) -> None:
    """Print the allocation and its check."""
    counts: dict[str, int] = {}
    for format in allocation.formats.values():
        counts[format] = counts.get(format, 0) + 1
    shares = ", ".join(f"{n} {format}" for format, n in sorted(counts.items()))
    left = allocation.budget_bytes - allocation.n_bytes
    print(
        f"chose for {len(allocation.formats)} matrices: {shares}\n"
        f"{allocation.n_bytes:,} of {allocation.budget_bytes:,} bytes ({left:,} left), "
        f"{allocation.bits_per_weight:.4f} bits per weight"
    )
    if check is None:
        return
    rows = [("stored", check.stored)]
    rows += [(f"all {name}", found) for name, found in check.singles.items()]
    rows.append(("chosen", check.measured))
    numbers = [
        (name, f"{c.kld:.5f}", f"{c.kld_stderr:.5f}", f"{c.perplexity:.4f}") for name, c in rows
    ]
    print(text_table(("", "KLD, nats", "+-", "perplexity"), numbers))
    if check.predicted is not None:
        ratio = check.measured.kld / check.predicted if check.predicted else float("nan")
        print(f"predicted {check.predicted:.5f} nats; measured / predicted = {ratio:.2f}")


def write_policy_of(chosen: AllocationRun, arguments: argparse.Namespace) -> None:
    """Write the policy file, with --policy."""
    if arguments.policy:
        chosen.allocation.write(Path(arguments.policy))
