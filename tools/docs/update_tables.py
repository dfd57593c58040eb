"""Write the tables of README.md and docs/ from the code and from results/.

    python tools/docs/update_tables.py          # writes them
    python tools/docs/update_tables.py --check  # exit code 1 if a file is stale

A table follows its marker; measurements come from `tools/measure/formats.py`,
`tools/measure/engine.py` and sweeps (`tools/measure/publish_sweep.py`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools" / name) for name in ("docs", "measure")]  # for the tests

from board_table import board_table  # noqa: E402
from device_budgets import budgets  # noqa: E402
from experiment_tables import TABLES as EXPERIMENTS  # noqa: E402
from experiment_tables import figure  # noqa: E402
from gain_tables import drift, gain, pretrained  # noqa: E402
from gemv_table import gemv  # noqa: E402
from kv_cache_tables import kv_cache, kv_cache_figure, kv_rotation  # noqa: E402
from launch_table import launches  # noqa: E402
from memory_tables import TABLES as MEMORY  # noqa: E402
from published_rows import latest  # noqa: E402
from reproduce_tables import published_tables, recorded_runs  # noqa: E402
from server_tables import TABLES as SERVER  # noqa: E402
from state_bits_table import state_bits, weight_kind_bits  # noqa: E402

RESULTS = ROOT / "results" / "formats"
ENGINE = ROOT / "results" / "engine" / "intel-xeon-2-cores" / "rows.jsonl"
ENGINE_ZEN4 = ROOT / "results" / "engine" / "amd-epyc-zen4-2-cores" / "rows.jsonl"

EXCERPT = ("q8_0", "q6_k", "q4_k", "iq4_xs", "q3h_b64t1", "q3_k")
"""Formats that the README shows."""
EXCERPT_COLUMNS = (0, 4, 6, 7, 10, 11, 13)


@cache
def measured() -> dict[str, Any]:
    """Return the committed measurements."""
    files = sorted(RESULTS.glob("*/formats.json"))
    if not files:
        raise SystemExit("no results/formats/*/formats.json: run python tools/measure/formats.py")
    report = json.loads(files[0].read_text(encoding="utf-8"))
    return {"folder": files[0].parent.name, **report}


def ops_table() -> str:
    """Return the table of op families and their variants."""
    from nbflow_kernels.op_registry import FAMILIES, NO_CUDA, NUMPY_ON_CPU

    lines = ["| family | functions | reference | CPU | CUDA |", "|---|---|---|---|---|"]
    for family, names in FAMILIES.items():
        functions = ", ".join(f"`{name}`" for name in names)
        in_numpy = [f"`{name}`" for name in names if name in NUMPY_ON_CPU]
        compiled = any(name not in NUMPY_ON_CPU and name not in NO_CUDA for name in names)
        cpu = "; ".join(["Numba"] * compiled + [f"NumPy: {', '.join(in_numpy)}"] * bool(in_numpy))
        lines.append(f"| `{family}` | {functions} | NumPy float64 | {cpu} | yes |")
    return "\n".join(lines)


def cuda_table() -> str:
    """Return the table of the ops' CUDA variants."""
    from nbflow_kernels.op_registry import FAMILIES, NO_CUDA

    lines = ["| family | on a CUDA device | not, and why |", "|---|---|---|"]
    for family, names in FAMILIES.items():
        reasons: dict[str, list[str]] = {}
        for name in names:
            reasons.setdefault(NO_CUDA.get(name, ""), []).append(f"`{name}`")
        there = ", ".join(reasons.pop("", []))
        missing = "; ".join(f"{', '.join(ops)}: {why}" for why, ops in reasons.items())
        lines.append(f"| `{family}` | {there} | {missing} |")
    return "\n".join(lines)


def formats_excerpt() -> str:
    """Return some rows and columns of the table of formats."""
    from nbflow_kernels.testing.format_table import table

    lines = [
        line.strip("|").split("|") for line in table(measured()["formats"], EXCERPT).split("\n")
    ]
    return "\n".join("|" + "|".join(line[i] for i in EXCERPT_COLUMNS) + "|" for line in lines)


def formats_table() -> str:
    """Return the table of all formats."""
    from nbflow_kernels.testing.format_table import table

    return table(measured()["formats"])


def measured_where() -> str:
    """Return the table of measurement conditions."""
    report = measured()
    n_rows, n_columns = report["shape"]
    day = report.get("products", report)["measured"][:10]
    return (
        f"| measured | on | threads | read bandwidth | matrix |\n|---|---|---:|---:|---|\n"
        f"| {day} | {report['processor']} | {report['threads']} "
        f"| {report['read_bandwidth_gb_per_s']:.1f} GB/s | {n_rows} x {n_columns} |"
    )


