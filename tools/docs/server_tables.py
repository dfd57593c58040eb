"""Tables of docs/server.md: nbflow's server next to llama.cpp's, from results/server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from published_rows import latest

ROWS = Path(__file__).resolve().parents[2] / "results/server/amd-epyc-zen4-2-cores/rows.jsonl"
MODELS = {
    "tiny_python-q4_0": "bundled, 3.7M",
    "15m-q4_0": "15M",
    "110m-q4_0": "110M",
    "1.1b-q4_0": "1.1B",
}


def _tests() -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Return the newest rows of each model and test, by server."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in latest(ROWS, "model", "test", "server"):
        found.setdefault((row["model"], row["test"]), {})[row["server"]] = row
    order = list(MODELS)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0][0])))


def throughput() -> str:
    """Return generated tokens per second by model and number of clients."""
    lines = [
        "| model | clients | nbflow | llama-server | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for (model, test), servers in _tests().items():
        if test.startswith("c"):
            ours, theirs = (servers[s]["tokens_per_s"] for s in ("nbflow", "llama.cpp"))
            lines.append(
                f"| {MODELS[model]} | {test[1:]} | {ours:,.0f} | {theirs:,.0f} "
                f"| {ours / theirs:.2f} |"
            )
    return "\n".join(lines)


def first_tokens() -> str:
    """Return the median milliseconds to the first token."""
    lines = [
        "| model | clients | prompt | nbflow | llama-server |",
        "|---|---:|---|---:|---:|",
    ]
    for (model, test), servers in _tests().items():
        kind, _, length = test.partition(" ")
        if kind.startswith("c"):
            cases = {"first_token_s_p50": (test[1:], "64 new tokens")}
        elif kind == "prefix":
            cases = {
                "first_token_s_new": ("1", f"{length} new tokens"),
                "first_token_s_seen": ("1", f"{length} tokens, seen before"),
            }
        else:
            continue
        for column, (clients, prompt) in cases.items():
            ours, theirs = (1e3 * servers[s][column] for s in ("nbflow", "llama.cpp"))
            lines.append(
                f"| {MODELS[model]} | {clients} | {prompt} | {ours:,.1f} | {theirs:,.1f} |"
            )
    return "\n".join(lines)


def overhead() -> str:
    """Return what requests cost besides the model: steps sleep as long as the model's take."""
    lines = [
        "| model | clients | step | engine, CPU per token | engine and HTTP | share of the steps |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for (model, test), servers in _tests().items():
        if test.startswith("overhead"):
            engine, http = servers["engine"], servers["http"]
            lines.append(
                f"| {MODELS[model]} | {test.rpartition('c')[2]} | {1e3 * http['step_s']:.2f} ms "
                f"| {engine['processor_us_per_token']:,.0f} us "
                f"| {http['processor_us_per_token']:,.0f} us | {http['percent_of_steps']:.1f} % |"
            )
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "server throughput": throughput,
    "server first token": first_tokens,
    "server overhead": overhead,
}
"""Tables of docs/server.md by their markers."""
