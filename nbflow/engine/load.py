"""From a model's name to a loaded model on every rank."""

from __future__ import annotations

import dataclasses
import math
import platform
from pathlib import Path
from typing import Any

import nbflow_kernels as nk
from nbflow.engine.model import Model
from nbflow.engine.rank import RankEngine, make_groups
from nbflow.execute import Place
from nbflow.execute.place import find_places
from nbflow.parallel import Comm, Plan, make_plan, world
from nbflow.parallel.threads import RankTeam
from nbflow.spec import check, resolve
from nbflow.spec.model_spec import ModelSpec
from nbflow.tokenizer import Tokenizer, load_tokenizer
from nbflow.weights import WeightFile, open_weights
from nbflow.weights.weight_file import ITEM_BYTES
from nbflow_kernels.errors import MissingExtraError, UsageError, unknown_name
from nbflow_kernels.kvcache.formats import kv_format
from nbflow_kernels.quants.outliers import check_ratio
from nbflow_kernels.team import available_cores

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
    tokenizer: str | Path | None = None,
    max_context: int | None = None,
    threads: int | None = None,
    max_step_tokens: int = 512,
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
        Who holds what, e.g. ``"0"``, ``"0;1"`` (by layer), ``"0&1"`` (by tensor), ``"0&1;2&3"``.
        Under mpirun the numbers are MPI ranks; without it they are threads of this process.
    device : str
        Where to run: "cpu" ("auto"), "cuda" (or "cuda:1"), or "emulator", which executes the CUDA
        kernels on the CPU with all checks of `nbflow_ptx`, to debug them with tiny models.  One for
        all ranks of the partition, or one for each: ``device="cpu,cuda"`` with ``"0;1"`` has the
        first layers on the CPU.  Ranks that say "cuda" take the machine's devices in turn.
    tokenizer : str or Path, optional
        Tokenizer file, if it does not lie beside the weights.
    max_context : int, optional
        Shorten the context to this many tokens.
    threads : int, optional
        Threads of each rank; by default the cores of the machine are shared out evenly.
    max_step_tokens : int
        Most tokens in one step; longer prompts are run in pieces, with the same result.
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
    plan = make_plan(the_spec, partition, block_size)
    places = find_places(device, len(plan.ranks))
    _check_ranks(plan, comm)
    tok, why_none = _tokenizer(tokenizer, resolved.tokenizer)
    if tok is not None and resolved.prompt_template is not None:
        tok.prompt_template = resolved.prompt_template
    if threads is None:
        threads = max(1, available_cores() // _ranks_here(plan, comm))
    options: dict[str, Any] = {
        "spec": the_spec,
        "weights": weights,
        "outliers": outliers,
        "activations": activations,
        "kv": kv,
        "threads": threads,
        "max_step_tokens": max_step_tokens,
    }
    engines, team = _start(plan, comm, resolved.path, places, options)
    return Model(the_spec, plan, tok, engines, team, threads, resolved.defaults, why_none)


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
    """Make the ranks of this process."""

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
    mine = comm.split(plan.numbers) if comm.size > 1 else comm
    return ([] if mine is None else [make(mine)]), None


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


def _ranks_here(plan: Plan, comm: Comm) -> int:
    """Return how many ranks of the plan share this machine."""
    if comm.size == 1:
        return len(plan.ranks)
    hosts: list[str] = comm.bcast_object(comm.gather_object(platform.node()))
    return max(1, sum(hosts[rank] == hosts[comm.rank] for rank in plan.numbers))