def speeds_table() -> str:
    """Return the table of quantization and dequantization speed by format."""
    keys = ("quantize_reference", "quantize_search", "dequantize")
    lines = ["| format | quantize, reference | search | dequantize |", "|---|---:|---:|---:|"]
    for name, row in measured()["formats"].items():
        cells = [f"{row[f'{key}_mweights_per_s']:,.3g}" for key in keys]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bytes_table() -> str:
    """Return the bytes of a block of every format that a table of fields describes in full."""
    from nbflow_kernels import FORMATS
    from nbflow_kernels.formats.bit_fields import byte_rows
    from nbflow_kernels.formats.block_format import FieldFormat
    from nbflow_kernels.formats.ggml.iq_grids import GridFormat
    from nbflow_kernels.formats.trellis import TrellisFormat

    names: dict[str, list[str]] = {}
    for name, known in FORMATS.built_in.items():
        coded = isinstance(known, GridFormat | TrellisFormat)
        described = isinstance(known, FieldFormat) and not coded
        if described and name != "tq1_0":  # base-3 digits
            rows = [f"| {at} | {n} | {text} |" for at, n, text in byte_rows(known.fields)]
            names.setdefault("\n".join(rows), []).append(f"`{name}`")
    lines = ["| format | offset | bytes | field |", "|---|---:|---:|---|"]
    for rows, same in names.items():
        first, *rest = rows.split("\n")
        lines += [f"| {', '.join(same)} {first}", *(f"| {row}" for row in rest)]
    return "\n".join(lines)


def engine_rows() -> list[dict[str, Any]]:
    """Return the newest committed row of each test of the engine."""
    return latest(ENGINE, "run", "test", "batch")


def engine_excerpt() -> str:
    """Return the speed of 1.1B models relative to llama.cpp, one sequence, its arithmetic."""
    lines = [
        "| weights | activations | prompt of 512 | generation of 32 | share of read bandwidth |",
        "|---|---|---:|---:|---:|",
    ]
    for name in ("q8_0", "q6_k", "q4_k", "q4_0", "f16"):
        activations = "f32" if name == "f16" else "int8"
        rows = {
            row["test"]: row
            for row in engine_rows()
            if row["model"] == f"1.1b-{name}" and row["activations"] == activations
            and row["batch"] == 1 and row["weights"] == "as stored"
        }  # fmt: skip
        ratios = [
            f"{rows[test]['times_peer']:.2f}x ± {rows[test]['times_peer_spread']:.2f}"
            for test in ("pp512", "tg32")
        ]
        share = f"{rows['tg32']['read_share']:.0%}"
        lines.append(f"| `{name}` | {activations} | {' | '.join(ratios)} | {share} |")
    return "\n".join(lines)


def engine_peers() -> str:
    """Return the engine's rows of models that llama.cpp reads."""
    return engine_table([row for row in engine_rows() if row["weights"] == "as stored"])


def engine_own() -> str:
    """Return the speed of 1.1B models in formats that llama.cpp does not have."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in engine_rows():
        if row["weights"] != "as stored":
            found.setdefault(row["weights"], {})[row["test"]] = row
    lines = ["| format | pp512 | tg32 | share of read |", "|---|---:|---:|---:|"]
    for name, rows in found.items():
        rates = [f"{rows[test]['tokens_per_s']:,.1f}" for test in ("pp512", "tg32")]
        lines.append(f"| {name} | {' | '.join(rates)} | {rows['tg32']['read_share']:.0%} |")
    return "\n".join(lines)


def engine_table(rows: list[dict[str, Any]]) -> str:
    """Return the engine's rows next to llama.cpp's."""
    lines = [
        "| model | arithmetic | batch | test | tokens/s | llama.cpp | ratio | share of read |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        name = row["model"] if row["weights"] == "as stored" else f"1.1b-{row['weights']}"
        name += f", {row['kv']} cache" if row["kv"] != "f16" else ""
        name += f", {row['state']} states" if row.get("state", "f32") != "f32" else ""
        name += ", one thread" if row["threads_per_rank"] == 1 else ""
        peer = ratio = share = ""
        if "peer" in row:
            peer = f"{row['peer_tokens_per_s']:,.1f}"
            ratio = f"{row['times_peer']:.2f} ± {row['times_peer_spread']:.2f}"
        if row["read_share"] is not None and row["batch"] == 1:
            share = f"{row['read_share']:.0%}" if row["read_share"] < 1.2 else "in the cache"
        lines.append(
            f"| {name} | {row['activations']} | {row['batch']} | {row['test']} "
            f"| {row['tokens_per_s']:,.1f} | {peer} | {ratio} | {share} |"
        )
    return "\n".join(lines)


def engine_table_zen4() -> str:
    """Return the engine's rows on a Zen 4, by model."""
    rows = latest(ENGINE_ZEN4, "run", "test", "batch")
    return engine_table(sorted(rows, key=lambda row: row["model"]))


