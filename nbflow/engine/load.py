"""`load`: from the name of a model to workers on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile, open_weights
from nbflow.checkpoint.readers.gguf import shared_headers
from nbflow.checkpoint.weight_file import ITEM_BYTES
from nbflow.conversion.importance_names import load_importance
from nbflow.distributed import Comm, Plan, make_plan, split_replicas, world
from nbflow.distributed.comm import make_groups
from nbflow.distributed.cpu_threads import cpu_threads, fair_threads
from nbflow.distributed.device import (
    Device,
    RankDevice,
    check_names,
    is_host,
    name_devices,
    split_host_layers,
)
from nbflow.distributed.device_comms import make_device_comms, warn_of_fallback
from nbflow.distributed.thread_ranks import ThreadRanks
from nbflow.engine.classification_head import ClassificationHead
from nbflow.engine.compile_ahead import compile_ahead
from nbflow.engine.llm import LLM
from nbflow.engine.rank_options import RankOptions
from nbflow.engine.replicas.offline import Replicas
from nbflow.engine.replicas.router import ReplicaRouter
from nbflow.engine.worker import Worker
from nbflow.executor.device_memory import DeviceMemory
from nbflow.executor.trace import TracePrinter
from nbflow.kv_cache.key_form import with_key_form
from nbflow.kv_cache.rotation import with_rotation
from nbflow.kv_cache.state_storage import with_state_format
from nbflow.option_fields import documents
from nbflow.options import LoadOptions
from nbflow.planner.machine import Machine
from nbflow.quantization.policy import WeightFormats, Weights, weight_formats
from nbflow.quantization.prepare import Prepared, no_format, prepare, quantizer_of
from nbflow.quantization.quantizer_options import QuantizerOptions
from nbflow.spec import check, load_tokenizer, resolve
from nbflow.spec.kv_formats import parse_kv
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.resolve import ResolvedModel
from nbflow.tokenization import Tokenizer, load_tokenizer_file
from nbflow.utils.rank_status import status
from nbflow_kernels.errors import MissingExtraError, UsageError
from nbflow_kernels.plugins import load_plugins, loaded_plugins
from nbflow_kernels.quantizers.outliers import check_ratio


@documents(LoadOptions)
@status.loading("the description of the model")
@shared_headers()
def load(
    model: str | Path,
    options: LoadOptions | None = None,
    *,
    comm: Comm | None = None,
    **changes: Any,
) -> LLM:
    """Load a model; each rank loads its shard.

    Parameters
    ----------
    model : str or Path
        A Hugging Face folder, a .safetensors file, a torch checkpoint, a .gguf, a llama2.c .bin, or
        the name of a model spec.
    options : LoadOptions, optional
        The options below as one object; those given as keywords replace its own.
    comm : Comm, optional
        Ranks to use; by default those started by mpirun.
    {options}

    Returns
    -------
    LLM

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
    given = (options or LoadOptions()).replaced(changes)
    load_plugins(given.plugins)
    resolved = resolve(model, spec=given.spec)
    source = _source(resolved, given)
    status.progress("MPI")
    comm = comm or world()
    _check_plugins(comm)
    if comm.size == 1 and is_host(given.device):
        compile_ahead(source.spec, given.kv, given.activations)
    plans, device = _plans(source, comm, given)
    whole = Plan("/".join(p.partition for p in plans), sum((p.ranks for p in plans), ()))
    check_names(device, len(whole.ranks))
    _check_ranks(whole, comm)
    status.progress("the tokenizer")
    tok, why_none = _tokenizer(given.tokenizer, resolved)
    threads = fair_threads(comm, whole.numbers) if given.threads is None else given.threads
    of_ranks = cpu_threads(comm, whole.numbers, threads, given.pin_threads)

    def llm(plan: Plan, workers: list[Worker], team: ThreadRanks | None) -> LLM:
        return LLM(source.spec, plan, tok, workers, team, threads, resolved.defaults, why_none)

    # split is collective
    parts = [comm.split(p.numbers) if comm.size > 1 else comm for p in plans]
    everyone = comm.split(whole.numbers) if comm.size > 1 else comm
    hosts = [0] * len(whole.ranks)
    if everyone is not None and everyone.size == len(hosts):
        hosts = everyone.hosts()
    places = iter(name_devices(device, hosts, given.graphs))
    models = []
    for p, part in zip(plans, parts, strict=True):
        mine = list(itertools.islice(places, len(p.ranks)))
        if part is not None:
            workers, team = _start(p, part, source, mine, of_ranks, given)
            warn_of_fallback(workers[0].executor.device_comms, part.rank)
            models.append(llm(p, workers, team))
    if not models or everyone is None:
        return llm(whole, [], None)
    loaded = models[0]
    if len(plans) > 1:
        index = next(i for i, part in enumerate(parts) if part is not None)
        loaded = Replicas(models, whole, everyone, index, len(plans), ReplicaRouter)
    if source.spec.classifier is not None:
        with open_weights(resolved.path) as file:
            loaded.classification_head = ClassificationHead.read(source.spec, file)
    return loaded


