"""Table of docs/kvcache.md: what a rotation is worth for the cache of the bundled model."""

from __future__ import annotations

from experiment_tables import markdown, of_rows

from nbflow_experiments.store.results_reader import Row

WEIGHTS = "f32"


def kv_rotation() -> str:
    """Return divergences by formats of keys and values, without and with the rotation."""
    return of_rows("kv_rotation", _divergences)


def _divergences(rows: list[Row]) -> str:
    rows = [row for row in rows if row["weights"] == WEIGHTS]
    windows = list(dict.fromkeys(row["eval_window"] for row in rows))
    found = {(r["kv"], r["eval_window"], r["kv_rotation"]): r for r in rows}
    body = []
    for kv in dict.fromkeys(row["kv"] for row in rows):
        cells = [f"`{kv}`"]
        for window in windows:
            plain = found[kv, window, "none"]
            rotated = found.get((kv, window, "hadamard"))
            cells += [_nats(plain), _nats(rotated), _ratio(plain, rotated)]
        body.append(cells)
    head = ["keys/values"]
    for window in windows:
        head += [f"{window} tokens, plain", "rotated", "ratio"]
    return markdown(head, body)


def _nats(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['kld_mean_nats']:.5f} ± {row['kld_mean_nats_stderr']:.5f}"


def _ratio(plain: Row, rotated: Row | None) -> str:
    return "" if rotated is None else f"{rotated['kld_mean_nats'] / plain['kld_mean_nats']:.2f}"
