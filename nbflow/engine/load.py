"""From a model's name to a loaded model on every rank."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import nbflow_kernels as nk
from nbflow.engine.model import Model
from nbflow.engine.rank import RankEngine, make_groups
from nbflow.engine.replicas import Replicas
from nbflow.execute import Place
from nbflow.execute.place import find_places
from nbflow.parallel import Comm, Plan, make_plan, split_replicas, world
from nbflow.parallel.cores import fair_threads
from nbflow.parallel.threads import RankTeam
from nbflow.spec import check, resolve
from nbflow.spec.model_spec import ModelSpec
from nbflow.tokenizer import Tokenizer, load_tokenizer
from nbflow.weights import WeightFile, open_weights
from nbflow.weights.weight_file import ITEM_BYTES
from nbflow_kernels.errors import MissingExtraError, UsageError, unknown_name
from nbflow_kernels.kvcache.formats import kv_format
from nbflow_kernels.quants.outliers import check_ratio

ACTIVATIONS = ("f32", "bf16", "int8")


def load(
    model: str | Path,
    *,
    spec: str | Path | None = None,
    weights: str | None = None,
    outliers: float = 0.0,
    activations: str = "f32",
    kv: str = "f16",
    partition: str = "0",
    device: str = "auto",
    graphs: bool = True,
    tokenizer: str | Path | None = None,
    max_context: int | None = None,
    threads: int | None = None,
    max_step_tokens: int = 512,
    exchange: str = "f32",
    optimize: str = "latency",
    machine: str | Path | None = None,
    comm: Comm | None = None,
) -> Model:
    """Load a model, each rank its own part.

    Parameters
    ----------
    model : str or Path
        A Hugging Face folder, a .safetensors file, a torch checkpoint, a .gguf, a llama2.c .bin, or
        the name of a model spec.
    spec : str or Path, optional
        A spec file (TOML) to use instead of what the checkpoint says about itself, or the name of
        a model that comes with the package, e.g. "llama2_7b_chat" (`nbflow.spec.resolve`).
    weights : str, optional
        Format of the attention and feed-forward matrices: a name of `nbflow_kernels.FORMATS`, e.g.
        "q4".  None keeps what the checkpoint stores.
    outliers : float
        Share of the weights, 0..0.05, that are kept exactly beside the format because they stretch
        the range of their block (Inferflow's ``delta_tensor_ratio``, `nbflow_kernels.quantize`).
        Only with `weights` a block format.
    activations : {"f32", "bf16", "int8"}
        Arithmetic of the products with weights.  "f32" multiplies float32 activations with the
        decoded weights.  "bf16" rounds both to bfloat16 (relative error 2**-9 each).  "int8" rounds
        the activations to 8 bits in blocks of 32 columns, as llama.cpp does, for weights in a block
        format; float weights keep "f32".  Sums are float32 (int32 within a block).
    kv : str
        Element format of the key/value cache: "f32", "f16", "bf16", or a block format, e.g. "q8_0"
        or "q4_0" (`nbflow_kernels.kvcache.formats.kv_format`), which each head vector is put into.
    partition : str
        Who holds what, e.g. ``"0"``, ``"0;1"`` (by layer), ``"0&1"`` (by tensor), ``"0&1;2&3"``,
        ``"0:3;1"`` (uneven), ``"0/1"`` (replicas); see `nbflow.parallel.notation`.  Under mpirun
        the numbers are MPI ranks; without it they are threads of this process.  "auto" takes what
        the planner predicts to be best on the ranks that mpirun has started.
    device : str
        Where to run: "cpu" ("auto"), "cuda" (or "cuda:1"), or "emulator", which executes the CUDA
        kernels on the CPU with all checks of `nbflow_ptx`, to debug them with tiny models.  One for
        all ranks of the partition, or one for each: ``device="cpu,cuda"`` with ``"0;1"`` has the
        first layers on the CPU.  Ranks that say "cuda" take the machine's devices in turn.
    graphs : bool
        Whether steps of generation run as CUDA graphs on devices.
    tokenizer : str or Path, optional
        Tokenizer file, if it does not lie beside the weights.
    max_context : int, optional
        Shorten the context to this many tokens.
    threads : int, optional
        Threads of each rank; by default the cores of the machine are shared out evenly.
    max_step_tokens : int
        Most tokens in one step; longer prompts are run in pieces, with the same result.
    exchange : {"f32", "q8"}
        How ranks that share a layer send each other partial sums: as float32, or rounded to bytes
        with a scale for 32 of them, which are 3.6 times fewer bytes and round each part to 1/254
        of its block's largest number.
    optimize : {"latency", "throughput"}
        What partition "auto" is to be best at (`nbflow.planner.auto.choose_partition`).
    machine : str or Path, optional
        Description of the machine for partition "auto"; without one its ranks are measured.
    comm : Comm, optional
        Ranks to use; by default those mpirun started.

    Returns
    -------
    Model

    Raises
    ------
    UsageError
        If a file, name or setting is wrong, or the partition does not fit the model or the ranks.

    Examples
    --------
    >>> import nbflow
    >>> with nbflow.load("tiny_python", weights="q4", partition="0&1") as model:
    ...     model.plan.numbers
    (0, 1)
    """
    resolved = resolve(model, spec=spec)
    the_spec = _shorten(resolved.spec, max_context)
    if weights is None:
        with open_weights(resolved.path) as file:
            block_size = stored_block_size(file)
    else:
        block_size = nk.FORMATS[weights].block_size
    check_outliers(outliers, weights)
    kv_format(kv)  # raises for an unknown name
    if activations not in ACTIVATIONS:
        raise unknown_name("activations", activations, ACTIVATIONS)
    if max_step_tokens < 1:
        raise UsageError(f"max_step_tokens must be at least 1, got {max_step_tokens}")
    comm = comm or world()
    if partition == "auto":
        from nbflow.planner import Setting, choose_partition, stored_model

        form = weights and nk.FORMATS[weights].name
        setting = Setting(kv=kv, activations=activations, exchange=exchange)
        described = stored_model(the_spec, resolved.path, form)
        partition = choose_partition(described, comm, optimize, machine, setting)
    plans = [make_plan(the_spec, part, block_size, exchange) for part in split_replicas(partition)]
    whole = Plan("/".join(p.partition for p in plans), sum((p.ranks for p in plans), ()))
    places = find_places(device, len(whole.ranks), graphs)
    _check_ranks(whole, comm)
    tok, why_none = _tokenizer(tokenizer, resolved.tokenizer)
    if tok is not None and resolved.prompt_template is not None:
        tok.prompt_template = resolved.prompt_template
    if threads is None:
        threads = fair_threads(comm, whole.numbers)
    options: dict[str, Any] = {
        "spec": the_spec,
        "weights": weights,
        "outliers": outliers,
        "activations": activations,
        "kv": kv,
        "threads": threads,
        "max_step_tokens": max_step_tokens,
    }
    # every rank takes part in every split
    parts = [comm.split(p.numbers) if comm.size > 1 else comm for p in plans]
    everyone = comm.split(whole.numbers) if comm.size > 1 else comm
    models, first = [], 0
    for p, part in zip(plans, parts, strict=True):
        mine, first = places[first : first + len(p.ranks)], first + len(p.ranks)
        if part is not None:
            engines, team = _start(p, part, resolved.path, mine, options)
            models.append(
                Model(the_spec, p, tok, engines, team, threads, resolved.defaults, why_none)
            )
    if not models or everyone is None:
        return Model(the_spec, whole, tok, [], None, threads, resolved.defaults, why_none)
    if len(plans) == 1:
        return models[0]
    index = next(i for i, part in enumerate(parts) if part is not None)
    return Replicas(models, whole, everyone, index, len(plans))


def _tokenizer(given: str | Path | None, found: Path | None) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer, or why there is none: who passes token ids does not need it."""
    if given is not None:
        return load_tokenizer(given), ""
    if found is None:
        return None, "has no tokenizer file beside its weights"
    try:
        return load_tokenizer(found), ""
    except (UsageError, MissingExtraError) as error:
        return None, f"has a tokenizer that cannot be used ({error})"


def check_outliers(outliers: float, weights: str | None) -> None:
    """Raise unless `outliers` is a share that goes with the weight format."""
    if check_ratio(outliers) and (weights is None or nk.FORMATS[weights].block_size == 1):
        raise UsageError(
            f"outliers={outliers:g} needs weights in a block format, got weights={weights!r}; name "
            "one, e.g. weights='q4'"
        )


def stored_block_size(file: WeightFile) -> int:
    """Return the least number of columns that holds whole blocks of every tensor of a file."""
    formats = {file.dtype(name) for name in file.names()} - set(ITEM_BYTES)
    return math.lcm(1, *(nk.FORMATS[f].block_size for f in formats))


def _start(
    plan: Plan, comm: Comm, path: Path, places: list[Place], options: dict[str, Any]
) -> tuple[list[RankEngine], RankTeam | None]:
    """Make the ranks of this process: one of `comm`, or all of them as threads."""

    def make(mine: Comm) -> RankEngine:
        groups = make_groups(plan, mine)
        engine, failure = None, None
        try:
            with open_weights(path) as file:
                check(options["spec"], file)
                place = places[mine.rank]
                place.activate()
                engine = RankEngine(plan, file, mine, groups, place=place, **options)
        except (UsageError, OSError, MemoryError) as error:
            failure = error
        _agree(mine, failure)
        assert engine is not None
        return engine

    if comm.size == 1 and len(plan.ranks) > 1:
        team = RankTeam(len(plan.ranks))
        try:
            return team.run(make), team
        except BaseException:
            team.close()
            raise
    return [make(comm)], None


def _agree(comm: Comm, failure: Exception | None) -> None:
    """Raise on every rank if one has failed, so that no rank waits for one that has given up."""
    failures = comm.bcast_object(comm.gather_object(failure))
    if failure is not None:
        raise failure
    for rank, other in enumerate(failures):
        if other is not None:
            raise UsageError(f"rank {rank} could not load its part: {other}") from other


def _shorten(spec: ModelSpec, max_context: int | None) -> ModelSpec:
    if max_context is None:
        return spec
    if not 1 <= max_context <= spec.max_context:
        raise UsageError(
            f"max_context must be 1..{spec.max_context} for {spec.name}, got {max_context}"
        )
    return dataclasses.replace(spec, max_context=max_context)


def _check_ranks(plan: Plan, comm: Comm) -> None:
    if comm.size == 1:
        return
    missing = [rank for rank in plan.numbers if rank >= comm.size]
    if missing:
        raise UsageError(
            f"partition {plan.partition!r} names rank {max(missing)}, but mpirun started "
            f"{comm.size} ranks, 0..{comm.size - 1}; use mpirun -n {max(missing) + 1} or another "
            "partition"
        )
