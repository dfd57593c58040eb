"""Shard a program for one rank and insert communication.

Tensor parallel ranks of a pipeline stage split q, k, v, gate, up and the head by rows (column
parallel), o and down by columns (row parallel), with two all-reduces per layer.  Recurrent mixers
split channels or heads, and their states with them.  The token
embedding is split by rows: a rank writes zeros for tokens of others, and an all-reduce adds them.
Latent attention (MLA) splits its matrices by heads; latent vectors and their cache are replicated,
and so are an indexer and its selection of keys.
Experts are distributed whole (expert parallel) and summed by the same all-reduce.  Pipeline stages
send each other the hidden states (all residual streams), per-layer embeddings, and the keys and
values of layers whose cache a later stage reads, too.
"""

from __future__ import annotations

import dataclasses
from string import digits

from nbflow.distributed.plan import RankPlan
from nbflow.program.layer_ops import ffn_name, gate, qkv_names
from nbflow.program.records import Buffer, Op, Operand, Program, expert_parts
from nbflow.spec.layer_specs import BIAS_COLUMNS, HeadShape
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.plugin_ops import OPS, OpPartition
from nbflow_kernels.errors import UsageError

ROW_PARALLEL = (
    "attn.o", "attn.mask", "cross.o", "ffn.down", "shared.down", "short.out", "delta.out",
    "ssm.out", "mamba1.out", "mamba1.dt_a", "mamba1.b", "mamba1.c", "lightning.out",
)  # fmt: skip
"""Matrices split by columns, whose partial results an all-reduce sums."""


_PARTIAL = ("o", "nt_nb_nc", "kb")
"""Buffers of partial results."""


def _base(program: Program, name: str) -> str | None:
    """Return the whole buffer of a name that stands for some of its columns."""
    return program.buffers[name].base if name in program.buffers else None


def partition(program: Program, plan: RankPlan) -> Program:
    """Return the program of one rank."""
    spec = program.spec
    cuts = _cuts(program, plan)
    ops: list[Op] = []
    before, behind = (_boundary(program, layer, plan) for layer in plan.layers)
    if plan.receives_from is not None:
        ops += (Op("recv", name, attrs={"peer": plan.receives_from}) for name in before)
        ops += _append_carried(program, plan)
    after_layers = False
    partial = ""  # buffer of partial results
    for op in program.ops:
        if op.layer is None:
            ops += _outside_layers(op, plan, after_layers, spec)
            continue
        after_layers = True
        if not plan.layers[0] <= op.layer < plan.layers[1]:
            continue
        if len(plan.group) == 1:
            ops.append(op)
            continue
        if partial and any(partial in (name, _base(program, name)) for name in op.inputs):
            attrs = {"ranks": plan.group, "all_reduce": plan.all_reduce}
            ops.append(Op("all_reduce", partial, layer=op.layer, attrs=attrs))
            partial = ""
        ops += _sharded(program, op, plan, cuts)
        if _is_partial(op):
            partial = op.out
    _check_selection(ops)
    if plan.sends_to:
        ops += (Op("send", name, (name,), attrs={"peers": plan.sends_to}) for name in behind)
    heads = plan.heads[1] - plan.heads[0], plan.kv_heads[1] - plan.kv_heads[0]
    return Program(
        spec,
        tuple(ops),
        _buffers(program, plan, ops),
        *heads,
        tuple(range(*plan.layers)),
        plan.heads[0],
    )


def _sharded(
    program: Program, op: Op, plan: RankPlan, cuts: dict[str, tuple[int, int]]
) -> list[Op]:
    """Shard an op of a layer among the ranks of a stage, with the sums that it needs."""
    spec, layer = program.spec, op.layer or 0
    if op.kind == "norm" and (op.out == "ly" or (op.out in "qk" and spec.qk_norm == "all")):
        return _sharded_norm(program, op, plan, cuts)
    if op.kind == "gated_norm" and _cuts_groups(op, cuts):
        return _sharded_gated_norm(program, op, plan, cuts)
    if spec.local_heads is not None and spec.is_local(layer):
        cuts = cuts | _local_cuts(spec, spec.local_heads, plan)
    if spec.ffn_size(layer) != spec.intermediate_size:
        cut = _ffn_cut(spec, plan, spec.ffn_size(layer))
        cuts = cuts | dict.fromkeys(("ffn.gate", "ffn.up", "ffn.down"), cut)
    sums: list[Op] = []
    if op.kind == "gaussian_topk":
        sums = [Op("all_reduce", op.inputs[1], layer=layer, attrs={"ranks": plan.group})]
    return [*sums, _inside_layer(op, plan, cuts, spec)]