def support_table() -> str:
    """Return the table of formats and operations."""
    from nbflow_kernels.testing.format_support import support_table as make

    return make()


def tolerances_table() -> str:
    """Return ops by the reason for their largest tolerance, with that and their cases."""
    from nbflow_kernels.op_registry import all_cases

    by_op: dict[str, list[Any]] = {}
    for case in all_cases():
        by_op.setdefault(case.op, []).append(case)
    by_reason: dict[str, list[tuple[str, Any]]] = {}
    for op, cases in by_op.items():
        rounded = [case for case in cases if not case.exact]
        largest = max(rounded or cases, key=_limits)
        by_reason.setdefault(largest.reason, []).append((op, largest))
    lines = [
        "| ops | cases | exact | largest rtol | atol | reason |",
        "|---|---:|---:|---|---|---|",
    ]
    for reason, found in by_reason.items():
        cases = [case for op, _ in found for case in by_op[op]]
        largest = max((case for _, case in found), key=_limits)
        limits = " | " if largest.exact else f"{largest.rtol:.1e} | {largest.atol:.1e}"
        ops, n_exact = ", ".join(f"`{op}`" for op, _ in found), sum(case.exact for case in cases)
        reason = reason.replace("|", "\\|")
        lines.append(f"| {ops} | {len(cases)} | {n_exact} | {limits} | {reason} |")
    return "\n".join(lines)


def _limits(case: Any) -> tuple[float, float]:
    return case.rtol, case.atol


def columns_table() -> str:
    """Return the columns of points.csv."""
    from nbflow_experiments.columns import points_table

    return points_table()


def result_columns_table() -> str:
    """Return the columns of results.csv."""
    from nbflow_experiments.columns import results_table

    return results_table()


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"formats": formats_excerpt, "engine excerpt": engine_excerpt},
    "docs/server.md": SERVER,
    "docs/performance.md": {
        "engine": engine_peers,
        "engine, own formats": engine_own,
        "engine, Zen 4": engine_table_zen4,
        "gemv": gemv,
    },
    "docs/formats.md": {
        "where": measured_where,
        "formats": formats_table,
        "speeds": speeds_table,
        "bytes": bytes_table,
    },
    "docs/columns.md": {"columns": columns_table, "result columns": result_columns_table},
    "docs/cuda.md": {"budgets": budgets, "launches": launches},
    "docs/memory.md": MEMORY,
    "docs/ops.md": {
        "ops": ops_table,
        "support": support_table,
        "cuda": cuda_table,
    },
    "docs/tolerances.md": {"tolerances": tolerances_table},
    "docs/experiments.md": EXPERIMENTS,
    "docs/quantization.md": {"gain": gain, "gain, encoder": drift, "pretrained": pretrained},
    "docs/board.md": {"board": board_table},
    "docs/reproduce.md": {"published": published_tables, "runs": recorded_runs},
    "docs/kvcache.md": {
        "kv_rotation": kv_rotation,
        "kv_cache": kv_cache,
        "kv_cache, figure": kv_cache_figure,
    },
    "docs/state_formats.md": {
        "state_bits": state_bits,
        "weight kinds": weight_kind_bits,
        "state_bits figure": partial(
            figure, "state_bits", "kinds", "Divergence against bits, by kind of numbers"
        ),
    },
}
"""File -> its markers and their generated content."""


def updated(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """Return a file's text with regenerated tables."""
    for name, make in tables.items():
        marker = f"<!-- {name}: written by tools/docs/update_tables.py -->\n"
        pattern = re.escape(marker) + r"(?:(?:\||\[\^|!\[).*\n)*"
        if not re.search(pattern, text):
            raise SystemExit(f"the marker of the table {name!r} is missing")
        table = f"{marker}{make()}\n"
        text = re.sub(pattern, lambda _, table=table: table, text)
    return text


def main() -> None:
    stale = []
    for name, tables in TABLES.items():
        file = ROOT / name
        before = file.read_text(encoding="utf-8")
        after = updated(before, tables)
        if before != after:
            stale.append(name)
            if "--check" not in sys.argv:
                file.write_text(after, encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit(f"run python tools/docs/update_tables.py: {', '.join(stale)}" if stale else 0)


if __name__ == "__main__":
    main()
