"""Runner of sweep points, collective over the ranks.

Rank 0 decides, broadcasts and writes; all ranks load and measure together, and after each step they
agree whether it succeeded (`nbflow_experiments.sweep.rank_barrier`).  A point that fails
is recorded and the sweep continues.  Consecutive points that differ only in batch and lengths reuse
the loaded model and its quality measures, which do not depend on them; the result records it.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nbflow_experiments import backend
from nbflow_experiments.config.points import FORMAT_SETTINGS, LOAD_SETTINGS, QUALITY_SETTINGS, Point
from nbflow_experiments.measures import (
    MEASURES,
    Array,
    Context,
    Measure,
    MeasureResult,
    needs_reference,
)
from nbflow_experiments.measures.evaluation import text_windows
from nbflow_experiments.measures.reference_logits import reference_path, write_reference
from nbflow_experiments.scoring.logits_file import is_complete
from nbflow_experiments.store import provenance
from nbflow_experiments.store.hdf5_arrays import remove_rank_files, write_rank_file
from nbflow_experiments.store.results_folder import ResultsFolder, reading_row
from nbflow_experiments.sweep.planner_prediction import Predictor
from nbflow_experiments.sweep.point_status import (
    bits_per_weight,
    new_result,
    note_failure,
    note_not_finite,
)
from nbflow_experiments.sweep.progress import Reporter
from nbflow_experiments.sweep.rank_barrier import StepFailed, StopRequest, in_step

if TYPE_CHECKING:
    from nbflow.engine.llm import LLM

T = TypeVar("T")


@dataclass
class _Log:
    """Log of one point."""

    lines: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def write(self, text: str) -> None:
        """Add a line with the time."""
        self.lines.append(f"{provenance.now()} {text}")

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Log the duration of a step."""
        start = time.perf_counter()
        self.write(f"{name} begins")
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - start
            self.write(f"{name} ends after {self.seconds[name]:.3f} s")


@dataclass
class _Loaded:
    """Loaded model and its cached quality measures."""

    key: tuple[Any, ...]
    model: LLM
    leader: int
    quality: dict[tuple[Any, ...], tuple[str, MeasureResult]] = field(default_factory=dict)
    shared: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)


