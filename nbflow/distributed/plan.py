"""Partition as a pure function: (specification, partition string, block size) -> plan.

Partition strings are explained in `nbflow.distributed.partition_notation`.

Pipeline stages get consecutive layers in proportion to their shares, the first stages one more if
the division is uneven.  The tensor parallel ranks of a stage split query and key/value heads,
feed-forward columns, experts, and the rows of embedding and head; key/value heads are replicated
where ranks outnumber them.  Columns are split between quantization blocks, so that every rank holds
exactly the blocks that one rank alone would hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbflow.distributed.partition_notation import format_stages, parse_stages
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.plugin_ops import OPS, OpPartition
from nbflow_kernels.errors import UsageError, unknown_name

Range = tuple[int, int]


@dataclass(frozen=True)
class RankPlan:
    """Shard of one rank."""

    rank: int
    """Number of the rank, as written in the partition string."""
    stage: int
    """Index of its stage."""
    group: tuple[int, ...]
    """Tensor parallel ranks of its stage, itself included."""
    layers: Range
    """Range of layers."""
    heads: Range
    """Range of query heads."""
    kv_heads: Range
    """Range of key/value heads."""
    ffn: Range
    """Range of feed-forward columns."""
    vocab: Range
    """Range of rows of the embedding (first stage) and of the head (last stage)."""
    first: bool
    """The rank is in the first pipeline stage, which holds the embedding."""
    last: bool
    """The rank is in the last pipeline stage, which holds the final norm and the head."""
    receives_from: int | None
    """Rank of the previous stage that sends it the hidden states."""
    sends_to: tuple[int, ...]
    """Ranks of the next stage that it sends the hidden states to."""
    experts: Range = (0, 0)
    """Range of experts."""
    shared: Range = (0, 0)
    """Range of columns of the shared expert."""
    channels: Range = (0, 0)
    """Range of channels of gated short convolutions, or of Mamba-1."""
    linear_heads: Range = (0, 0)
    """Range of key heads of linear attention, each with its value heads."""
    ssm_heads: Range = (0, 0)
    """Range of heads of Mamba-2."""
    plugin_heads: tuple[tuple[str, Range], ...] = ()
    """Range of heads of each op of a plugin (`nbflow.OpPartition`)."""
    vocab_widths: tuple[int, ...] = ()
    """Rows of embedding and head of each rank of the group."""
    all_reduce: str = "f32"
    """Payload of all-reduces: "f32", or quantized "q8"."""
    has_wide_neighbour: bool = False
    """A stage before or behind this one has several ranks."""

    @property
    def index(self) -> int:
        """Index within its stage."""
        return self.group.index(self.rank)


@dataclass(frozen=True)
class Plan:
    """Partition of a model over ranks."""

    partition: str
    """The partition string, in normal form."""
    ranks: tuple[RankPlan, ...]
    """One entry per rank, stages in order."""
    block_size: int = 1
    """Columns are split at multiples of it."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Rank numbers, stages in order."""
        return tuple(r.rank for r in self.ranks)

    @property
    def head_rank(self) -> int:
        """Rank that samples: the first of the last stage."""
        return self.ranks[-1].group[0]

    def of(self, rank: int) -> RankPlan:
        """Return the entry of rank number `rank`."""
        return next(r for r in self.ranks if r.rank == rank)


ALL_REDUCE_FORMATS = ("f32", "q8")


