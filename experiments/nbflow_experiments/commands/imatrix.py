"""`nbflow imatrix`: importance of the columns of each matrix, collected on a calibration text.

    nbflow imatrix MODEL --text FILE -o OUT.gguf
    nbflow imatrix --merge A.gguf --merge B.gguf -o OUT.gguf
    nbflow imatrix --show FILE

Mean squares of the inputs of each matrix, in llama.cpp's ``imatrix`` formats; ``nbflow quantize
--importance OUT`` weights errors with them.  With ``--full`` all second moments, which
``--quantizer gptq`` needs, in a ``.safetensors``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from nbflow.calibration import collect_stats, merge, write_hessians, write_stats
from nbflow.calibration.hessian import LIMIT_BYTES
from nbflow.calibration.imatrix_files import check_ending
from nbflow.cli.options import add_model_arguments, load_model
from nbflow.conversion.importance_names import gguf_names_of
from nbflow.quantization.importance import read_importance
from nbflow_experiments.analysis.importance_statistics import ColumnStatistics, column_statistics
from nbflow_experiments.commands.perplexity import add_text_arguments, text_windows
from nbflow_experiments.store.json_files import plain
from nbflow_experiments.terminal_table import counter, print_table
from nbflow_kernels.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_arguments(parser)
    model = next(a for a in parser._actions if a.dest == "model")
    model.nargs, model.required = "?", False
    add_text_arguments(parser)
    parser.add_argument(
        "-o", "--out", metavar="OUT", help="a .gguf, .dat (llama.cpp's older form) or .safetensors"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="all second moments, for --quantizer gptq (.safetensors)",
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="memory for the sums of --full; further passes over the text collect the rest "
        f"({LIMIT_BYTES >> 30})",
    )
    parser.add_argument(
        "--merge", action="append", default=[], metavar="FILE", help="add up files (repeatable)"
    )
    parser.add_argument("--show", metavar="FILE", help="print the statistics of a file")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.memory is not None and arguments.memory <= 0:
        raise UsageError(f"--memory must be more than 0, got {arguments.memory:g}")
    if arguments.memory is not None and not arguments.full:
        raise UsageError("--memory is for --full")
    if arguments.full and not arguments.model:
        raise UsageError("--full collects: give MODEL with -o OUT")
    asked = [bool(arguments.model), bool(arguments.merge), bool(arguments.show)]
    if sum(asked) != 1 or bool(arguments.out) == bool(arguments.show):
        raise UsageError("give MODEL with -o OUT, or --merge files with -o OUT, or --show FILE")
    if arguments.merge:
        merge(arguments.merge, arguments.out, force=arguments.force)
    elif arguments.model:
        _collect(arguments)
    file = arguments.show or arguments.out
    rows = column_statistics(read_importance(file))
    if arguments.json:
        print(json.dumps(plain({"file": str(file), "matrices": [vars(r) for r in rows]}), indent=1))
    else:
        _print_table(rows)
        if arguments.out:
            print(f"wrote {file}: {len(rows)} matrices")
    return 0


def _collect(arguments: argparse.Namespace) -> None:
    """Run the model over the text and write the file."""
    path = check_ending(arguments.out)
    if arguments.full and path.suffix != ".safetensors":
        raise UsageError(f"{path}: --full needs a .safetensors")
    if path.exists() and not arguments.force:  # fail before the work
        raise UsageError(f"{path}: exists; give another name, or --force")
    arguments.scored, arguments.stride = "all", 0
    windows = text_windows(arguments)
    names = gguf_names_of(arguments.model, arguments.spec)

    tell = counter("windows")
    ids = [w.ids for w in windows]
    with load_model(arguments) as model:
        if arguments.full:
            limit = LIMIT_BYTES if arguments.memory is None else int(arguments.memory * 2**30)
            options = {"limit_bytes": limit, "force": arguments.force}
            write_hessians(path, model, ids, progress=tell, **options)
            return
        show = None if tell is None else lambda n_done: tell(n_done, len(windows))
        found = collect_stats(model, ids, progress=show)
    text = Path(arguments.text).name if arguments.text else "eval.txt"
    sizes = {"n_windows": len(windows), "window": arguments.context}
    write_stats(path, found, names=names, text=text, **sizes, force=arguments.force)


def _print_table(rows: list[ColumnStatistics]) -> None:
    head = (
        "name", "columns", "sum", "least", "largest", "active", "entropy", "top 1 %", "cosine"
    )  # fmt: skip
    cells = [
        (
            r.name, str(r.n_columns), f"{r.sum:.4g}", f"{r.least:.3g}", f"{r.largest:.3g}",
            f"{r.active_share:.1%}", f"{r.entropy_share:.1%}", f"{r.top_percent_share:.1%}",
            "" if np.isnan(r.cosine_to_previous) else f"{r.cosine_to_previous:.4f}",
        )
        for r in rows
    ]  # fmt: skip
    print_table(head, cells, 1)
