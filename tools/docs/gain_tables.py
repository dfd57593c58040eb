"""Tables of docs/quantization.md: the gain of quantized weights, and a pretrained encoder."""

from __future__ import annotations

from experiment_tables import RESULTS, folder_of, markdown, of_rows
from published_rows import latest

from nbflow_experiments.export.markup_tables import number
from nbflow_experiments.store.results_reader import Row

QUANTIZERS = ("reference", "search", "unbiased")


def gain() -> str:
    """Return the divergences of the bundled model by format, quantizer and importance."""
    return of_rows("gain", _divergences)


def _divergences(rows: list[Row]) -> str:
    found = {(r["weights"], r["quantizer"], bool(r["importance"])): r for r in rows}
    body = []
    for name in dict.fromkeys(row["weights"] for row in rows):
        bits = next(r["bits_per_weight"] for r in rows if r["weights"] == name)
        cells = [found.get((name, q, known)) for known in (False, True) for q in QUANTIZERS]
        body.append([f"`{name}`", number(bits), *map(_nats, cells)])
    head = ["format", "bits/weight", *QUANTIZERS, *(f"{q}, inputs known" for q in QUANTIZERS)]
    return markdown(head, body)


def _nats(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['kld_mean_nats']:.4f} ± {row['kld_mean_nats_stderr']:.4f}"


def drift() -> str:
    """Return how far embeddings of a pretrained encoder move, by format and quantizer."""
    folder = folder_of("gain")
    file = (folder or RESULTS / "gain") / "embedding_drift.jsonl"
    rows = latest(file, "weights", "quantizer")
    found = {(r["weights"], r["quantizer"]): r for r in rows}
    body = [
        [f"`{name}`", *(f"{found[name, q]['drift']:.4f}" for q in QUANTIZERS)]
        for name in dict.fromkeys(row["weights"] for row in rows)
    ]
    return markdown(["format", *QUANTIZERS], body)


def pretrained() -> str:
    """Return drift and retrieval agreement of a pretrained encoder in every format."""
    file = max((RESULTS / "pretrained").glob("*/minilm.jsonl"))
    rows = latest(file, "weights", "quantizer")
    found = {(r["weights"], r["quantizer"]): r for r in rows}
    body = []
    for name in dict.fromkeys(row["weights"] for row in rows):
        plain, best = (found[name, quantizer] for quantizer in QUANTIZERS[:2])
        body.append([
            f"`{name}`", number(best["bits_per_weight"]), f"{plain['drift']:.4f}",
            f"{best['drift']:.4f} ± {best['drift_stderr']:.4f}",
            f"{100 * best['top1_share']:.0f} ± {100 * best['top1_share_stderr']:.0f}",
            f"{100 * best['top10_share']:.1f} ± {100 * best['top10_share_stderr']:.1f}",
        ])  # fmt: skip
    head = ["format", "bits/weight", "drift, reference", "drift, search", "same nearest (%)",
            "ten nearest kept (%)"]  # fmt: skip
    return markdown(head, body)