def make_plan(
    spec: ModelSpec, partition: str, block_size: int = 1, all_reduce: str = "f32"
) -> Plan:
    """Partition a model.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    partition : str
        Partition string.
    block_size : int
        Block of the weight format; columns are split at multiples of it.
    all_reduce : {"f32", "q8"}
        Payload of all-reduces: float32, or int8 with a scale per 32 numbers
        (`Comm.Allreduce_q8`).

    Raises
    ------
    UsageError
        If `all_reduce` is unknown, or the model has too few layers, heads or blocks for the
        partition.
    """
    if all_reduce not in ALL_REDUCE_FORMATS:
        raise unknown_name("all_reduce", all_reduce, ALL_REDUCE_FORMATS)
    stages = parse_stages(partition)
    if len(stages) > spec.n_layers:
        raise UsageError(
            f"partition {partition!r} has {len(stages)} stages, but {spec.name} has only "
            f"{spec.n_layers} layers; use at most that many stages"
        )
    groups = [tuple(member.rank for member in stage) for stage in stages]
    layers = split_by_shares(spec.n_layers, [sum(m.share for m in stage) for stage in stages])
    ranks = []
    for s, (stage, group) in enumerate(zip(stages, groups, strict=True)):
        parts = _split_stage(spec, [member.share for member in stage], block_size, partition)
        before = groups[s - 1] if s else ()
        after = groups[s + 1] if s + 1 < len(groups) else ()
        for j, rank in enumerate(group):
            ranks.append(
                RankPlan(
                    rank,
                    s,
                    group,
                    layers[s],
                    **{field: ranges[j] for field, ranges in parts.items()},
                    first=not before,
                    last=not after,
                    receives_from=before[j % len(before)] if before else None,
                    sends_to=tuple(r for i, r in enumerate(after) if i % len(group) == j),
                    vocab_widths=tuple(b - a for a, b in parts["vocab"]),
                    all_reduce=all_reduce,
                    has_wide_neighbour=max(len(before), len(after)) > 1,
                )
            )
    return Plan(format_stages(stages), tuple(ranks), block_size)


def _split_stage(
    spec: ModelSpec, shares: Sequence[float], block_size: int, partition: str
) -> dict[str, list[Any]]:
    """Return the ranges of each rank of a stage by their fields in `RankPlan`."""
    n = len(shares)
    parts: dict[str, list[Any]] = {"vocab": split_by_shares(spec.vocab_size, shares)}
    heads = [((0, 0), (0, 0))] * n
    if spec.mixers & {"attention", "lightning_attention"}:
        heads = _split_heads(spec, shares, block_size, partition)
    parts["heads"], parts["kv_heads"] = map(list, zip(*heads, strict=True))
    parts["ffn"] = [(0, 0)] * n
    if any(spec.kind_of(i).feed_forward for i in range(spec.n_layers)):
        size = spec.intermediate_size
        parts["ffn"] = _split_aligned(size, shares, block_size, "intermediate_size", partition)
    parts["experts"], parts["shared"] = _split_experts(spec, shares, block_size, partition)
    recurrent = _split_recurrent(spec, shares, block_size, partition)
    parts["channels"], parts["linear_heads"] = recurrent
    parts["ssm_heads"] = _split_state_space(spec, shares, block_size, partition)
    parts["plugin_heads"] = _split_plugin_ops(spec, shares, partition)
    return parts


