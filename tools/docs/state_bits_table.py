"""Tables of docs/state_formats.md: divergence by bits of states and of kinds of weights."""

from __future__ import annotations

from collections.abc import Sequence

from experiment_tables import markdown, of_rows

from nbflow_experiments.store.results_reader import Row
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.state_format import state_bytes

KINDS = {"*.delta.*": "recurrent", "*.attn.*": "attention", "*.ffn.*": "feed-forward",
         "embed.*": "embedding and head"}  # fmt: skip


def state_bits() -> str:
    """Return divergences by state format, with exact and with quantized weights."""
    return of_rows("state_bits", _states)


def weight_kind_bits() -> str:
    """Return divergences with one kind of weights in few bits and exact states."""
    return of_rows("state_bits", _kinds)


def _states(rows: Sequence[Row]) -> str:
    rows = [row for row in rows if "=" not in row["weights"]]
    windows = list(dict.fromkeys(row["eval_window"] for row in rows))
    found = {(r["weights"], r["state"], r["eval_window"]): r for r in rows}
    body = []
    for weights in dict.fromkeys(row["weights"] for row in rows):
        for state in dict.fromkeys(row["state"] for row in rows):
            bits = state_bytes((32,), state) * 8 / 32
            cells = [_nats(found[weights, state, window]) for window in windows]
            body.append([f"`{weights}`", f"`{state}`", f"{bits:g}", *cells])
    head = ["weights", "state", "bits of the state", *(f"{n} tokens" for n in windows)]
    return markdown(head, body)


def _kinds(rows: Sequence[Row]) -> str:
    rows = [row for row in rows if "=" in row["weights"]]
    found = {tuple(row["weights"].split("=")): row for row in rows}
    formats = list(dict.fromkeys(format for _, format in found))
    body = []
    measured = {pattern for pattern, _ in found}
    for pattern, name in KINDS.items():
        if pattern not in measured:  # a kind that the published run did not have
            continue
        body.append([f"{name} (`{pattern}`)", *(_nats(found[pattern, f]) for f in formats)])
    head = ["matrices", *(f"`{f}`, {FORMATS[f].bits_per_weight:g} bits" for f in formats)]
    return markdown(head, body)


def _nats(row: Row) -> str:
    return f"{row['kld_mean_nats']:.2g} ± {row['kld_mean_nats_stderr']:.1g}"