@dataclass
class Runner:
    """Runs points one at a time and reuses the loaded model where possible."""

    comm: backend.Comm
    """All ranks; every rank creates a runner and passes it the same points."""
    folder: ResultsFolder
    """Results folder: rank 0 writes, the leading rank of a point reads the reference."""
    reporter: Reporter
    launch: str
    stop: StopRequest = field(default_factory=StopRequest)
    """Stop request, checked after each step."""
    _loaded: _Loaded | None = field(default=None, init=False)
    _formats: dict[tuple[Any, ...], MeasureResult] = field(default_factory=dict, init=False)
    _windows: dict[tuple[Any, ...], np.ndarray] = field(default_factory=dict, init=False)
    _references: dict[Path, Path] = field(default_factory=dict, init=False)
    _rank_arrays: dict[str, Array] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._predictor = Predictor(self.comm)

    def run_point(self, point: Point, attempt: int, *, last: bool) -> str:
        """Measure and record one point; return its status on every rank."""
        log, measured = _Log(), dict[str, MeasureResult]()
        result = new_result(point, self.launch, attempt)
        start = time.perf_counter()
        if attempt > 1:
            self.close()  # the loaded model may have caused the failure
        if self.comm.rank == 0:
            self.reporter.begins(point)
        self._on_root(log, "freeze", lambda: self.folder.write_config(point))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._measure(point, log, measured, result)
            except StepFailed as failure:
                note_failure(result, failure)
                log.write(f"failed\n{failure.failures[0].traceback}")
                self.close()
        for warning in caught:
            log.write(f"warning: {warning.category.__name__}: {warning.message}")
        result["finished"] = provenance.now()
        result["wall_s"] = time.perf_counter() - start
        result["steps_s"] = log.seconds
        ranks = self._write_rank_arrays(point, log)
        self._on_root(log, "write", lambda: self._record(point, result, log, measured, ranks))
        if self.comm.rank == 0:
            self.reporter.ends(point, result, last=last)
        return str(self.comm.bcast_object(result["status"]))

    def _record(
        self,
        point: Point,
        result: dict[str, Any],
        log: _Log,
        measured: dict[str, MeasureResult],
        ranks: Sequence[int],
    ) -> None:
        """Write a finished point; `ranks` have written array files; rank 0 only."""
        result["bits_per_weight"] = bits_per_weight(point, measured)
        result["readings"] = [
            reading_row(name, reading) for name, o in measured.items() for reading in o.readings
        ]
        note_not_finite(result, result["readings"])
        result["devices"] = next((o.devices for o in measured.values() if o.devices), None)
        arrays = {name: array for o in measured.values() for name, array in o.arrays.items()}
        text = "\n".join(log.lines) + "\n"
        self.folder.write_result(point.short, result, text, arrays, ranks)

    def _write_rank_arrays(self, point: Point, log: _Log) -> list[int]:
        """Write this rank's arrays; return, on rank 0, the ranks that wrote a file."""
        arrays, self._rank_arrays = self._rank_arrays, {}
        if self.comm.size == 1:
            return []
        folder, problem = self.folder.folder(point.short), ""
        if self.comm.rank == 0:
            remove_rank_files(folder)
        self.comm.bcast_object(None)  # barrier: files of an earlier attempt are removed
        if arrays:
            try:
                write_rank_file(folder, self.comm.rank, arrays)
            except OSError as error:  # record the point nevertheless
                problem = str(error)
        reports = self.comm.gather_object((bool(arrays), problem))
        for rank, (_, text) in enumerate(reports or ()):
            if text:
                log.write(f"rank {rank} could not write its arrays: {text}")
        return [rank for rank, (wrote, text) in enumerate(reports or ()) if wrote and not text]

    def _measure(
        self, point: Point, log: _Log, measured: dict[str, MeasureResult], result: dict[str, Any]
    ) -> None:
        """Prepare, load and run every measure of a point."""
        windows = self._prepare_windows(point, log) if point.text else None
        reference = None
        if windows is not None and needs_reference(point.measures):
            reference = self._prepare_reference(point, windows, log)
        loaded = self._load(point, log)
        result["partition_chosen"] = loaded.model.plan.partition
        quality = point.key(QUALITY_SETTINGS)
        context = Context(
            point.config,
            loaded.model,
            self.comm.rank == loaded.leader,
            windows,
            reference,
            loaded.shared.setdefault(quality, {}),
        )
        for name in point.measures:
            measure = MEASURES[name]
            if measure.scope == "quality" and (*quality, name) in loaded.quality:
                source, measured[name] = loaded.quality[(*quality, name)]
                result["quality_shared_from"] = source
                log.write(
                    f"{name} is that of point {source}, which differs in batch or lengths only"
                )
                continue
            measured[name] = self._run_measure(measure, point, context, log)
            if measure.scope == "quality":
                loaded.quality[(*quality, name)] = point.short, measured[name]
        if point.config["machine"]:
            with log.timed("prediction"):
                measured["prediction"] = in_step(
                    self.comm, self.stop, lambda: self._predictor.predict_point(point, loaded.model)
                )

    def _run_measure(
        self, measure: Measure, point: Point, context: Context, log: _Log
    ) -> MeasureResult:
        """Run one measure on all ranks; rank 0 gets the leading rank's result."""
        key = (measure.name, point.model_digest, *point.key(FORMAT_SETTINGS))
        if measure.scope == "format" and key in self._formats:
            return self._formats[key]

        def work() -> MeasureResult:
            return measure.run(context) if context.model.participates else MeasureResult()

        with log.timed(measure.name):
            if self.comm.rank == 0:
                self.reporter.step(measure.name)
            found = in_step(self.comm, self.stop, work)
            self._rank_arrays |= found.rank_arrays
            gathered = self.comm.gather_object(found if context.leads else None)
        if gathered is not None and self._loaded is not None:
            found = gathered[self._loaded.leader]
        if measure.scope == "format":
            self._formats[key] = found
        return found

    def _prepare_windows(self, point: Point, log: _Log) -> np.ndarray:
        """Return the windows to evaluate; rank 0 reads the text."""
        names = ("model", "eval_tokens", "eval_window", "seed")
        key = (point.dataset_digest, *point.key(names))
        if key not in self._windows:
            text, config = point.text, point.config
            assert text is not None
            self._windows[key] = self._on_root(
                log,
                "tokenize",
                lambda: text_windows(
                    str(config["model"]),
                    text,
                    int(config["eval_tokens"]),
                    int(config["eval_window"]),
                    int(config["seed"]),
                ),
            )
        return self._windows[key]

    def _prepare_reference(self, point: Point, windows: np.ndarray, log: _Log) -> Path:
        """Return the file of the reference's logits; rank 0 writes it if missing."""
        first = int(point.config["eval_context"])
        path = reference_path(self.folder.reference, point.model_digest, windows, first)
        if path not in self._references:

            def write() -> Path:
                if not is_complete(path):
                    model, threads = str(point.config["model"]), int(point.config["threads"])
                    write_reference(path, model, windows, first, threads)
                return path

            if self.comm.rank == 0:
                self.reporter.step("reference")
            self._references[path] = self._on_root(log, "reference", write)
        return self._references[path]

    def _load(self, point: Point, log: _Log) -> _Loaded:
        """Return the model of a point; reuses the loaded one if the settings agree."""
        key = point.key(LOAD_SETTINGS)
        if self._loaded is not None and self._loaded.key == key:
            log.write("the model is still loaded from the point before")
            return self._loaded
        self.close()
        config = point.config
        options: dict[str, Any] = {
            n: config[n] for n in LOAD_SETTINGS if n not in ("model", "ranks")
        }
        made: list[LLM] = []

        def load() -> None:
            made.append(backend.load(str(config["model"]), **options))

        with log.timed("load"):
            if self.comm.rank == 0:
                self.reporter.step("load")
            try:
                in_step(self.comm, self.stop, load)
            except BaseException:
                for model in made:
                    model.close()
                raise
        participating = self.comm.gather_object(made[0].participates)
        leader = self.comm.bcast_object(participating.index(True) if participating else None)
        self._loaded = _Loaded(key, made[0], leader)
        return self._loaded

    def close(self) -> None:
        """Unload the model."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.model.close()

    def _on_root(self, log: _Log, name: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank."""
        with log.timed(name):
            result = in_step(self.comm, self.stop, work if self.comm.rank == 0 else lambda: None)
            value: T = self.comm.bcast_object(result)
        return value
