"""Op records of recurrent mixers, whose state of a sequence has a fixed size.

The attr ``state`` of an op is the shape of its state of one sequence.
"""

from __future__ import annotations

from nbflow.program.layer_ops import add, gate, linear
from nbflow.program.records import Op, Operand
from nbflow.spec.model_spec import ModelSpec


def widths(spec: ModelSpec) -> dict[str, int]:
    """Return the widths of the buffers of recurrent mixers."""
    found: dict[str, int] = {}
    if "short_conv" in spec.mixers:
        found |= dict.fromkeys(("sb", "sc", "sx", "sy"), spec.hidden_size)
    if spec.ssm is not None:
        found |= dict.fromkeys(("mz", "mx", "ux", "my"), spec.ssm.width)
        found |= dict.fromkeys(("mb", "mc", "ub", "uc"), spec.ssm.groups * spec.ssm.state_dim)
        found["mdt"] = spec.ssm.heads
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
    attrs = {"eps": spec.norm_eps, "group_size": ssm.width // ssm.norm_groups, "gate_first": True}
    of_norm = (Operand(f"{prefix}.norm.weight"),)
    return [
        *(linear(spec, i, f"ssm.{n}", source, f"m{n}") for n in ("z", "x", "b", "c", "dt")),
        *(_conv(spec, i, f"ssm.{name}_conv", f"m{name}", f"u{name}", "silu") for name in "xbc"),
        Op(
            "mamba2", "my", ("ux", "mdt", "ub", "uc"), vectors, layer=i,
            attrs={"state": (ssm.heads, ssm.head_dim, ssm.state_dim), "dt_min": ssm.dt_min},
        ),
        Op("gated_norm", "my", ("my", "mz"), of_norm, layer=i, attrs=attrs),
        linear(spec, i, "ssm.out", "my", "o"),
        add(spec, "x", "o", i),
    ]  # fmt: skip
