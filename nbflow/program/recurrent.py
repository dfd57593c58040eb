"""Op records of recurrent mixers, whose state of a sequence has a fixed size.

The attr ``state`` of an op is the shape of its state of one sequence.
"""

from __future__ import annotations

from nbflow.program.layer_ops import add, gate, linear, scale
from nbflow.program.records import Buffer, Op, Operand
from nbflow.spec.architecture import SelectiveSpec, StateSpaceSpec
from nbflow.spec.model_spec import ModelSpec


def columns_of_mamba1(rank: int, state_dim: int) -> dict[str, Buffer]:
    """Return the buffers of time steps, input and output vectors: columns of one."""
    parts = {"nt": Buffer(rank, base="nt_nb_nc")}
    parts["nb"] = Buffer(state_dim, base="nt_nb_nc", offset=rank)
    parts["nc"] = Buffer(state_dim, base="nt_nb_nc", offset=rank + state_dim)
    return parts


def widths(spec: ModelSpec) -> dict[str, int]:
    """Return the widths of the buffers of recurrent mixers."""
    found: dict[str, int] = {}
    if spec.selective is not None:
        mamba = spec.selective
        found |= dict.fromkeys(("nx", "nz", "vx", "ndt", "ny"), mamba.width)
        found["nt_nb_nc"] = mamba.dt_rank + 2 * mamba.state_dim
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
        found |= dict.fromkeys(("db", "da"), delta.value_heads)
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
    attrs = {"eps": delta.norm_eps, "group_size": delta.value_dim, "gate_first": False}
    return [
        *(linear(spec, i, f"delta.{name}", source, f"d{name}") for name in "qkvzba"),
        *(_conv(spec, i, f"delta.{name}_conv", f"d{name}", f"c{name}", "silu") for name in "qkv"),
        Op("log_decay", "da", ("da",), weights, layer=i),
        Op("sigmoid", "db", ("db",), layer=i, attrs={"scale": delta.beta_scale}),
        Op(
            "delta_rule", "dy", ("cq", "ck", "cv", "da", "db"), layer=i,
            attrs={"state": state, "head": delta.key_dim},
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
            attrs={"state": (ssm.heads, ssm.head_dim, ssm.state_dim), "dt_min": ssm.dt_min},
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
    attrs = {"eps": spec.norm_eps, "group_size": size, "gate_first": ssm.norm == "after_gate"}
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
