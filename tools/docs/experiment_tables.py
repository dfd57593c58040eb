"""Tables and figures of docs/experiments.md, from results/<sweep>/<machine>/points.csv.

`tools/docs/update_tables.py` inserts them after their markers.  A sweep without results gets a line
that says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nbflow_experiments.export.markup_tables import number
from nbflow_experiments.store.results_reader import Row, read_points

RESULTS = Path(__file__).resolve().parents[2] / "results"
MISSING = "| not measured in this checkout; the command is above |\n| --- |"


def folder_of(sweep: str) -> Path | None:
    """Return the newest results folder of a sweep, None without results."""
    return max(
        (p.parent for p in (RESULTS / sweep).glob("*/points.csv")), key=_started, default=None
    )


def _started(folder: Path) -> str:
    """Return when the last launch of a results folder began."""
    path = folder / "provenance.json"
    launches = json.loads(path.read_text(encoding="utf-8"))["launches"] if path.is_file() else []
    return str(launches[-1]["started"]) if launches else ""


def of_rows(sweep: str, table: Callable[[list[Row]], str]) -> str:
    """Return the table of the points of a sweep that succeeded."""
    folder = folder_of(sweep)
    rows = [r for r in read_points(folder)[1] if r["status"] == "done"] if folder else []
    return table(rows) if rows else MISSING


def figure(sweep: str, name: str, title: str) -> str:
    """Return a figure of a sweep as Markdown."""
    folder = folder_of(sweep)
    if folder is None or not (folder / "figures" / f"{name}.png").is_file():
        return MISSING
    path = (folder / "figures" / f"{name}.png").relative_to(RESULTS.parent).as_posix()
    return f"![{title}](../{path})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are right-aligned."""
    lines = [list(head), ["---"] + ["---:"] * (len(head) - 1), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def quantization(rows: list[Row]) -> str:
    """Return the table of errors by format: Inferflow's quantizer and ours."""
    errors = gaussian_errors()
    body = []
    rows.sort(key=lambda row: -row["bits_per_weight"])
    for name in dict.fromkeys(row["weights"] for row in rows):
        best, plain = (_only(rows, weights=name, quantizer=e) for e in ("search", "reference"))
        body.append([
            f"`{name}`", number(best["bits_per_weight"]),
            *(number(error) for error in errors.get(name, (None, None))),
            *(number(row.get("weight_error_relative")) for row in (plain, best)),
            *(_nats(row.get("kld_mean_nats")) for row in (plain, best)),
            f"{best['perplexity']:.3f} ± {best['perplexity_stderr']:.3f}",
            f"{100 * best['top1_agreement_share']:.1f}",
        ])  # fmt: skip
    head = (
        "format", "bits/weight", "error on N(0, 0.02), Inferflow", "ours",
        "error on the model, Inferflow", "ours", "KL divergence (nat), Inferflow", "ours",
        "perplexity, ours", "same top token (%)",
    )  # fmt: skip
    return markdown(head, body)


def gaussian_errors() -> dict[str, tuple[float, float]]:
    """Return the recorded errors of the reference and the search quantizer on Gaussian weights."""
    files = sorted((RESULTS / "formats").glob("*/formats.json"))
    formats = json.loads(files[0].read_text(encoding="utf-8"))["formats"] if files else {}
    return {
        name: (row["error_reference"], row["error_search"])
        for name, row in formats.items()
        if row["bits_per_weight"] < 16
    }


def throughput(rows: list[Row]) -> str:
    """Return the table of decoding speeds: weights by cache and batch."""
    columns = list(dict.fromkeys((row["kv"], row["batch"]) for row in rows))
    head = ["weights", *(f"{kv}, {batch}" for kv, batch in columns)]
    return _pivot(rows, head, columns, ("kv", "batch"), "decode_tokens_per_s")


def partitions(rows: list[Row]) -> str:
    """Return the table of partitions: speed by batch, bytes sent, and what was predicted."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    predicted = "predicted_decode_tokens_per_s" in rows[0]
    head = ["partition", "ranks"]
    for batch in batches:
        head += [f"prefill, batch {batch}", f"decode, batch {batch}"]
        head += ["predicted decode"] if predicted else []
    head += ["sent (kB/token)", "predicted"]
    body = []
    for name in dict.fromkeys(row["partition"] for row in rows):
        found = {row["batch"]: row for row in rows if row["partition"] == name}
        first = next(iter(found.values()))
        cells = [f"`{name}`", str(first["ranks"])]
        for batch in batches:
            row = found.get(batch, {})
            names = ["prefill_tokens_per_s", "decode_tokens_per_s"]
            names += ["predicted_decode_tokens_per_s"] if predicted else []
            cells += [_rate(row.get(name)) for name in names]
        tokens = first["batch"] * (first["prompt"] + first["decode"])
        cells += [
            number(first["traffic_bytes_per_token"] / 1e3),
            number(first["traffic_predicted_bytes"] / tokens / 1e3),
        ]
        body.append(cells)
    return markdown(head, body)


def batching(rows: list[Row]) -> str:
    """Return the table of continuous batching."""
    formats = list(dict.fromkeys(row["weights"] for row in rows))
    head = ["requests"]
    for name in formats:
        head += [
            f"{name}: together (token/s)",
            "one by one",
            "ratio",
            "first token (ms)",
            "one by one",
        ]
    body = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        cells = [str(batch)]
        for name in formats:
            row = _only(rows, weights=name, batch=batch)
            cells += [_rate(row.get(f"{k}_tokens_per_s")) for k in ("batching", "sequential")]
            cells += [_ratio(row.get("batching_speedup"))]
            cells += [_ms(row.get(f"{k}_ttft_s")) for k in ("batching", "sequential")]
        body.append(cells)
    return markdown(head, body)


def shared_prefix(rows: list[Row]) -> str:
    """Return the table of shared prefixes."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    head = ["shared tokens"]
    for batch in batches:
        head += [f"{batch}: cold (ms)", "together", "warm", "cold / warm"]
    body = []
    for prefix in dict.fromkeys(row["prefix"] for row in rows):
        cells = [str(prefix)]
        for batch in batches:
            row = _only(rows, prefix=prefix, batch=batch)
            kinds = ("prefix_cold_ttft_s", "prefix_together_ttft_s", "prefix_ttft_s")
            cells += [_ms(row.get(kind)) for kind in kinds]
            cells += [_ratio(row.get("prefix_ttft_speedup"))]
        body.append(cells)
    return markdown(head, body)


def cascade(rows: list[Row]) -> str:
    """Return the table of cascade attention: a row for each shape, fewest and most sequences."""
    found = {row["batch"] for row in rows}
    batches = (min(found), max(found))
    names = ("heads", "kv", "shared_keys", "own_keys")
    head = ["heads", "cache", "shared keys", "own keys"]
    for batch in batches:
        head += [f"{batch}: separate (us)", "one item", "two levels", "bytes"]
    body = []
    for shape in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        cells = list(map(str, shape))
        for batch in batches:
            row = _only(rows, batch=batch, **dict(zip(names, shape, strict=True)))
            cells.append(_rate(1e6 * row["cascade_flat_s"]) if row else "")
            metrics = ("cascade_shared_speedup", "cascade_levels_speedup", "cascade_byte_ratio")
            cells += [_ratio(row.get(metric)) for metric in metrics]
        body.append(cells)
    return markdown(head, body)


def speculation(rows: list[Row]) -> str:
    """Return the table of speculative decoding."""
    head = (
        "draft", "draft tokens", "sequences", "accepted (%)", "tokens per verification",
        "no draft (token/s)", "with draft", "speed-up", "same text",
    )  # fmt: skip
    body = [
        [
            f"`{row['draft']}`", str(row["n_draft"]), str(row["batch"]),
            number(_percent(row["speculation_accepted_share"])),
            _ratio(row["speculation_tokens_per_step"]), _rate(row["plain_tokens_per_s"]),
            _rate(row["speculation_tokens_per_s"]), _ratio(row["speculation_speedup"]),
            f"{100 * row['speculation_same_share']:.0f} %",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown(head, body)


def _pivot(
    rows: Sequence[Row],
    head: Sequence[str],
    columns: Sequence[tuple[Any, ...]],
    names: Sequence[str],
    metric: str,
) -> str:
    """Return a table of one metric: weight formats by combinations of other settings."""
    body = []
    for weights in dict.fromkeys(row["weights"] for row in rows):
        found = [
            _only(rows, weights=weights, **dict(zip(names, values, strict=True)))
            for values in columns
        ]
        body.append([f"`{weights}`", *(_rate(row.get(metric)) for row in found)])
    return markdown(head, body)


def _only(rows: Sequence[Row], **settings: Any) -> Row:
    """Return the row with these settings; empty if that point failed."""
    return next((r for r in rows if all(r[k] == v for k, v in settings.items())), {})


def _nats(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{1e3 * value:.1f}"


def _tables() -> dict[str, Callable[[], str]]:
    made: dict[str, Callable[[], str]] = {}
    for sweep, table, name, title in (
        ("quantization", quantization, "quality", "Bits per weight against error"),
        ("throughput", throughput, "throughput", "Batch size against throughput"),
        ("partitions", partitions, "partitions", "Partitions against speed"),
        ("batching", batching, "batching", "Dynamic batching"),
        ("shared_prefix", shared_prefix, "shared_prefix", "Shared prefixes"),
        ("cascade", cascade, "cascade", "Cascade attention"),
        ("speculation", speculation, "speculation", "Speculative decoding"),
    ):
        made[sweep] = partial(of_rows, sweep, table)
        made[f"{sweep} figure"] = partial(figure, sweep, name, title)
    return made


TABLES = _tables()
"""Markers of docs/experiments.md and their generated content."""
