"""`nbflow compare-files REF A B ...`: checkpoints of one model against one float32 reference.

REF is the model without quantization; A, B, ... are checkpoints of it in any format that is read
(GGUF, GPTQ, AWQ, bitsandbytes, compressed-tensors, nbflow's own).  All score the tokens that REF's
tokenizer makes of the text.  Example::

    nbflow compare-files MODEL model-Q4_K_M.gguf model-gptq/ model-awq/ --text wiki.txt --out files
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from nbflow.cli.options import add_plugins_argument
from nbflow.utils.atomic_write import replace_atomically
from nbflow_experiments import backend
from nbflow_experiments.commands.perplexity import add_text_arguments
from nbflow_experiments.compare.checkpoint_files import (
    Row,
    label,
    measure_files,
    write_reference,
)
from nbflow_experiments.compare.files_figure import draw
from nbflow_experiments.scoring.estimates import Estimate, estimate_mean
from nbflow_experiments.scoring.windows import Window, cut
from nbflow_experiments.store.json_files import plain
from nbflow_experiments.terminal_table import print_table
from nbflow_kernels.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("reference", metavar="REF", help="the model in floats, as for nbflow run")
    parser.add_argument("files", nargs="+", metavar="FILE", help="checkpoints to compare with it")
    add_text_arguments(parser)
    add_plugins_argument(parser)
    parser.add_argument(
        "--activations", choices=("f32", "bf16", "int8"), default="f32", help="of the files (f32)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads (all cores)")
    parser.add_argument(
        "--out", metavar="DIR", help="write files.csv, files.json and the figure into a folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    windows = _windows(arguments)
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix="reference-") as folder:
        path = Path(folder) / "logits.h5"
        first, scores = write_reference(path, arguments.reference, windows, arguments.threads)
        rows, floor = [first], estimate_mean(scores.divergence)
        how = arguments.activations, arguments.threads, arguments.plugins
        rows += measure_files(arguments.files, windows, path, *how)
    n_tokens = int(scores.divergence.size)
    if out is not None:
        _write(out, rows, floor, n_tokens)
    if arguments.json:
        print(json.dumps(plain(_facts(rows, floor, n_tokens)), indent=1))
    else:
        _print(rows, floor, n_tokens)
        if out is not None:
            print(f"\n{out}")
    return 0 if all(row.status == "done" for row in rows) else 1


def _windows(arguments: argparse.Namespace) -> list[Window]:
    """Return the windows of the text, in the reference's tokens."""
    if arguments.windows < 0:
        raise UsageError(f"--windows must not be negative, got {arguments.windows}")
    path = backend.text_file(arguments.reference, arguments.text)
    ids, bos = backend.tokenize(arguments.reference, path)
    return cut(ids, arguments.context, 0, "second-half", bos)[: arguments.windows or None]


def _facts(rows: Sequence[Row], floor: Estimate, n_tokens: int) -> dict[str, object]:
    return {
        "scored_tokens": n_tokens,
        "noise_floor_kld_mean": floor.mean,
        "noise_floor_kld_mean_stderr": floor.stderr,
        "files": [row.as_json() for row in rows],
    }


def _write(out: Path, rows: Sequence[Row], floor: Estimate, n_tokens: int) -> None:
    """Write the table and the figure."""
    with replace_atomically(out / "files.csv") as path, path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(row.as_json() for row in rows)
    with replace_atomically(out / "files.json") as path:
        text = json.dumps(plain(_facts(rows, floor, n_tokens)), indent=1)
        path.write_text(text + "\n", encoding="utf-8")
    draw(rows[1:], floor, label(rows[0].file), n_tokens).save(
        out, "files", f"{label(rows[0].file)} in float32 is the reference; {n_tokens:,} tokens"
    )


def _print(rows: Sequence[Row], floor: Estimate, n_tokens: int) -> None:
    head = (
        "file", "formats", "bits", "MB", "KLD", "+- 95 %", "PPL", "same top %", "prefill tok/s",
        "decode tok/s", "peak MB",
    )  # fmt: skip
    cells = []
    for row in rows:
        error = None if row.kld_mean_stderr is None else 1.96 * row.kld_mean_stderr
        numbers = (
            _number(row.bits_per_weight, "{:.2f}"),
            _number(row.size_bytes, "{:,.1f}", 1e-6),
            _number(row.kld_mean, "{:.5f}"),
            _number(error, "{:.5f}"),
            _number(row.ppl, "{:.3f}"),
            _number(row.same_top_p, "{:.1f}"),
            _number(row.prefill_tokens_per_s, "{:,.0f}"),
            _number(row.decode_tokens_per_s, "{:,.1f}"),
            _number(row.peak_rss_bytes, "{:,.0f}", 1e-6),
        )
        cells.append((label(row.file), row.formats or "", *numbers))
    print_table(head, cells, 2)
    for row in rows:
        if row.status != "done":
            print(f"{label(row.file)}: {row.status}")
    print(
        f"{n_tokens:,} tokens scored; noise floor (reference in bfloat16): KLD {floor.mean:.2g} "
        f"+- {1.96 * floor.stderr:.1g}"
    )


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None or math.isnan(value) else form.format(factor * value)
