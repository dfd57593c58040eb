"""`nbflow analyze`: quantization error of tensors, layers and predictions.

    nbflow analyze MODEL --weights q3h,q4                      # every tensor
    nbflow analyze MODEL --weights q3h --parts layers          # the residual stream, each matrix
    nbflow analyze MODEL --weights q3h --parts attribution     # divergence by matrix
    nbflow analyze MODEL --parts kv --kv q8,q4                 # keys and values apart
    nbflow analyze MODEL --weights q3h,q4 --parts all --out runs/analysis

docs/analysis.md defines every number.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nbflow.cli.options import add_plugins_argument
from nbflow.distributed import world
from nbflow.spec import resolve
from nbflow_experiments import backend
from nbflow_experiments.analysis.activation_statistics import activation_statistics
from nbflow_experiments.analysis.all_tensor_errors import (
    TensorResult,
    as_treatments,
    each_tensor,
    totals,
)
from nbflow_experiments.analysis.attribution import BY, attribution
from nbflow_experiments.analysis.generation_drift import generation_drift
from nbflow_experiments.analysis.kv_cache_bits import kv_errors
from nbflow_experiments.analysis.layer_errors import LayerErrors, layer_errors
from nbflow_experiments.analysis.output_folder import AnalysisFolder
from nbflow_experiments.analysis.ratios import Table, table_of
from nbflow_experiments.analysis.text_windows import analysis_windows
from nbflow_experiments.analysis.treatments import (
    Checkpoint,
    Format,
    StoredWeights,
    Treatment,
    read_statistics,
)
from nbflow_experiments.settings import parse_devices
from nbflow_experiments.store.json_files import plain
from nbflow_experiments.store.provenance import describe_launch, now
from nbflow_experiments.terminal_table import counter
from nbflow_kernels.cpu.parallel_for import set_num_threads
from nbflow_kernels.errors import UsageError, unknown_name

PARTS = ("tensors", "layers", "attribution", "kv", "activations", "generation")
WITHOUT_FORMATS = {"kv", "activations"}
CPU_ONLY = {"kv", "activations", "generation"}
KV = "q8_0,q5_0,q4_0,q3,q2"
OF_TEXT = set(PARTS) - {"tensors"}
OF_FORMATS = set(PARTS) - WITHOUT_FORMATS
DEFAULTS = {
    "weights": ("", OF_FORMATS),
    "against": ([], OF_FORMATS),
    "tensors": (None, {"tensors"}),
    "by": (",".join(BY), {"attribution"}),
    "isolated": (False, {"attribution"}),
    "kv": (KV, {"kv"}),
    "text": (None, OF_TEXT),
    "tokens": (2048, OF_TEXT),
    "window": (256, OF_TEXT),
    "seed": (0, OF_TEXT),
}
"""Options that some parts use: default and parts."""
SHOWN = 40  # rows of a table that are printed

COLUMNS = {
    "tensors": ("weights", "tensor", "stored_bits", "gaussian_bits", "code_entropy_bits",
                "relative_error", "sqnr_db", "max_abs_error", "cosine", "mean_error",
                "outlier_share"),
    "totals": ("weights", "tensors", "stored_bits", "gaussian_bits", "code_entropy_bits",
               "relative_error", "sqnr_db", "worst_relative_error"),
    "layers": ("change", "layer", "isolated_error", "cumulative_error", "amplification", "growth",
               "cosine"),
    "modules": ("change", "tensor", "output_error", "weight_error", "gain"),
    "units": ("weights", "by", "unit", "kld_mean_nats", "kld_mean_nats_stderr", "kld_share",
              "kld_saved_mean_nats", "nll_difference_mean_nats"),
    "sums": ("weights", "by", "units", "kld_mean_nats", "kld_sum_nats", "kld_interaction_nats",
             "kld_interaction_nats_stderr", "additivity"),
    "models": ("change", "kld_mean_nats", "kld_mean_nats_stderr", "nll_difference_mean_nats",
               "top1_agreement_share"),
    "tokens": ("change", "by", "low", "high", "tokens", "kld_mean_nats", "kld_mean_nats_stderr",
               "nll_difference_mean_nats"),
    "activations": ("tensor", "rms", "crest", "input_kurtosis", "channel_ratio", "outlier_channels",
                    "top_percent_share"),
    "generation": ("change", "tokens", "prompts", "same_share", "same_share_stderr",
                   "common_tokens_median"),
    "kv_layers": ("keys", "values", "layer", "keys_error", "keys_channel_ratio", "values_error",
                  "attention_error", "isolated_error", "cumulative_error"),
    "kv_models": ("keys", "values", "bits", "kld_mean_nats", "kld_mean_nats_stderr",
                  "nll_difference_mean_nats", "top1_agreement_share"),
}  # fmt: skip
"""Columns that are printed; the files have all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="model, as in nbflow run")
    add("--weights", metavar="FMT,...", default="", help="weight formats, e.g. q3h,q4")
    add(
        "--quantizer",
        metavar="NAME,...",
        default="search",
        help="search, reference, hqq, outliers (with --outliers), gptq (with --importance of "
        "nbflow imatrix --full); each with each format (search)",
    )
    add("--outliers", type=float, default=0.0, metavar="R", help="share kept exactly, 0..0.05 (0)")
    add("--importance", metavar="FILE", help="importances of the columns, of nbflow imatrix")
    add(
        "--against",
        metavar="MODEL",
        action="append",
        default=[],
        help="a quantized checkpoint of the same model, compared as it is stored (repeatable)",
    )
    add(
        "--parts",
        metavar="PART,...",
        default="tensors",
        help=f"{', '.join(PARTS)}, or all (tensors)",
    )
    add("--tensors", metavar="PATTERN", help="only matrices of these names, e.g. '*.attn.*'")
    add("--by", metavar="WHAT,...", default=",".join(BY), help=f"groupings ({','.join(BY)})")
    add(
        "--isolated",
        action="store_true",
        help="attribution: skip the runs that keep one group in float32",
    )
    add("--kv", metavar="FMT,...", default=KV, help=f"formats of the cache, or K/V pairs ({KV})")
    add("--text", metavar="FILE", help="text, UTF-8 (the eval.txt in the model's folder)")
    add("--tokens", type=int, default=2048, metavar="N", help="tokens of the text (2048)")
    add("--window", type=int, default=256, metavar="N", help="tokens of a window (256)")
    add("--seed", type=int, default=0, metavar="N", help="which windows of a longer text (0)")
    add_plugins_argument(parser)
    add("--spec", metavar="FILE", help="spec file to use instead of the checkpoint's own")
    add(
        "--device",
        default="cpu",
        help="device that dequantizes (tensors) and runs the model (layers, attribution): cpu, "
        "cuda, cuda:1 or emulator (cpu)",
    )
    add("--threads", type=int, metavar="N", help="threads")
    add("--out", type=Path, metavar="DIR", help="folder for tables, histograms and figures")
    add("--force", action="store_true", help="replace an analysis in DIR")
    add("--json", action="store_true", help="print one JSON object with all tables")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    parts = _listed(arguments.parts, "--parts")
    parts = list(PARTS) if parts == ["all"] else parts
    for part in parts:
        if part not in PARTS:
            raise unknown_name("part", part, (*PARTS, "all"))
    for name, (default, users) in DEFAULTS.items():
        if getattr(arguments, name) != default and not users & set(parts):
            needed = " or ".join(p for p in PARTS if p in users)
            raise UsageError(f"--{name} is for --parts {needed}, got --parts {','.join(parts)}")
    if arguments.force and arguments.out is None:
        raise UsageError("--force needs --out")
    arguments.device = parse_devices(arguments.device)
    if "," in arguments.device:
        raise UsageError(f"--device names one device, got {arguments.device!r}")
    on_cpu = [part for part in parts if part in CPU_ONLY]
    if on_cpu and arguments.device != "cpu":
        raise UsageError(
            f"--parts {on_cpu[0]} runs on the CPU, got --device {arguments.device}; leave one of "
            "them out"
        )
    if world().size > 1:
        raise UsageError("analyze runs in one process; leave mpirun out")
    if arguments.threads is not None:
        set_num_threads(arguments.threads)
    with ExitStack() as stack:
        treatments = _treatments(arguments, stack)
        if not treatments and not set(parts) <= WITHOUT_FORMATS:
            raise UsageError("give --weights FORMAT,... or --against CHECKPOINT")
        work = _Work(arguments, parts, treatments)
        for part in parts:
            getattr(work, f"_{part}")()
        work.finish()
    return 0


