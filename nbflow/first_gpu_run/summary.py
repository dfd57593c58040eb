"""A run's results as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nbflow.first_gpu_run.journal import Journal
from nbflow.first_gpu_run.sections import Section

_SHOWN = 160  # characters of an error
_MOST_ERRORS = 12  # of a section


def text(journal: Journal, sections: Sequence[Section]) -> str:
    """Return a line per section with its numbers, and its errors below."""
    lines = []
    for section in sections:
        rows = journal.sections.get(section.name, [])
        end = journal.ends.get(section.name, {"status": "not run"})
        status = f"{section.name:<18} {end['status']:<8} {end.get('seconds', 0):6.0f} s"
        if end.get("reason"):
            status += f"  {str(end['reason'])[:_SHOWN]}"
        lines.append(status.rstrip())
        lines += [f"    {line}" for line in _numbers(rows)]
        errors = [line for row in rows for line in errors_of(row)]
        lines += [f"    ! {line[:_SHOWN]}" for line in errors[:_MOST_ERRORS]]
        if len(errors) > _MOST_ERRORS:
            lines.append(f"    ! and {len(errors) - _MOST_ERRORS} more")
    return "\n".join(lines) + "\n"


def errors_of(row: dict[str, Any]) -> Iterable[str]:
    """Yield the errors of a result."""
    inner = row.get("benchmark", {})
    for found, name in (
        (row, row.get("fact") or row.get("kernel") or row.get("probe") or row.get("test", "")),
        (inner, f"{inner.get('op')}-{inner.get('case')}"),
    ):
        if found.get("error"):
            case = f" {row['case']}" if "tool" in row else ""
            yield f"{row.get('tool') or name}{case}: {found['error']}".replace("\n", " ")


def _numbers(rows: list[dict[str, Any]]) -> Iterable[str]:
    """Yield lines about the results of a section."""
    tests = [row["tests"] for row in rows if "tests" in row]
    if tests:
        yield ", ".join(f"{n} {outcome}" for outcome, n in tests[-1].items()) or "no tests"
    tools = [row for row in rows if "tool" in row]
    if tools:
        clean = sum(row.get("errors") == 0 for row in tools)
        yield f"{clean} of {len(tools)} runs without an error"
    for row in rows:
        line = _number(row)
        if line:
            yield line


def _number(row: dict[str, Any]) -> str:
    """Return a line about a result; empty if it says nothing by itself."""
    if "limits" in row:
        return _limits(row["limits"])
    if row.get("benchmark", {}).get("median_s"):
        return _benchmark(row["benchmark"])
    if "tokens_per_s" in row:
        share = row.get("copy_share")
        part = "" if share is None else f", {share:.0%} of the copy bandwidth"
        graphs = f"{row['steps_by_graph']} steps as graphs, {row['steps_by_kernel']} not"
        return f"{row['test']} x {row['batch']}: {row['tokens_per_s']:.1f} tokens/s{part}, {graphs}"
    if "counted_bytes" in row:
        return (
            f"memory: {row['vram_bytes'] / 1e6:.0f} MB on the device, "
            f"{row['counted_bytes'] / 1e6:.0f} counted ({row['counted_share']:.0%})"
        )
    if row.get("probe") == "alignment":
        return (
            f"tensor cores: F {row['fraction_bits']}, L {row['terms_at_once']}, exponent of a "
            f"subnormal operand {row['subnormal_exponent']}"
        )
    if "why" in row:
        return str(row["why"])[:_SHOWN]
    if row.get("fact") == "detect":
        return str(row["reason"] or row["limitation"] or f"{row['devices']} devices")
    return ""


def _limits(limits: dict[str, Any]) -> str:
    copy, rate = limits.get("copy_bytes_per_s"), limits.get("matmul_f16_flop_per_s")
    noise = limits.get("copy_noise_percent") or 0.0
    found = f"copy {copy / 1e12:.2f} TB/s +- {noise:.1f} %" if copy else "no copy bandwidth"
    return f"{found}, cuBLAS {rate / 1e12:.0f} TFLOP/s" if rate else found


def _benchmark(row: dict[str, Any]) -> str:
    percent = "" if row["copy_percent"] is None else f" ({row['copy_percent']:.0f} % of copy)"
    peers = "".join(
        f", {name} x {s / row['median_s']:.2f}" for name, s in row["peers"].items()
        if isinstance(s, float)
    )  # fmt: skip
    return (
        f"{row['op']}-{row['case']}: {1e6 * row['median_s']:.1f} us +- "
        f"{row['noise_percent'] or 0.0:.0f} %, {row['gb_per_s']:.0f} GB/s{percent}{peers}"
    )