@dataclasses.dataclass(frozen=True)
class _Source:
    """Model as the options ask for it."""

    path: Path
    spec: ModelSpec
    untransformed: ModelSpec
    """Specification before weight transforms."""
    formats: WeightFormats | None
    prepared: Prepared
    block_size: int


def _source(resolved: ResolvedModel, given: LoadOptions) -> _Source:
    """Apply the options to a resolved model, and check them."""
    spec = with_state_format(_shorten(resolved.spec, given.max_context), given.state)
    weights = cast(Weights, given.weights)
    formats = weight_formats(weights)
    if formats is not None:
        where = "weights" if isinstance(weights, Mapping) else str(weights)
        formats.check_used(spec.tensor_shapes(), where)
    block_size = _block_size(resolved.path, formats)
    check_outliers(given.outliers, formats)
    prepared = _prepare(resolved, spec, formats, given)
    parse_kv(given.kv).check(prepared.spec.n_layers)
    final = with_rotation(prepared.spec, given.kv_rotation, given.kv)
    final = with_key_form(final, given.kv_keys)
    return _Source(resolved.path, final, spec, formats, prepared, block_size)


def _plans(source: _Source, comm: Comm, given: LoadOptions) -> tuple[list[Plan], str]:
    """Return the plan of each replica, and the devices; the planner chooses partition "auto"."""
    partition = given.partition
    if partition == "auto":
        from nbflow.planner import RunConfig, choose_partition, stored_model

        config = RunConfig(kv=given.kv, activations=given.activations, all_reduce=given.all_reduce)
        described = stored_model(source.untransformed, source.path, cast(Weights, given.weights))
        partition = choose_partition(
            described, comm, given.optimize, given.machine, config, measure
        )
    if given.unused_note and is_host(given.device):
        warnings.warn(given.unused_note, stacklevel=3)
    partition, device = split_host_layers(given, source.spec.n_layers, partition, given.device)
    plans = [
        make_plan(source.spec, part, source.block_size, given.all_reduce)
        for part in split_replicas(partition)
    ]
    return plans, device


def _check_plugins(comm: Comm) -> None:
    """Raise on every rank unless all have imported the same plugins; collective."""
    if comm.size == 1:
        return
    mine = [(plugin.path.name, plugin.sha256) for plugin in loaded_plugins()]
    ranks = comm.bcast_object(comm.gather_object(mine))
    for rank, found in enumerate(ranks):
        for name, _ in sorted(set(found) ^ set(ranks[0])):
            raise UsageError(
                f"plugin {name} is not the same file on rank {rank} and on rank 0; give all ranks "
                "the same plugins"
            )


def measure(
    comm: Comm, probe_bytes: int, formats: Sequence[str], arithmetics: Sequence[str]
) -> Machine | None:
    """Measure the machine for partition "auto"; the first rank returns the description."""
    from nbflow.planner.measure_machine import measure_ranks

    return measure_ranks(load, comm, probe_bytes, formats, arithmetics)


