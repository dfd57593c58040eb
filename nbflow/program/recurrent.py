"""Op records of recurrent mixers, whose state of a sequence has a fixed size.

The attr ``state`` of an op is the shape of its state of one sequence.
"""

from __future__ import annotations

import math

from nbflow.program.layer_ops import add, gate, linear, scale
from nbflow.program.records import Buffer, Op, Operand
from nbflow.spec.layer_specs import SelectiveSpec, StateSpaceSpec
from nbflow.spec.model_spec import ModelSpec


def columns_of_one(spec: ModelSpec) -> dict[str, Buffer]:
    """Return the buffers that are columns of another one in unfused programs, too."""
    parts: dict[str, Buffer] = {}
    for base, sizes in _columns(spec).items():
        offset = 0
        for name, width in zip(base.split("_"), sizes, strict=True):
            parts[name] = Buffer(width, base=base, offset=offset)
            offset += width
    return parts


def _columns(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the widths of the columns of buffers that one op writes."""
    columns: dict[str, tuple[int, ...]] = {}
    if spec.selective is not None:
        N = spec.selective.state_dim
        columns["nt_nb_nc"] = spec.selective.dt_rank, N, N
    if "lightning_attention" in spec.mixers:
        columns["lq_lk_lv"] = (spec.n_heads * spec.head_dim,) * 3
    return columns


def widths(spec: ModelSpec) -> dict[str, int]:
    """Return the widths of the buffers of recurrent mixers."""
    found = {base: sum(sizes) for base, sizes in _columns(spec).items()}
    if "lightning_attention" in spec.mixers:
        found |= dict.fromkeys(("lg", "ly"), spec.n_heads * spec.head_dim)
    if spec.selective is not None:
        found |= dict.fromkeys(("nx", "nz", "vx", "ndt", "ny"), spec.selective.width)
    if "short_conv" in spec.mixers:
        found |= dict.fromkeys(("sb", "sc", "sx", "sy"), spec.hidden_size)
    if spec.ssm is not None:
        found |= dict.fromkeys(("mz", "mx", "ux", "my"), spec.ssm.width)
        found |= dict.fromkeys(("mb", "mc", "ub", "uc"), spec.ssm.groups * spec.ssm.state_dim)
        found |= {"mdt": spec.ssm.heads, "ms": spec.hidden_size}
    if spec.delta is not None:
        delta = spec.delta
        keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
        found |= dict.fromkeys(("dq", "dk", "cq", "ck"), keys)
        found |= dict.fromkeys(("dv", "dz", "cv", "dy"), values)
        found |= {"db": delta.value_heads, "da": delta.decays}
        found |= dict.fromkeys(("dal", "dzl"), delta.rank)
    return found


def _conv(
    spec: ModelSpec, i: int, name: str, source: str, out: str, activation: str | None = None
) -> Op:
    """Return a causal convolution of each channel over the last `conv_kernel` tokens."""
    weight = Operand(f"layers.{i}.{name}.weight")
    bias = (Operand(f"layers.{i}.{name}.bias"),) if name in spec.biases else ()
    n_channels = spec.shape_of(weight.name)[0]
    attrs = {"activation": activation, "state": (n_channels, spec.conv_kernel - 1)}
    return Op("conv", out, (source,), (weight,), bias, i, attrs)


def short_conv(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return LFM2's short convolution between two gates, out(c * conv(b * x))."""
    return [
        *(linear(spec, i, f"short.{name}", source, f"s{name}") for name in "bcx"),
        gate("sx", "sb", "sx", i, "identity"),
        _conv(spec, i, "short.conv", "sx", "sy"),
        gate("sy", "sc", "sy", i, "identity"),
        linear(spec, i, "short.out", "sy", "o"),
        add(spec, "x", "o", i),
    ]


def gated_delta_rule(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return a gated delta rule: convolutions of q, k and v, recurrence, norm and output gate."""
    delta, prefix = spec.delta, f"layers.{i}.delta"
    assert delta is not None
    state = delta.value_heads, delta.key_dim, delta.value_dim
    weights = tuple(Operand(f"{prefix}.{name}.weight") for name in ("a_log", "dt_bias"))
    of_norm = (Operand(f"{prefix}.norm.weight"),)
    attrs = {
        "eps": delta.norm_eps, "group_size": delta.value_dim, "gate_first": False,
        "activation": delta.gate,
    }  # fmt: skip
    if delta.rank:
        ops = [linear(spec, i, f"delta.{name}", source, f"d{name}") for name in "qkvb"]
        ops += (linear(spec, i, f"delta.{name}_low", source, f"d{name}l") for name in "za")
        ops += (linear(spec, i, f"delta.{name}", f"d{name}l", f"d{name}") for name in "za")
    else:
        ops = [linear(spec, i, f"delta.{name}", source, f"d{name}") for name in "qkvzba"]
    return [
        *ops,
        *(_conv(spec, i, f"delta.{name}_conv", f"d{name}", f"c{name}", "silu") for name in "qkv"),
        Op("log_decay", "da", ("da",), weights, layer=i),
        Op("sigmoid", "db", ("db",), layer=i, attrs={"scale": delta.beta_scale}),
        Op(
            "delta_rule", "dy", ("cq", "ck", "cv", "da", "db"), layer=i,
            attrs={"state": state, "head": delta.key_dim, "decay": delta.decay},
        ),
        Op("gated_norm", "dy", ("dy", "dz"), of_norm, layer=i, attrs=attrs),
        linear(spec, i, "delta.out", "dy", "o"),
        add(spec, "x", "o", i),
    ]  # fmt: skip


def mamba2(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return Mamba-2: convolutions of x, b and c, state-space recurrence, gate and norm."""
    ssm, prefix = spec.ssm, f"layers.{i}.ssm"
    assert ssm is not None
    vectors = tuple(Operand(f"{prefix}.{name}.weight") for name in ("a_log", "dt_bias", "d"))
    parts = ("z", "x", "b", "c", "dt")
    ops: list[Op] = []
    if ssm.input_scale != 1.0:
        ops, source = scale("ms", source, i, ssm.input_scale), "ms"
    ops += (linear(spec, i, f"ssm.{name}", source, f"m{name}") for name in parts)
    for name, factor in zip(parts, ssm.scales, strict=False):  # `scales` may be empty
        ops += scale(f"m{name}", f"m{name}", i, factor)
    return [
        *ops,
        *(_conv(spec, i, f"ssm.{name}_conv", f"m{name}", f"u{name}", "silu") for name in "xbc"),
        Op(
            "mamba2", "my", ("ux", "mdt", "ub", "uc"), vectors, layer=i,
            attrs={
                "state": (ssm.heads, ssm.head_dim, ssm.state_dim),
                "dt_limits": (ssm.dt_min, math.inf if ssm.dt_max is None else ssm.dt_max),
            },
        ),
        _end_of_mamba2(spec, ssm, i),
        linear(spec, i, "ssm.out", "my", "o"),
        add(spec, "x", "o", i, ssm.output_scale),
    ]  # fmt: skip


def _end_of_mamba2(spec: ModelSpec, ssm: StateSpaceSpec, i: int) -> Op:
    """Return the gate and the norm of the recurrence's result."""
    if ssm.norm == "none":
        return gate("my", "mz", "my", i, "silu")
    size = ssm.width // ssm.norm_groups
    attrs = {
        "eps": spec.norm_eps, "group_size": size, "gate_first": ssm.norm == "after_gate",
        "activation": "silu",
    }  # fmt: skip
    weight = (Operand(f"layers.{i}.ssm.norm.weight"),)
    return Op("gated_norm", "my", ("my", "mz"), weight, layer=i, attrs=attrs)


def mamba1(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return Mamba-1: convolution of x, time steps of low rank, selective scan and gate."""
    mamba, prefix = spec.selective, f"layers.{i}.mamba1"
    assert mamba is not None
    low = tuple(Operand(f"{prefix}.{name}.weight") for name in ("dt_a", "b", "c"))
    vectors = tuple(Operand(f"{prefix}.{name}.weight") for name in ("a_log", "dt_bias", "d"))
    return [
        linear(spec, i, "mamba1.x", source, "nx"),
        linear(spec, i, "mamba1.z", source, "nz"),
        _conv(spec, i, "mamba1.conv", "nx", "vx", "silu"),
        Op("linear", "nt_nb_nc", ("vx",), low, layer=i),  # one buffer: ranks sum it at once
        *_norms_of_mamba1(mamba, i),
        Op("linear", "ndt", ("nt",), (Operand(f"{prefix}.dt.weight"),), layer=i),
        Op(
            "mamba1", "ny", ("vx", "ndt", "nb", "nc"), vectors, layer=i,
            attrs={"state": (mamba.width, mamba.state_dim)},
        ),
        gate("ny", "nz", "ny", i, "silu"),
        linear(spec, i, "mamba1.out", "ny", "o"),
        add(spec, "x", "o", i),
    ]  # fmt: skip


def _norms_of_mamba1(mamba: SelectiveSpec, i: int) -> list[Op]:
    if mamba.norm == "none":
        return []
    attrs = {"norm": "rms", "eps": mamba.norm_eps}
    ops = []
    for buffer, name in (("nt", "dt"), ("nb", "b"), ("nc", "c")):
        weight = (Operand(f"layers.{i}.mamba1.{name}_norm.weight"),)
        weights = weight if mamba.norm == "weighted" else ()
        ops.append(Op("norm", buffer, (buffer,), weights, layer=i, attrs=attrs))
    return ops


def lightning_attention(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return linear attention with a constant decay per head, a norm of all heads and a gate."""
    prefix, D = f"layers.{i}.lightning", spec.head_dim
    matrices = tuple(Operand(f"{prefix}.{name}.weight") for name in "qkv")
    eps = spec.norm_eps if spec.linear_norm_eps is None else spec.linear_norm_eps
    attrs = {"state": (spec.n_heads, D, D), "slopes": _slopes(spec, i)}
    norm_weight = (Operand(f"{prefix}.norm.weight"),)
    return [
        Op("linear", "lq_lk_lv", (source,), matrices, layer=i),
        Op("activation", "lq_lk_lv", ("lq_lk_lv",), layer=i, attrs={"activation": "silu"}),
        Op("lightning", "ly", ("lq", "lk", "lv"), layer=i, attrs=attrs),
        Op("norm", "ly", ("ly",), norm_weight, layer=i, attrs={"norm": "rms", "eps": eps}),
        linear(spec, i, "lightning.gate", source, "lg"),
        gate("ly", "lg", "ly", i, "sigmoid"),
        linear(spec, i, "lightning.out", "ly", "o"),
        add(spec, "x", "o", i, spec.lightning_output_scale),
    ]


def _slopes(spec: ModelSpec, i: int) -> tuple[float, ...]:
    """Return the decay of each head: 2 ** (-8 h / H), less in later layers, none in the last.

    The small numbers are those of the published models.
    """
    later = 1.0 - i / (spec.n_layers - 1 + 1e-5) + 1e-5
    return tuple(2.0 ** (-8.0 * (h + 1) / spec.n_heads) * later for h in range(spec.n_heads))