def carried_layers(spec: ModelSpec, layer: int) -> tuple[int, ...]:
    """Return the layers before `layer` whose keys and values it or later ones attend to."""
    later = (spec.kv_source(i) for i in range(layer, spec.n_layers))
    return tuple(sorted({source for source in later if source < layer}))


def _boundary(program: Program, layer: int, plan: RankPlan) -> tuple[str, ...]:
    """Return the buffers that the stages before and behind the start of a layer exchange."""
    spec, carried = program.spec, tuple[int, ...]()
    if "x" not in program.buffers:  # keys and values of an encoder's states
        return ()
    names = ["x" if spec.streams == 1 else "xs", *["pe"] * bool(spec.layer_embed_size)]
    if 0 < layer < spec.n_layers:
        carried = carried_layers(spec, layer)
    if carried and (len(plan.group) > 1 or plan.has_wide_neighbour):
        raise UsageError(
            f"partition: a stage begins with layer {layer}, behind layer {carried[-1]} whose keys "
            "and values later layers use (kv_shared_layers), which goes with one rank per stage "
            f"only; begin it with layer {carried[0]} or an earlier one"
        )
    return (*names, *(name for i in carried for name in carried_buffers(program, i)))


def carried_buffers(program: Program, layer: int) -> tuple[str, ...]:
    """Return the buffers of keys and values of a layer."""
    found = (op for op in program.ops if op.kind == "append_kv" and op.layer == layer)
    return next(found).inputs


def _append_carried(program: Program, plan: RankPlan) -> list[Op]:
    """Return the ops that store the keys and values of earlier stages that this one reads."""
    spec, (first, end) = program.spec, plan.layers
    read = sorted({spec.kv_source(i) for i in range(first, end)} & set(range(first)))
    return [Op("append_kv", "kv", carried_buffers(program, i), layer=i) for i in read]


def _check_selection(ops: list[Op]) -> None:
    """Raise if a stage begins with a layer that shares the keys that an earlier one selects."""
    first = next((op for op in ops if op.kind in ("select_keys", "sparse_attention")), None)
    if first is not None and first.kind == "sparse_attention":
        raise UsageError(
            f"partition: a stage begins with layer {first.layer}, which attends to the keys that "
            "the layer before it selects (index_types); begin it with a full layer"
        )


def _buffers(program: Program, plan: RankPlan, ops: list[Op]) -> dict[str, Buffer]:
    """Return the buffers of a rank's ops, as wide as its shard."""
    spec, widths = program.spec, _widths(program, plan)
    used = {name for op in ops for name in (op.out, *op.inputs)}
    whole = {**program.buffers, "logits_part": Buffer(0, "logits"), "squares": Buffer(2)}
    whole["square"] = Buffer(1 if spec.ssm is None else spec.ssm.norm_groups)
    found = {}
    for name, buffer in whole.items():
        if name in used:
            width = widths.get(name, buffer.width)
            offset = 0 if buffer.base is None else buffer.offset * width // max(1, buffer.width)
            found[name] = dataclasses.replace(buffer, width=width, offset=offset)
    return found


