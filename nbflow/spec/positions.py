"""Positions of a model: its rotary embeddings, layers without one, and factors by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbflow.spec.layer_specs import RopeSpec, TemperatureSpec
from nbflow.utils.toml_schema import check_value
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import LongRopeScaling, RopeScaling

MAX_ALPHA = 1e6
"""Bound on the alpha of Hunyuan's rotary table; published: 1000."""


def ropes(
    values: Mapping[str, Any],
    where: str,
    divisors: Mapping[str, Sequence[float]] | None,
) -> tuple[RopeSpec, RopeSpec | None, float]:
    """Return the rotary embeddings of all layers and of local layers, and the softmax factor.

    YaRN's ``mscale_all_dim`` is a factor of the softmax scale in latent attention alone.
    """
    style, theta = values["rope_style"], values["rope_theta"]
    if values["position"] != "rope":
        return RopeSpec(style, theta, 0), None, 1.0
    dim = values["rope_dim"]
    if dim is None:
        dim = int(values["head_dim"] * _fraction(values))
    try:
        theta = _stretched(values, dim)
        scaling = _scaling(values, _scaling_table(values))
        if divisors:
            scaling = _stored_scaling(values, divisors, where)
        factor = 1.0
        if scaling is not None and values["kv_rank"]:
            factor = float(scaling.softmax_factor)
        local_rope = _local_rope(values)
    except (UsageError, TypeError, ArithmeticError) as error:
        raise UsageError(f"{where}: rope_scaling: {error}") from error
    return RopeSpec(style, theta, dim, scaling), local_rope, factor


def _scaling(values: Mapping[str, Any], table: dict[str, Any] | None) -> RopeScaling | None:
    """Return the scaling of a table with the keys of config.json."""
    return RopeScaling.from_config(table, max_position=values["max_context"])


def _local_rope(values: Mapping[str, Any]) -> RopeSpec | None:
    """Return the rotary embedding of the layers with the window, None for that of the others."""
    theta, dim = values["local_rope_theta"], values["rope_dim"]
    if theta is None:
        return None
    local = {**values, "rope_scaling": values["local_rope_scaling"]}
    if dim is None:
        dim = int((values["local_head_dim"] or values["head_dim"]) * _fraction(local))
    return RopeSpec(values["rope_style"], theta, dim, _scaling(values, _scaling_table(local)))


def _stored_scaling(
    values: Mapping[str, Any], divisors: Mapping[str, Sequence[float]], where: str
) -> RopeScaling:
    """Return the scaling of divisors stored in the checkpoint."""
    each = {name: tuple(map(float, numbers)) for name, numbers in divisors.items()}
    max_context = values["max_context"]
    if "rope_divisors" in each:
        all_lengths = each["rope_divisors"]
        return LongRopeScaling(
            short_factor=all_lengths, long_factor=all_lengths, original_max_position=max_context
        )
    if len(each) != 2:
        raise UsageError(
            f"{where}: the checkpoint has {next(iter(each))} only; LongRoPE needs the divisors for "
            "short and for long sequences"
        )
    original = values["rope_original_context"] or max_context
    return LongRopeScaling(
        short_factor=each["rope_short_divisors"],
        long_factor=each["rope_long_divisors"],
        original_max_position=original,
        factor=max_context / original,
        attention_factor=(values["rope_scaling"] or {}).get("attn_factor"),
    )


_GGUF_SCALING = {"original_context_length": "original_max_position_embeddings"}


def _stretched(values: Mapping[str, Any], dim: int) -> float:
    """Return the base of the frequencies, multiplied by alpha ** (dim / (dim - 2)) if stated.

    Hunyuan's tables of type dynamic have an alpha, with which the angles do not depend on the
    length (NTK-aware scaling).
    """
    theta, table = float(values["rope_theta"]), values["rope_scaling"] or {}
    alpha = table.get("alpha")
    if not alpha or _kind(table) != "dynamic":
        return theta
    factor: float = check_value(alpha, "alpha", float)
    if not 0 < factor <= MAX_ALPHA:
        raise UsageError(f"alpha must be above 0 and at most {MAX_ALPHA:g}, got {factor:g}")
    return float(theta * factor ** (dim / max(1, dim - 2)))


def _fraction(values: Mapping[str, Any]) -> float:
    """Return the fraction of columns that form pairs; a proportional scaling says which rotate."""
    is_whole = _kind(values["rope_scaling"] or {}) == "proportional"
    return 1.0 if is_whole else float(values["rope_fraction"])