def _tokenizer(given: str | Path | None, resolved: ResolvedModel) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer, or None and the reason; callers with token ids need none."""
    if given is not None:
        tokenizer = load_tokenizer(given)
    elif resolved.tokenizer is None:
        return None, "has no tokenizer file next to its weights"
    else:
        try:
            tokenizer = load_tokenizer_file(resolved.tokenizer)
        except (UsageError, MissingExtraError) as error:
            return None, f"has a tokenizer that cannot be used ({error})"
    if resolved.prompt_template is not None:
        tokenizer.prompt_template = resolved.prompt_template
    return tokenizer, ""


def _prepare(
    resolved: ResolvedModel, spec: ModelSpec, formats: WeightFormats | None, given: LoadOptions
) -> Prepared:
    """Return spec and quantizer options; only non-default options read weights."""
    names = ("quantizer", "importance", "act_order", "damping")
    if all(getattr(given, name) == getattr(LoadOptions, name) for name in names):
        quantizer = quantizer_of(spec, given.quantizer)
        return Prepared(spec, QuantizerOptions(quantizer, outliers=given.outliers))
    if formats is None:
        raise no_format(given.quantizer)
    with open_weights(resolved.path) as file:
        check(spec, file)
        importance = cast(Any, given.importance)
        known = load_importance(importance, resolved, file)

        def format_of(name: str) -> str | None:
            return formats.of(name, spec.shape_of(name))

        return prepare(
            spec, file, format_of, given.quantizer, known, act_order=given.act_order,
            damping=given.damping, outliers=given.outliers,
        )  # fmt: skip


def check_outliers(outliers: float, formats: WeightFormats | None) -> None:
    """Raise `UsageError` unless `outliers` is a valid share for the weight formats."""
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
    """Return the least common multiple of the block sizes of the tensors in memory."""
    if formats is not None and formats.is_for_all:
        return formats.block_size
    with open_weights(path) as file:
        stored = stored_block_size(file)
    return stored if formats is None else math.lcm(formats.block_size, stored)


def stored_block_size(file: WeightFile) -> int:
    """Return the least common multiple of the block sizes of the tensors of a file."""
    formats = {file.dtype(name) for name in file.names()} - set(ITEM_BYTES)
    return math.lcm(1, *(nk.FORMATS[f].block_size for f in formats))


def _start(
    plan: Plan,
    comm: Comm,
    source: _Source,
    places: list[RankDevice],
    threads: Mapping[int, tuple[int, Sequence[int], bool]],
    given: LoadOptions,
) -> tuple[list[Worker], ThreadRanks | None]:
    """Create the workers of this process: one rank of `comm`, or all as threads."""
    options = RankOptions(
        source.formats, source.prepared.quantizer, given.activations, given.kv,
        given.max_step_tokens, given.offload,
    )  # fmt: skip

    def make(mine: Comm) -> Worker:
        groups, place = make_groups(plan, mine), _own_device(places[mine.rank], mine)
        for group in groups.values():
            group.agree_to_capture(place.name == "cpu")
        memory = DeviceMemory(place)
        memory.begin(mine)
        links = make_device_comms(mine, plan, groups, place)
        memory.note_communicators(len(links.comms))
        own = dataclasses.replace(
            options, threads=threads[plan.numbers[mine.rank]], place=place,
            trace=TracePrinter(mine.rank) if given.trace else None,
        )  # fmt: skip
        with _agreed(mine, "while loading its shard"):
            try:
                with open_weights(source.path) as stored, source.prepared.apply_to(stored) as file:
                    check(source.spec, file)
                    worker = Worker(
                        plan, file, mine, groups, source.spec, own, links=links,
                        device_memory=memory,
                    )  # fmt: skip
            finally:
                status.idle()  # the others may need longer
        memory.note_loaded()  # by all ranks
        return worker

    if comm.size == 1 and len(plan.ranks) > 1:
        team = ThreadRanks(len(plan.ranks))
        try:
            return team.run(make), team
        except BaseException:
            team.close()
            raise
    return [make(comm)], None


def _own_device(place: RankDevice, comm: Comm) -> Device:
    """Return the device of this rank as the current one; fails on every rank if one lacks its."""
    with _agreed(comm, "while looking for its device"):
        device = place.find()
        device.activate()
    return device


@contextlib.contextmanager
def _agreed(comm: Comm, when: str) -> Iterator[None]:
    """Raise on every rank if the block fails on one, so that none waits for it; collective."""
    failure: Exception | None = None
    try:
        yield
    except (UsageError, MissingExtraError, OSError, MemoryError) as error:
        failure = error
    failures = comm.bcast_object(comm.gather_object(failure))
    if failure is not None and not (comm.size > 1 and isinstance(failure, MemoryError)):
        raise failure
    for rank, other in enumerate(failures):
        if other is not None:
            what = "ran out of memory" if isinstance(other, MemoryError) else "failed"
            raise UsageError(f"rank {rank} {what} {when}: {other}") from other


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
