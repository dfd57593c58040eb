"""Tables of docs/kvcache.md: divergence of the bundled model by the formats of its cache."""

from __future__ import annotations

from experiment_tables import figure, markdown, of_rows

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


FEW_BITS = ("none", "post_rope"), ("hadamard", "post_rope"), ("none", "pre_rope")
"""Rotation and form of the keys, one column each."""


def kv_cache() -> str:
    """Return divergences of caches of few bits by context, and with quantized weights."""
    return of_rows("kv_cache", _few_bits)


def kv_cache_figure() -> str:
    """Return the figure of divergence against bits."""
    return figure("kv_cache", "kv_bits", "Divergence against stored bits per value")


def _few_bits(rows: list[Row]) -> str:
    windows = sorted({int(row["eval_window"]) for row in rows})
    names = ("weights", "eval_window", "kv", "kv_rotation", "kv_keys")
    found = {tuple(row[name] for name in names): row for row in rows}
    quantized = next((row["weights"] for row in rows if row["weights"] != WEIGHTS), None)
    body = []
    for kv in dict.fromkeys(row["kv"] for row in rows):
        cells = [
            f"`{kv}`",
            *(_nats(found.get((WEIGHTS, windows[0], kv, *how))) for how in FEW_BITS[:2]),
        ]
        cells += [_nats(found.get((WEIGHTS, windows[-1], kv, *how))) for how in FEW_BITS]
        how = FEW_BITS[0] if kv == "f16" else FEW_BITS[1]
        both = found.get((quantized, windows[-1], kv, *how))
        parts = [
            found.get(key)
            for key in (
                (quantized, windows[-1], "f16", *FEW_BITS[0]),
                (WEIGHTS, windows[-1], kv, *how),
            )
        ]
        total = sum(row["kld_mean_nats"] for row in parts if row is not None)
        if quantized is not None:
            cells += [_nats(both), f"{total:.5f}" if both is not None and None not in parts else ""]
        body.append(cells)
    first, last = windows[0], windows[-1]
    head = [
        "keys/values", f"{first} tokens, plain", "rotated", f"{last} tokens, plain", "rotated",
        "before RoPE",
    ]  # fmt: skip
    if quantized is not None:
        head += [f"{quantized} weights, {last}, rotated", "sum of both alone"]
    return markdown(head, body)