def split_by_shares(total: int, shares: Sequence[float]) -> list[Range]:
    """Split [0, total) into ranges proportional to the shares, none empty if possible.

    Equal shares give lengths that differ by at most one, the longer ones first.

    Examples
    --------
    >>> split_by_shares(8, [3, 1])
    [(0, 6), (6, 8)]
    """
    exact = [total * share / sum(shares) for share in shares]
    least = min(1, total // len(shares))
    sizes = [max(least, int(size)) for size in exact]
    while sum(sizes) < total:
        i = max(range(len(sizes)), key=lambda i: (exact[i] - sizes[i], -i))
        sizes[i] += 1
    while sum(sizes) > total:
        i = max(range(len(sizes)), key=lambda i: (sizes[i] > least, sizes[i] - exact[i]))
        sizes[i] -= 1
    edges = [0, *itertools.accumulate(sizes)]
    return list(itertools.pairwise(edges))


def split_evenly(total: int, n: int) -> list[Range]:
    """Split [0, total) into `n` ranges whose lengths differ by at most one, longer ones first."""
    return split_by_shares(total, [1.0] * n)


def _split_aligned(
    total: int, shares: Sequence[float], unit: int, what: str, partition: str
) -> list[Range]:
    """Split [0, total) at multiples of `unit`; the last range takes the remainder."""
    units, n = -(-total // unit), len(shares)
    if units < n:
        raise UsageError(
            f"partition {partition!r}: {what} = {total} has {units} blocks of {unit} columns, too "
            f"few for {n} ranks; use fewer ranks per stage or a format with a smaller block"
        )
    return [(a * unit, min(b * unit, total)) for a, b in split_by_shares(units, shares)]


def _split_experts(
    spec: ModelSpec, shares: Sequence[float], block_size: int, partition: str
) -> tuple[list[Range], list[Range]]:
    """Return the experts of each rank, and its columns of the shared one."""
    n = len(shares)
    none = [(0, 0)] * n
    if spec.moe is None:
        return none, none
    if spec.moe.n_experts < n:
        raise UsageError(
            f"partition {partition!r}: {spec.name} has {spec.moe.n_experts} experts, too few for "
            f"{n} ranks; use fewer ranks per stage"
        )
    size = spec.moe.shared_size
    shared = _split_aligned(size, shares, block_size, "shared_size", partition) if size else none
    return split_by_shares(spec.moe.n_experts, shares), shared


def _split_recurrent(
    spec: ModelSpec, shares: Sequence[float], block_size: int, partition: str
) -> tuple[list[Range], list[Range]]:
    """Return the channels of each rank (short convolutions, Mamba-1), and its recurrent heads."""
    n = len(shares)
    channels = heads = [(0, 0)] * n
    if "short_conv" in spec.mixers:
        size = spec.hidden_size
        channels = _split_aligned(size, shares, block_size, "hidden_size", partition)
    if spec.selective is not None:
        size = spec.selective.width
        channels = _split_aligned(size, shares, block_size, "mamba1_width", partition)
    if spec.delta is not None and n == 1:
        heads = [(0, spec.delta.key_heads)]
    elif spec.delta is not None:
        total, width = spec.delta.key_heads, spec.delta.group * spec.delta.value_dim
        unit = _heads_per_unit(block_size, width)
        if total % unit or total // unit < n:
            raise _too_few_groups(spec, n, block_size, partition, f"{total} groups of {width}")
        heads = [(a * unit, b * unit) for a, b in split_by_shares(total // unit, shares)]
    return channels, heads


def _split_state_space(
    spec: ModelSpec, shares: Sequence[float], block_size: int, partition: str
) -> list[Range]:
    """Return the heads of Mamba-2 of each rank.

    Ranks get whole groups of heads.  If there are fewer groups than ranks, each gets heads of one
    group, whose input and output vectors all its ranks compute.
    """
    ssm, n = spec.ssm, len(shares)
    if ssm is None:
        return [(0, 0)] * n
    if n == 1:
        return [(0, ssm.heads)]
    norm_groups = ssm.groups if ssm.norm == "none" else ssm.norm_groups
    for n_parts in (math.gcd(ssm.groups, norm_groups), ssm.groups, ssm.heads):
        unit = ssm.heads // n_parts
        unit *= _heads_per_unit(block_size, unit * ssm.head_dim)
        if ssm.heads % unit or ssm.heads // unit < n:
            continue
        cuts = [(a * unit, b * unit) for a, b in split_by_shares(ssm.heads // unit, shares)]
        columns = [(a * ssm.head_dim, b * ssm.head_dim) for a, b in cuts]
        group, norm_group = ssm.heads // ssm.groups, ssm.width // norm_groups
        fits = all(_is_whole(cut, group) or _is_inside(cut, group) for cut in cuts)
        # All ranks take part in the sums of a norm, or none.
        if fits and any(all(f(c, norm_group) for c in columns) for f in (_is_whole, _is_inside)):
            return cuts
    groups = f"{ssm.heads} heads in {ssm.groups} groups, with norms of {norm_groups} groups,"
    raise _too_few_groups(spec, n, block_size, partition, f"{groups} of {ssm.width}")


def _is_whole(part: Range, size: int) -> bool:
    """Return True if a range consists of whole groups of this size."""
    return part[0] % size == part[1] % size == 0


def _is_inside(part: Range, size: int) -> bool:
    """Return True if a range is a part of one group of this size."""
    return part[0] // size == (part[1] - 1) // size and part[1] - part[0] < size


def _too_few_groups(
    spec: ModelSpec, n: int, block_size: int, partition: str, found: str
) -> UsageError:
    return UsageError(
        f"partition {partition!r}: the recurrent layers of {spec.name} have {found} columns, "
        f"which cannot be dealt out to {n} ranks in whole heads or groups and whole blocks of "
        f"{block_size} columns; use fewer ranks per stage and more stages, or a format with a "
        "smaller block"
    )


def _split_plugin_ops(
    spec: ModelSpec, shares: Sequence[float], partition: str
) -> list[tuple[tuple[str, Range], ...]]:
    """Return the heads of the ops of plugins of each rank."""
    kinds = (spec.kind_of(i) for i in range(spec.n_layers))
    names = dict.fromkeys(n for kind in kinds for n in (kind.op, kind.feed_forward_op) if n)
    found: list[tuple[tuple[str, Range], ...]] = [()] * len(shares)
    for name in names:
        if not isinstance(OPS[name].partition, OpPartition):
            continue
        heads = OPS[name].n_heads(spec)
        if heads < len(shares):
            raise UsageError(
                f"partition {partition!r}: op {name!r} of a plugin has {heads} heads, too few for "
                f"{len(shares)} ranks; use fewer ranks per stage"
            )
        cuts = split_by_shares(heads, shares)
        found = [(*before, (name, cut)) for before, cut in zip(found, cuts, strict=True)]
    return found


def _split_heads(
    spec: ModelSpec, shares: Sequence[float], block_size: int, partition: str
) -> list[tuple[Range, Range]]:
    """Return the query heads and key/value heads of each rank."""
    n = len(shares)
    per_group = spec.n_heads // spec.n_kv_heads
    value_dims = {spec.value_dim}
    if spec.local_heads is not None:
        value_dims.add(spec.local_heads.value_dim)
    unit = math.lcm(*(_heads_per_unit(block_size, per_group * dim) for dim in value_dims))
    if n == 1:
        return [((0, spec.n_heads), (0, spec.n_kv_heads))]
    if spec.n_kv_heads // unit >= n and spec.n_kv_heads % unit == 0:
        cuts = split_by_shares(spec.n_kv_heads // unit, shares)
        return [
            ((a * unit * per_group, b * unit * per_group), (a * unit, b * unit)) for a, b in cuts
        ]
    # Fewer key/value heads than ranks: several ranks store the same one and share its query heads.
    if len(set(shares)) > 1:
        raise UsageError(
            f"partition {partition!r}: {spec.name} has {spec.n_kv_heads} key/value heads for {n} "
            "ranks, so that ranks share them, which goes with equal shares only; leave the shares "
            "within a stage out or use fewer ranks per stage"
        )
    unit = math.lcm(*(_heads_per_unit(block_size, dim) for dim in value_dims))
    holders = split_evenly(n, spec.n_kv_heads) if n >= spec.n_kv_heads else []
    if not holders or per_group % unit or any(b - a > per_group // unit for a, b in holders):
        raise UsageError(
            f"partition {partition!r}: {spec.name} has {spec.n_heads} query heads and "
            f"{spec.n_kv_heads} key/value heads of {spec.value_dim} columns, which cannot be dealt "
            f"out to {n} ranks in whole heads and whole blocks of {block_size} columns; use fewer "
            "ranks per stage or a format with a smaller block"
        )
    result = []
    for g, (a, b) in enumerate(holders):
        for c, d in split_evenly(per_group // unit, b - a):
            first = g * per_group
            result.append(((first + c * unit, first + d * unit), (g, g + 1)))
    return result


def _heads_per_unit(block_size: int, columns: int) -> int:
    """Return the smallest number of heads of `columns` columns that fills whole blocks."""
    return math.lcm(block_size, columns) // columns