def _widths(program: Program, plan: RankPlan) -> dict[str, int]:
    """Return the widths of the buffers that hold the rank's columns."""
    spec = program.spec
    cuts = {name: b - a for name, (a, b) in _cuts(program, plan).items()}
    heads, kv_heads = plan.heads[1] - plan.heads[0], plan.kv_heads[1] - plan.kv_heads[0]
    widths = {
        "q": cuts["attn.q"],
        "a": cuts["attn.o"],
        "qe": heads * (spec.head_dim + BIAS_COLUMNS),
        "ke": kv_heads * (spec.head_dim + BIAS_COLUMNS),
        "ql": heads * spec.cached_dim,
        "al": cuts["attn.latent"],
        "k": cuts["attn.k"],
        "v": cuts["attn.v"],
        **dict.fromkeys(("gate", "up", "f"), cuts["ffn.up"]),
        **dict.fromkeys(("sgate", "sup", "sf"), cuts["shared.up"]),
        "ag": cuts["attn.gate"],
        **dict.fromkeys(("sb", "sc", "sx", "sy"), cuts["short.x"]),
        **dict.fromkeys(("dq", "dk", "cq", "ck"), cuts["delta.q"]),
        **dict.fromkeys(("dv", "dz", "cv", "dy"), cuts["delta.v"]),
        "db": cuts["delta.b"],
        "da": cuts["delta.a"],
        **dict.fromkeys(("lq", "lk", "lv", "lg", "ly"), cuts["lightning.q"]),
        "lq_lk_lv": 3 * cuts["lightning.q"],
        **dict.fromkeys(("mz", "mx", "ux", "my"), cuts["ssm.x"]),
        **dict.fromkeys(("mb", "mc", "ub", "uc"), cuts["ssm.b"]),
        "mdt": cuts["ssm.dt"],
        **dict.fromkeys(("nx", "nz", "vx", "ndt", "ny"), cuts["mamba1.x"]),
        "logits_part": plan.vocab[1] - plan.vocab[0],
    }
    if spec.local_heads is not None:
        local = _local_cuts(spec, spec.local_heads, plan)
        roles = {"qw": "q", "kw": "k", "vw": "v", "aw": "o", "agw": "gate"}
        for name, role in roles.items():
            first, end = local[f"attn.{role}"]
            widths[name] = end - first
    for i in spec.kv_sources:
        widths |= {name: widths[name.rstrip(digits)] for name in qkv_names(spec, i)}
    for size in {spec.ffn_size(i) for i in range(spec.n_layers)}:
        first, end = _ffn_cut(spec, plan, size)
        names = (ffn_name(spec, name, size) for name in ("gate", "up", "f"))
        widths |= dict.fromkeys(names, end - first)
    return widths


def _cuts(program: Program, plan: RankPlan) -> dict[str, tuple[int, int]]:
    """Return the rows (or columns) of each kind of matrix that the rank holds."""
    spec = program.spec
    D, Dv = spec.head_dim, spec.value_dim
    C = 0 if spec.latent is None else spec.latent.kv_rank
    q = (plan.heads[0] * D, plan.heads[1] * D)
    kv = (plan.kv_heads[0] * D, plan.kv_heads[1] * D)
    out = (plan.heads[0] * Dv, plan.heads[1] * Dv)
    return {
        **_recurrent_cuts(program, plan),
        **dict.fromkeys(("attn.q", "cross.q"), q),
        **dict.fromkeys((f"lightning.{n}" for n in ("q", "k", "v", "gate", "out")), q),
        **dict.fromkeys(("attn.o", "attn.gate", "cross.o"), out),
        "attn.latent": (plan.heads[0] * C, plan.heads[1] * C),
        **dict.fromkeys(("attn.k", "cross.k"), kv),
        **dict.fromkeys(
            ("attn.v", "cross.v", "attn.mask"), (plan.kv_heads[0] * Dv, plan.kv_heads[1] * Dv)
        ),
        **dict.fromkeys(("ffn.gate", "ffn.up", "ffn.down"), plan.ffn),
        **dict.fromkeys(("shared.gate", "shared.up", "shared.down"), plan.shared),
    }


def _ffn_cut(spec: ModelSpec, plan: RankPlan, size: int) -> tuple[int, int]:
    """Return the columns of a feed-forward network of this width that the rank holds."""
    first, end = (n * size for n in plan.ffn)
    if first % spec.intermediate_size or end % spec.intermediate_size:
        raise UsageError(
            f"partition: a feed-forward network of width {size} cannot be divided like those of "
            f"width {spec.intermediate_size}, of which a rank has columns {plan.ffn[0]} to "
            f"{plan.ffn[1] - 1}; use one rank per stage"
        )
    return first // spec.intermediate_size, end // spec.intermediate_size


def _local_cuts(spec: ModelSpec, local: HeadShape, plan: RankPlan) -> dict[str, tuple[int, int]]:
    """Return the cuts of attention in the layers with the window, which have heads of their own."""
    first, end = plan.heads
    group = spec.n_heads // local.n_kv_heads
    kv = first // group, -(-end // group)
    if kv[1] - kv[0] > 1 and (first % group or end % group):
        raise UsageError(
            f"partition: query heads {first} to {end - 1} of a rank are not whole groups of the "
            f"{group} heads that share a key/value head in the layers with the window "
            f"(local_n_kv_heads = {local.n_kv_heads}); use fewer ranks per stage"
        )

    def columns(heads: tuple[int, int], width: int) -> tuple[int, int]:
        return heads[0] * width, heads[1] * width

    return {
        "attn.q": columns(plan.heads, local.key_dim),
        "attn.k": columns(kv, local.key_dim),
        "attn.v": columns(kv, local.value_dim),
        **dict.fromkeys(("attn.o", "attn.gate"), columns(plan.heads, local.value_dim)),
    }