def _kind(table: Mapping[str, Any]) -> Any:
    return table.get("rope_type", table.get("type"))


_ELSEWHERE = ("finetuned", "max_position_embeddings", "mrope_section", "mrope_interleaved")
"""Keys of a rotary scaling without an effect on text: those of images, and what is said twice."""


_WITH_ORIGINAL = ("yarn", "llama3", "longrope", "su")
"""Kinds of scalings whose trained length the configuration may also state outside their table."""


def _scaling_table(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a rotary scaling with the keys of config.json; GGUF has other ones."""
    table, truncate = values["rope_scaling"], values["rope_truncate"]
    if not table:
        return None
    words = {_GGUF_SCALING.get(k, k): v for k, v in table.items() if k not in _ELSEWHERE}
    if _kind(words) == "dynamic" and words.pop("alpha", None):
        return None  # `_stretched`
    if values["attention_temperature_scale"] is not None:
        words.pop("llama_4_scaling_beta", None)
    if words.keys() <= {"original_max_position_embeddings", "attn_factor"}:
        return None  # parameters of stored divisors
    original = values["rope_original_context"]
    if original is not None and _kind(words) in _WITH_ORIGINAL:
        words["original_max_position_embeddings"] = original
    log_multiplier = words.pop("yarn_log_multiplier", None)
    if log_multiplier:  # as in llama.cpp, the temperature is in the softmax alone
        words |= dict.fromkeys(("mscale", "mscale_all_dim"), 10.0 * log_multiplier)
    if truncate is not None and _kind(words) == "yarn":
        words["truncate"] = truncate
    if _kind(words) in ("none", "mrope"):
        return None  # mrope: text has the same position in all sections
    return words


def unrotated(values: Mapping[str, Any], full_layers: frozenset[int], where: str) -> frozenset[int]:
    """Return the layers without rotation in a model with rotation."""
    n, every, flags = values["n_layers"], values["unrotated_every"], values["rope_layers"]
    if values["position"] != "rope":
        return frozenset()
    if flags:
        if len(flags) != n or not set(flags) <= {0, 1}:
            raise UsageError(
                f"{where}: rope_layers must be {n} times 0 or 1, one for each layer, "
                f"got {list(flags)!r:.80}"
            )
        return frozenset(i for i, rotates in enumerate(flags) if not rotates)
    if values["rope_windows_only"]:
        still = full_layers if values["window"] is not None else frozenset(range(n))
        return still - set(values["rotated_layers"])
    return frozenset(i for i in range(n) if every and (i + 1) % every == 0)


def theta_by_layer(
    values: Mapping[str, Any], full_layers: frozenset[int], where: str
) -> dict[str, Any]:
    """Return the fields of rotation that follow from a base for each layer (rope_thetas)."""
    thetas, n = values["rope_thetas"], values["n_layers"]
    if not thetas:
        return {}
    if len(thetas) != n or not all(theta == 0 or theta >= 1 for theta in thetas):
        raise UsageError(
            f"{where}: rope_thetas must be {n} numbers, one for each layer, 0 or at least 1, got "
            f"{list(thetas)!r:.80}"
        )
    windowed = values["window"] is not None
    local = {thetas[i] for i in range(n) if windowed and i not in full_layers} - {0}
    usual = {thetas[i] for i in range(n) if not windowed or i in full_layers} - {0}
    if len(local) > 1 or len(usual) > 1:
        raise UsageError(
            f"{where}: rope_thetas must have one base in the layers with the window, and one in "
            f"the others, got {sorted(map(float, local))} and {sorted(map(float, usual))}"
        )
    theta = next(iter(usual or local), values["rope_theta"])
    found = {"rope_theta": theta, "rope_layers": tuple(int(theta > 0) for theta in thetas)}
    if local and local != {theta}:
        found |= {"local_rope_theta": next(iter(local))}
        found |= {"local_rope_scaling": values["rope_scaling"]}
    return found


def temperature(values: Mapping[str, Any], where: str) -> TemperatureSpec | None:
    """Return the factor of queries by position, None without one."""
    scale, floor = (values[f"attention_temperature_{name}"] for name in ("scale", "floor"))
    if not scale:
        return None
    if floor is None:
        raise UsageError(
            f"{where}: attention_temperature_scale = {scale} needs attention_temperature_floor, "
            "the positions per step of the factor"
        )
    offset, layers = (values[f"attention_temperature_{name}"] for name in ("offset", "layers"))
    return TemperatureSpec(scale, floor, offset, layers)