def _listed(text: str, option: str) -> list[str]:
    """Split a comma-separated list."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if len(set(words)) < len(words):
        raise UsageError(f"{option} names something twice: {text}")
    return words


def _treatments(arguments: argparse.Namespace, stack: ExitStack) -> list[Treatment]:
    known = None
    if arguments.importance is not None:
        known = read_statistics(arguments.importance, arguments.model, arguments.spec)
    found: list[Treatment] = [
        Format(name, quantizer, arguments.outliers, known)
        for name in _listed(arguments.weights, "--weights")
        for quantizer in _listed(arguments.quantizer, "--quantizer")
    ]
    if arguments.against:
        spec = resolve(arguments.model, spec=arguments.spec).spec
        for path in arguments.against:
            other = StoredWeights(path, spec)
            stack.callback(other.close)
            found.append(other)
    return as_treatments(found) if found else []


class _Work:
    """Runs the requested parts, prints and writes their tables."""

    def __init__(
        self, arguments: argparse.Namespace, parts: list[str], treatments: list[Treatment]
    ) -> None:
        self._arguments = arguments
        self._treatments = treatments
        self._tables: dict[str, Table] = {}
        self._tensors_found: list[TensorResult] = []
        self._tokens: dict[str, Any] = {}
        self._folder: AnalysisFolder | None = None
        self._windows: Any = None  # for parts that need no text
        if set(parts) - {"tensors"}:
            a = arguments
            self._windows = analysis_windows(a.model, a.text, a.tokens, a.window, a.seed)
        if arguments.out is not None:
            self._launch = describe_launch(world(), ["nbflow", *sys.argv[1:]])
            self._folder = AnalysisFolder.new(arguments.out, self._settings(parts), arguments.force)

    def _settings(self, parts: list[str]) -> dict[str, Any]:
        a = self._arguments
        settings: dict[str, Any] = {
            "model": a.model,
            "model_digest": backend.identify(a.model).digest,
            "parts": parts,
            "weights": [t.label for t in self._treatments],
            "tensors": a.tensors,
            "device": a.device,
        }
        if self._windows is not None:
            text = backend.text_file(a.model, a.text)
            settings |= {
                "text": text.name,
                "text_digest": backend.digest_files([text]),
                "windows": len(self._windows),
                "window": a.window,
                "seed": a.seed,
            }
        return settings

    def finish(self) -> None:
        """Print JSON, or write the remaining files."""
        if self._arguments.json:
            tables = {n: t.to_dict(orient="records") for n, t in self._tables.items()}
            print(json.dumps(plain(tables), indent=1))
        if self._folder is None:
            return
        if self._tensors_found or self._tokens:
            self._folder.write_histograms(self._tensors_found, self._tokens)
        self._folder.write_provenance({**(self._launch or {}), "finished": now()})
        self._folder.draw()
        if not self._arguments.json:
            print(f"wrote {self._folder.path}")

    # ---- parts --------------------------------------------------------------------------------

    def _tensors(self) -> None:
        a = self._arguments
        with Checkpoint(a.model, a.spec) as checkpoint:
            tell = counter("tensors")
            found = each_tensor(checkpoint, self._treatments, a.tensors, tell, a.device)
            for one in found:
                self._tensors_found.append(one)
        table = table_of([one.row() for one in self._tensors_found])
        self._give("tensors", table, table.sort_values("relative_error", ascending=False))
        self._give("totals", totals(table))

    def _layers(self) -> None:
        a = self._arguments
        found = layer_errors(
            a.model,
            self._treatments,
            self._windows,
            spec=a.spec,
            device=a.device,
            progress=counter("layers"),
        )
        self._give_layers("", found)
        if len(found.tokens):
            self._give("tokens", found.tokens)
        by_error = found.modules.sort_values("output_error", ascending=False)
        self._give("modules", found.modules, by_error)

    def _kv(self) -> None:
        a = self._arguments
        formats = _listed(a.kv, "--kv")
        found = kv_errors(a.model, formats, self._windows, spec=a.spec, progress=counter("kv"))
        self._give_layers("kv_", found)

    def _activations(self) -> None:
        a = self._arguments
        table = activation_statistics(a.model, self._windows, spec=a.spec)
        self._give("activations", table, table.sort_values("channel_ratio", ascending=False))

    def _generation(self) -> None:
        a = self._arguments
        table = generation_drift(a.model, self._treatments, self._windows, spec=a.spec)
        self._give("generation", table)

    def _give_layers(self, prefix: str, found: LayerErrors) -> None:
        self._give(f"{prefix}layers", found.layers)
        if len(found.models):
            self._give(f"{prefix}models", found.models)
        self._tokens[f"{prefix}layers"] = found.token_counts

    def _attribution(self) -> None:
        a = self._arguments
        found = attribution(
            a.model,
            self._treatments,
            self._windows,
            by=_listed(a.by, "--by"),
            complement=not a.isolated,
            spec=a.spec,
            device=a.device,
            progress=counter("attribution"),
        )
        order = ["by", "kld_mean_nats"]
        self._give("units", found.units, found.units.sort_values(order, ascending=False))
        self._give("sums", found.sums)

    def _give(self, name: str, table: Table, shown: Table = None) -> None:
        """Record, write and print a table; `shown` is its sorted form."""
        self._tables[name] = table
        if self._folder is not None:
            self._folder.write(name, table)
        if not self._arguments.json:
            rows = table if shown is None or len(table) <= SHOWN else shown
            print(f"== {name}")
            print(_text(rows[list(COLUMNS[name])].head(SHOWN)))
            if len(rows) > SHOWN:
                print(f"... the first {SHOWN} of {len(rows)} rows; --out and --json give all")
            print()


def _text(table: Table) -> str:
    """Return a table as text, numbers with four digits."""
    text: str = table.to_string(index=False, float_format=lambda x: f"{x:.4g}")
    return text