def _recurrent_cuts(program: Program, plan: RankPlan) -> dict[str, tuple[int, int]]:
    """Return the cuts of recurrent mixers: channels, key heads and their value heads."""
    cuts = dict.fromkeys(
        (
            *(f"short.{name}" for name in ("b", "c", "x", "conv", "out")),
            *(f"mamba1.{name}" for name in ("x", "z", "conv", "dt_a", "b", "c", "dt", "out")),
        ),
        plan.channels,
    )
    delta, (first, end) = program.spec.delta, plan.linear_heads
    group, key, value = (
        (0, 0, 0) if delta is None else (delta.group, delta.key_dim, delta.value_dim)
    )
    keys = first * key, end * key
    heads = first * group, end * group
    values = heads[0] * value, heads[1] * value
    return {
        **cuts,
        **dict.fromkeys(("delta.q", "delta.k", "delta.q_conv", "delta.k_conv"), keys),
        **dict.fromkeys(("delta.v", "delta.z", "delta.v_conv", "delta.out"), values),
        "delta.b": heads,
        "delta.a": keys if delta is not None and delta.decay == "channel" else heads,
        **_state_space_cuts(program, plan),
    }


def _state_space_cuts(program: Program, plan: RankPlan) -> dict[str, tuple[int, int]]:
    """Return the cuts of Mamba-2: heads, and the vectors of the groups that they belong to."""
    ssm, heads = program.spec.ssm, plan.ssm_heads
    width = vectors = (0, 0)
    if ssm is not None:
        N, per_group = ssm.state_dim, ssm.heads // ssm.groups
        width = heads[0] * ssm.head_dim, heads[1] * ssm.head_dim
        vectors = heads[0] // per_group * N, -(-heads[1] // per_group) * N
    return {
        **dict.fromkeys(("ssm.z", "ssm.x", "ssm.x_conv", "ssm.norm", "ssm.out"), width),
        **dict.fromkeys(("ssm.b", "ssm.c", "ssm.b_conv", "ssm.c_conv"), vectors),
        "ssm.dt": heads,
    }


