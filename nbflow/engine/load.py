"""From a model's name to a loaded model on every rank."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.engine.model import Model
from nbflow.engine.placement import Placement, is_host
from nbflow.engine.rank import RankEngine, make_groups
from nbflow.engine.replicas import Replicas
from nbflow.execute import Place
from nbflow.execute.encode import Encoding
from nbflow.execute.place import find_places
from nbflow.folding import Prepared, no_format, prepare
from nbflow.parallel import Comm, Plan, make_plan, split_replicas, world
from nbflow.parallel.cores import fair_threads
from nbflow.parallel.links import make_links
from nbflow.parallel.threads import RankTeam
from nbflow.spec import check, resolve
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.resolve import ResolvedModel
from nbflow.status import status
from nbflow.tokenizer import Tokenizer, load_tokenizer
from nbflow.weights import WeightFile, open_weights
from nbflow.weights.weight_file import ITEM_BYTES
from nbflow.weights_policy import WeightFormats, weight_formats
from nbflow.writing.importance_names import known_inputs
from nbflow_kernels.errors import MissingExtraError, UsageError, unknown_name
from nbflow_kernels.kvcache.formats import kv_formats
from nbflow_kernels.quantizers import DAMPING
from nbflow_kernels.quantizers.outliers import check_ratio

ACTIVATIONS = ("f32", "bf16", "int8")


@status.loading("the description of the model")
def load(
    model: str | Path,
    *,
    spec: str | Path | None = None,
    weights: str | Path | WeightFormats | None = None,
    outliers: float = 0.0,
    encoder: str = "best",
    importance: str | Path | Mapping[str, NDArray[Any]] | None = None,
    act_order: bool = False,
    damping: float = DAMPING,
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
    kv_host_percent: float = 0.0,
    embeddings_on_host: bool = False,
    cpu_layers: int = 0,
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
    weights : str, path or WeightFormats, optional
        Format of the attention and feed-forward matrices: a name of `nbflow_kernels.FORMATS`, e.g.
        "q4", or a policy file (``.toml``) that says it matrix by matrix (`nbflow.weights_policy`).
        None keeps what the checkpoint stores.
    outliers : float
        Share of the weights, 0..0.05, that are kept exactly beside the format because they stretch
        the range of their block (Inferflow's ``delta_tensor_ratio``, `nbflow_kernels.quantize`).
        Only with `weights` a block format.
    encoder : str
        How matrices are put into their formats: "best", "plain", "gptq", "hqq", "outliers"
        (`nbflow_kernels.quantizers.quantize_calibrated`); "awq" or "hadamard", which change the
        model first in a way that leaves its results the same (`nbflow.folding`); or such parts
        joined, "hadamard+gptq".  Only with `weights`.  docs/quantization.md explains them.
    importance : path or mapping, optional
        What is known about the inputs of each matrix: a file of ``nbflow imatrix`` or llama.cpp's,
        or name -> mean squares (K,) or second moments (K, K), which "gptq" needs.
    act_order : bool
        Whether GPTQ takes the columns with the largest inputs first.
    damping : float
        What GPTQ adds to the diagonal of second moments, in units of its mean.
    activations : {"f32", "bf16", "int8"}
        Arithmetic of the products with weights.  "f32" multiplies float32 activations with the
        decoded weights.  "bf16" rounds both to bfloat16 (relative error 2**-9 each).  "int8" rounds
        the activations to 8 bits in blocks of 32 columns, as llama.cpp does, for weights in a block
        format; float weights keep "f32".  Sums are float32 (int32 within a block).
    kv : str
        Element format of the key/value cache: "f32", "f16", "bf16", or a block format, e.g. "q8_0"
        or "q4_0" (`nbflow_kernels.kvcache.formats.kv_format`), which each head vector is put into.
        "q8_0/q4_0" gives keys, which come first, and values formats of their own.
    partition : str
        Who holds what, e.g. ``"0"``, ``"0;1"`` (by layer), ``"0&1"`` (by tensor), ``"0&1;2&3"``,
        ``"0:3;1"`` (uneven), ``"0/1"`` (replicas); see `nbflow.parallel.notation`.  Under mpirun
        the numbers are MPI ranks; without it they are threads of this process.  "auto" takes what
        the planner predicts to be best on the ranks that mpirun has started; for throughput it may
        be replicas.
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
    kv_host_percent : float
        Where a rank has a device: for how many percent of its layers, the last ones, the keys and
        values lie in the host's pinned memory, which the device reads over the bus.
    embeddings_on_host : bool
        Where a rank has a device: whether the tables that are only looked up lie there, too.
    cpu_layers : int
        How many of the first layers the host computes, with a device for the others: partition
        ``"0"`` becomes ``"0:2;1:6"`` on ``"cpu,cuda"`` for 2 of 8.
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
    formats = weight_formats(weights)
    if formats is not None:
        formats.check_used(the_spec.tensor_shapes(), str(weights))
    block_size = _block_size(resolved.path, formats)
    check_outliers(outliers, formats)
    prepared = _prepare(
        resolved, the_spec, formats, encoder, importance, act_order=act_order, damping=damping,
        outliers=outliers,
    )  # fmt: skip
    stored_spec, the_spec = the_spec, prepared.spec
    kv_formats(kv)  # raises for an unknown name
    if activations not in ACTIVATIONS:
        raise unknown_name("activations", activations, ACTIVATIONS)
    if max_step_tokens < 1:
        raise UsageError(f"max_step_tokens must be at least 1, got {max_step_tokens}")
    status.progress("MPI")
    comm = comm or world()
    placement = Placement(kv_host_percent, embeddings_on_host, cpu_layers)
    if partition == "auto":
        from nbflow.planner import Setting, choose_partition, stored_model

        setting = Setting(kv=kv, activations=activations, exchange=exchange)
        described = stored_model(stored_spec, resolved.path, weights)
        partition = choose_partition(described, comm, optimize, machine, setting)
    if placement.note and is_host(device):
        warnings.warn(placement.note, stacklevel=2)
    partition, device = placement.divide(the_spec.n_layers, partition, device)
    plans = [make_plan(the_spec, part, block_size, exchange) for part in split_replicas(partition)]
    whole = Plan("/".join(p.partition for p in plans), sum((p.ranks for p in plans), ()))
    places = find_places(device, len(whole.ranks), graphs)
    _check_ranks(whole, comm)
    status.progress("the tokenizer")
    tok, why_none = _tokenizer(tokenizer, resolved.tokenizer)
    if tok is not None and resolved.prompt_template is not None:
        tok.prompt_template = resolved.prompt_template
    if threads is None:
        threads = fair_threads(comm, whole.numbers)
    options: dict[str, Any] = {
        "spec": the_spec,
        "weights": formats,
        "encoding": prepared.encoding,
        "activations": activations,
        "kv": kv,
        "threads": threads,
        "max_step_tokens": max_step_tokens,
        "placement": placement,
    }
    # every rank takes part in every split
    parts = [comm.split(p.numbers) if comm.size > 1 else comm for p in plans]
    everyone = comm.split(whole.numbers) if comm.size > 1 else comm
    models, first = [], 0
    for p, part in zip(plans, parts, strict=True):
        mine, first = places[first : first + len(p.ranks)], first + len(p.ranks)
        if part is not None:
            engines, team = _start(p, part, resolved.path, prepared, mine, options)
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


def _prepare(
    resolved: ResolvedModel,
    spec: ModelSpec,
    formats: WeightFormats | None,
    encoder: str,
    importance: Any,
    **options: Any,
) -> Prepared:
    """Return what the encoder needs; nothing is read for the default one."""
    plain = {"act_order": False, "damping": DAMPING}
    if encoder == "best" and importance is None and plain.items() <= options.items():
        return Prepared(spec, Encoding(outliers=options["outliers"]))
    if formats is None:
        raise no_format(encoder)
    with open_weights(resolved.path) as file:
        check(spec, file)
        known = known_inputs(importance, resolved, file)

        def format_of(name: str) -> str | None:
            return formats.of(name, spec.shape_of(name))

        return prepare(spec, file, format_of, encoder, known, **options)


def check_outliers(outliers: float, formats: WeightFormats | None) -> None:
    """Raise unless `outliers` is a share that goes with the weight formats."""
    in_blocks = formats is not None and any(
        nk.FORMATS[format].block_size > 1 for _, format in formats.patterns
    )
    if check_ratio(outliers) and not in_blocks:
        found = None if formats is None else formats.patterns[0][1]
        raise UsageError(
            f"outliers={outliers:g} needs weights in a block format, got weights={found!r}; name "
            "one, e.g. weights='q4'"
        )


def _block_size(path: Path, formats: WeightFormats | None) -> int:
    """Return the least number of columns that holds whole blocks of every tensor in memory."""
    if formats is not None and formats.is_for_all:
        return formats.block_size
    with open_weights(path) as file:
        stored = stored_block_size(file)
    return stored if formats is None else math.lcm(formats.block_size, stored)


def stored_block_size(file: WeightFile) -> int:
    """Return the least number of columns that holds whole blocks of every tensor of a file."""
    formats = {file.dtype(name) for name in file.names()} - set(ITEM_BYTES)
    return math.lcm(1, *(nk.FORMATS[f].block_size for f in formats))


def _start(
    plan: Plan,
    comm: Comm,
    path: Path,
    prepared: Prepared,
    places: list[Place],
    options: dict[str, Any],
) -> tuple[list[RankEngine], RankTeam | None]:
    """Make the ranks of this process: one of `comm`, or all of them as threads."""

    def make(mine: Comm) -> RankEngine:
        groups, place = make_groups(plan, mine), places[mine.rank]
        place.activate()
        links = make_links(mine, plan, groups, place)
        engine, failure = None, None
        try:
            with open_weights(path) as stored, prepared.opened(stored) as file:
                check(options["spec"], file)
                engine = RankEngine(plan, file, mine, groups, place=place, links=links, **options)
        except (UsageError, OSError, MemoryError) as error:
            failure = error
        status.idle()  # the others may need longer: they are watched, too
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
    if failure is not None and not (comm.size > 1 and isinstance(failure, MemoryError)):
        raise failure
    for rank, other in enumerate(failures):
        if other is not None:
            what = "has not the memory for" if isinstance(other, MemoryError) else "could not load"
            raise UsageError(f"rank {rank} {what} its part: {other}") from other


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