def _outside_layers(op: Op, plan: RankPlan, after_layers: bool, spec: ModelSpec) -> list[Op]:
    """Shard an op before (first stage) or after (last stage) the layers."""
    if op.kind == "input":  # all ranks have the rows
        return [op]
    if not (plan.last if after_layers else plan.first):
        return []
    if len(plan.group) == 1:
        return [op]
    if op.kind == "embedding" and op.attrs.get("index", "ids") == "ids":
        n_rows = op.attrs.get("rows", spec.vocab_size)
        first, end = (n * n_rows // spec.vocab_size for n in plan.vocab)
        cut = first, end
        rows = (Operand(op.weights[0].name, rows=cut),)
        part = dataclasses.replace(op, weights=rows, attrs={**op.attrs, "first_row": cut[0]})
        return [part, Op("all_reduce", op.out, attrs={"ranks": plan.group})]
    if op.kind != "linear" or op.out != "logits":
        return [op]
    part = dataclasses.replace(
        op,
        out="logits_part",
        weights=(Operand(op.weights[0].name, rows=plan.vocab),),
        bias=tuple(Operand(b.name, rows=plan.vocab) for b in op.bias),
    )
    attrs = {"ranks": plan.group, "widths": plan.vocab_widths}
    return [part, Op("all_gather", op.out, ("logits_part",), attrs=attrs)]


def _inside_layer(op: Op, plan: RankPlan, cuts: dict[str, tuple[int, int]], spec: ModelSpec) -> Op:
    if op.kind == "experts":
        return _shard_experts(op, plan.experts)
    if op.kind == "retrieve":
        n, width = spec.retrieved_experts, spec.intermediate_size
        held = n * plan.ffn[0] // width, n * plan.ffn[1] // width
        tables = tuple(Operand(w.name, rows=held) for w in op.weights)
        return dataclasses.replace(op, weights=tables, attrs={**op.attrs, "experts": held})
    if op.kind == "plugin":
        return _shard_plugin_op(op, plan, spec)
    if op.attrs.get("own_weights"):
        rows = cuts[f"attn.{op.out[0]}"]
        D = op.attrs.get("head", spec.head_dim)
        heads = rows[0] // D, rows[1] // D
        return dataclasses.replace(op, weights=op.weights[slice(*heads)])
    if op.kind == "extend_keys":
        rate = tuple(Operand(w.name, rows=plan.kv_heads) for w in op.weights)
        return dataclasses.replace(op, weights=rate, attrs={**op.attrs, "first": plan.kv_heads[0]})
    if op.kind == "heads_linear":
        return dataclasses.replace(op, weights=op.weights[slice(*plan.heads)])
    if op.kind == "attention":
        if op.attrs.get("key_bias"):
            table = tuple(Operand(w.name, rows=cuts["attn.k"]) for w in op.weights)
        else:
            table = tuple(Operand(w.name, columns=plan.heads) for w in op.weights)
        sinks = tuple(Operand(b.name, rows=plan.heads) for b in op.bias)
        return dataclasses.replace(op, weights=table, bias=sinks)
    if op.kind == "lightning":
        n, slopes = plan.heads[1] - plan.heads[0], op.attrs["slopes"][slice(*plan.heads)]
        state = (n, *op.attrs["state"][1:])
        return dataclasses.replace(op, attrs={**op.attrs, "state": state, "slopes": slopes})
    if "state" in op.attrs or op.kind in ("log_decay", "gated_norm"):
        return _shard_recurrent(op, cuts)
    if op.kind != "linear" or op.out == "router":
        return op
    role = _role(op)
    if role == "experts.out" and plan.index > 0:  # of partial sums: one rank adds the bias
        return dataclasses.replace(op, bias=())
    if role not in cuts:  # attn.q_a, attn.kv_a: replicated
        return op
    if role not in ROW_PARALLEL:
        bias = tuple(Operand(b.name, rows=cuts[role]) for b in op.bias)
        weights = tuple(Operand(w.name, rows=cuts[role]) for w in op.weights)
        return dataclasses.replace(op, weights=weights, bias=bias)
    # One rank adds the bias of the sum.
    return dataclasses.replace(
        op,
        weights=tuple(Operand(w.name, columns=cuts[role]) for w in op.weights),
        bias=op.bias if plan.index == 0 else (),
    )


def _shard_plugin_op(op: Op, plan: RankPlan, spec: ModelSpec) -> Op:
    """Shard the weights and the state of an op of a plugin by its rule."""
    found = OPS[op.attrs["op"]]
    if found.partition is None:
        raise UsageError(
            f"layer {op.layer}: op {found.name!r} of a plugin cannot be divided among ranks "
            f"{'&'.join(map(str, plan.group))}: it has no partition (nbflow.register_op); give it "
            "one, or use one rank, or stages of a rank each, e.g. partition '0;1'"
        )
    if found.partition == "replicated":
        return op
    heads = dict(plan.plugin_heads)[found.name]
    weights = tuple(
        Operand(operand.name, *found.shard(spec, heads, name))
        for operand, name in zip(op.weights, found.weights, strict=True)
    )
    attrs = dict(op.attrs)
    if "state" in attrs:
        cuts = found.shard(spec, heads, "state")
        attrs["state"] = Operand("state", *cuts).shape(attrs["state"])
    columns = found.shard(spec, heads, "x")[1]
    if columns is not None:
        attrs["columns"] = columns
    return dataclasses.replace(op, weights=weights, attrs=attrs)


def _is_partial(op: Op) -> bool:
    """Return True if the ranks' results of an op have to be added."""
    if op.kind == "plugin":
        rule = OPS[op.attrs["op"]].partition
        return isinstance(rule, OpPartition) and rule.all_reduce
    return op.out in _PARTIAL and op.kind != "norm"


_HEADS_OF = {
    "mamba1": "mamba1.x",
    "mamba2": "ssm.dt",
    "delta_rule": "delta.b",
}
"""Kind of op without matrices -> matrix whose rows are cut alike."""


def _role(op: Op) -> str:
    """Return the name of an op's first weight without its layer."""
    return op.weights[0].name.split(".", 2)[2].removesuffix(".weight")


def _shard_recurrent(op: Op, cuts: dict[str, tuple[int, int]]) -> Op:
    """Shard a recurrent op and its state by channels (convolutions) or heads."""
    role = _role(op) if op.weights else ""
    if role == "delta.norm":  # of each head
        return op
    if op.kind == "log_decay":
        a_log, dt_bias = (w.name for w in op.weights)
        parts = Operand(a_log, rows=cuts["delta.b"]), Operand(dt_bias, rows=cuts["delta.a"])
        return dataclasses.replace(op, weights=parts)
    rows = cuts.get(role) or cuts[_HEADS_OF[op.kind]]
    weights = tuple(Operand(w.name, rows=rows) for w in op.weights)
    bias = tuple(Operand(b.name, rows=rows) for b in op.bias)
    attrs = dict(op.attrs)
    if "state" in attrs:
        attrs["state"] = (rows[1] - rows[0], *attrs["state"][1:])
    return dataclasses.replace(op, weights=weights, bias=bias, attrs=attrs)


def _sharded_norm(
    program: Program, op: Op, plan: RankPlan, cuts: dict[str, tuple[int, int]]
) -> list[Op]:
    """Shard a norm over all heads: ranks all-reduce their sums of squares.

    Queries and keys go together.  A key head that several ranks store counts once, for the rank
    with its first query head.
    """
    spec = program.spec
    alone = op.out == "ly"
    sums = "square" if alone else "squares"
    attrs = {"width": program.buffers[op.out].width, "column": 0 if alone else "qk".index(op.out)}
    rows = cuts["lightning.q" if alone else f"attn.{op.out}"]
    weights = tuple(Operand(w.name, rows=rows) for w in op.weights)
    inputs = (op.out, sums)
    norm = dataclasses.replace(op, inputs=inputs, weights=weights, attrs={**op.attrs, **attrs})
    if op.out == "k":
        return [norm]
    first = plan.heads[0] == plan.kv_heads[0] * (spec.n_heads // spec.n_kv_heads)
    buffers, counts = (("ly",), (True,)) if alone else (("q", "k"), (True, first))
    return [
        Op("sum_squares", sums, buffers, layer=op.layer, attrs={"counts": counts}),
        Op("all_reduce", sums, layer=op.layer, attrs={"ranks": plan.group}),
        norm,
    ]


def _cuts_groups(op: Op, cuts: dict[str, tuple[int, int]]) -> bool:
    """Return True if ranks hold parts of the groups of columns that a gated norm normalizes."""
    size, rows = op.attrs["group_size"], cuts.get(_role(op), (0, 0))
    return any(row % size for row in rows)


def _sharded_gated_norm(
    program: Program, op: Op, plan: RankPlan, cuts: dict[str, tuple[int, int]]
) -> list[Op]:
    """Shard a gated norm of groups of columns that several ranks hold parts of.

    The gate is an op by itself, and ranks all-reduce the sums of squares of all groups, of which
    each adds to one.
    """
    (x, z), size, rows = op.inputs, op.attrs["group_size"], cuts[_role(op)]
    n_groups, mine = program.buffers[x].width // size, rows[0] // size
    attrs = {"norm": "rms", "eps": op.attrs["eps"], "width": size, "column": mine}
    weights = tuple(Operand(w.name, rows=rows) for w in op.weights)
    counts = {"counts": tuple(group == mine for group in range(n_groups))}
    normed = [
        Op("sum_squares", "square", (x,) * n_groups, layer=op.layer, attrs=counts),
        Op("all_reduce", "square", layer=op.layer, attrs={"ranks": plan.group}),
        Op("norm", x, (x, "square"), weights, layer=op.layer, attrs=attrs),
    ]
    gated = gate(x, z, x, op.layer or 0, op.attrs["activation"])
    return [gated, *normed] if op.attrs["gate_first"] else [*normed, gated]


def _shard_experts(op: Op, experts: tuple[int, int]) -> Op:
    """Shard an `experts` op by experts; tokens of other ranks' experts add zero."""
    parts = expert_parts(op, op.weights)
    weights = tuple(weight for part in parts for weight in part[slice(*experts)])
    bias = op.bias
    if op.attrs.get("biased"):
        bias = (*bias[:-3], *(Operand(b.name, rows=experts) for b in bias[-3:]))
    attrs = {**op.attrs, "experts": experts}
    return dataclasses.replace(op, weights=weights, bias=bias, attrs=attrs)
