"""RoPE context extension: the published scalings of frequencies.

Scalings are frozen dataclasses for `rope_frequencies` and `rope_cos_sin_cache`.  Values are those
of Hugging Face's `modeling_rope_utils`, in float64.

===========================  ======================================================================
`LinearRopeScaling`          all frequencies divided by a factor (position interpolation)
`DynamicNtkRopeScaling`      a base that grows with the sequence length
`YarnRopeScaling`            low frequencies divided, high ones kept, a ramp between; attention
                             factor
`Llama3RopeScaling`          the same with a ramp over wavelengths
`LongRopeScaling`            a divisor per frequency, for short and for long sequences; attention
                             factor
`ProportionalRopeScaling`    the lowest frequencies are zero: these columns are not rotated
===========================  ======================================================================

For a fixed change of base ("NTK-aware" scaling) pass another `theta`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError, unknown_name

Frequencies = tuple[NDArray[np.float64], float]
"""Angle per position of each pair, and the attention factor (of cosines and sines)."""


def _plain(rotary_dim: int, theta: float) -> NDArray[np.float64]:
    """Return theta ** (-2j / d), the frequencies of the paper."""
    return np.asarray(theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim))


def _check_positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not (number > 0 and math.isfinite(number)):
            raise UsageError(f"{name} must be positive, got {number}")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Base class of RoPE scalings.

    Examples
    --------
    >>> from nbflow_kernels import RopeScaling
    >>> RopeScaling.from_config({"rope_type": "linear", "factor": 4.0})
    LinearRopeScaling(factor=4.0)
    """

    def frequencies(self, rotary_dim: int, theta: float, seq_len: int) -> Frequencies:
        """Return the frequencies and the attention factor; see `rope_frequencies`."""
        raise NotImplementedError("use a class derived from RopeScaling")

    @property
    def softmax_factor(self) -> float:
        """Return the factor of the softmax scale; 1 except for YaRN with `mscale_all_dim`."""
        return 1.0

    @staticmethod
    def from_config(
        config: Mapping[str, Any] | None,
        *,
        max_position: int | None = None,
        original_max_position: int | None = None,
    ) -> RopeScaling | None:
        """Return the scaling of a ``rope_scaling`` entry of a config.json.

        Parameters
        ----------
        config : mapping or None
            The entry, with ``rope_type`` (or ``type``) and the numbers of that type.  Its
            ``rope_theta`` and ``partial_rotary_factor`` are ignored.
        max_position : int, optional
            The model's ``max_position_embeddings``.
        original_max_position : int, optional
            The model's ``original_max_position_embeddings``, if not in the entry.

        Returns
        -------
        RopeScaling or None
            None for no entry and for the type ``default``.

        Raises
        ------
        UsageError
            If the type or a key is unknown, or a number is missing or out of range.

        Examples
        --------
        >>> from nbflow_kernels import RopeScaling
        >>> RopeScaling.from_config({"type": "dynamic", "factor": 2.0}, max_position=4096)
        DynamicNtkRopeScaling(factor=2.0, original_max_position=4096)
        """
        if not config:
            return None
        kind = config.get("rope_type", config.get("type"))
        if kind == "default":
            return None
        if kind not in _TYPES:
            raise unknown_name("rope_type", kind, ("default", *_TYPES))
        scaling = _TYPES[kind]
        length = "original_max_position"  # the only field with another name in a config.json
        known = {f"{length}_embeddings": length}
        known |= {field.name: field.name for field in fields(scaling) if field.name != length}
        numbers: dict[str, Any] = {}
        for key, value in config.items():
            if key in ("rope_type", "type", "rope_theta"):
                continue
            if key == "partial_rotary_factor" and scaling is not ProportionalRopeScaling:
                continue
            if key not in known:
                raise unknown_name(f"key of rope_type {kind!r}", key, known)
            if value is not None:
                numbers[known[key]] = _checked(key, value)
        _complete(scaling, numbers, max_position, original_max_position)
        missing = [name for name in known if name in _NEEDED and name not in numbers]
        if missing:
            raise UsageError(f"rope_type {kind!r} needs {' and '.join(missing)}; found none")
        return scaling(**numbers)


def _checked(key: str, value: Any) -> Any:
    """Return a value of a config.json: a number, true or false for `truncate`, or a tuple."""
    if key == "truncate" and not isinstance(value, bool):
        raise UsageError(f"{key} must be true or false, got {value!r:.80}")
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, int | float) or isinstance(item, bool) != (key == "truncate"):
            raise UsageError(f"{key} must be a number, or a list of numbers, got {value!r:.80}")
    return tuple(value) if isinstance(value, list) else value


_NEEDED = ("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")


def _complete(
    scaling: type[RopeScaling],
    numbers: dict[str, Any],
    max_position: int | None,
    original: int | None,
) -> None:
    """Complete `numbers` from the rest of the config.json."""
    if scaling in (LinearRopeScaling, ProportionalRopeScaling):
        numbers.pop("original_max_position", None)  # unused by these scalings
        if scaling is ProportionalRopeScaling:
            numbers.setdefault("factor", 1.0)
        return
    if scaling is DynamicNtkRopeScaling:
        # by definition the length the model was trained for, whatever else the entry says
        numbers["original_max_position"] = (
            max_position or numbers.get("original_max_position") or original
        )
    numbers.setdefault("original_max_position", original or max_position)
    if numbers["original_max_position"] is None:
        raise UsageError(
            "the scaling needs the length the model was trained for: "
            "original_max_position_embeddings or max_position_embeddings"
        )
    if scaling in (YarnRopeScaling, LongRopeScaling) and "factor" not in numbers and max_position:
        numbers["factor"] = max_position / numbers["original_max_position"]


@dataclass(frozen=True, kw_only=True)
class LinearRopeScaling(RopeScaling):
    """Position interpolation: all frequencies divided by a factor (arXiv:2306.15595).

    Examples
    --------
    >>> from nbflow_kernels import LinearRopeScaling
    >>> LinearRopeScaling(factor=4.0).frequencies(4, 1e4, 8192)
    (array([0.25  , 0.0025]), 1.0)
    """

    factor: float
    """Divisor of the frequencies; below 0, pairs turn the other way (nanochat: -1)."""

    def __post_init__(self) -> None:
        if not (self.factor and math.isfinite(self.factor)):
            raise UsageError(f"factor must not be 0, nor infinite, got {self.factor}")

    def frequencies(self, rotary_dim: int, theta: float, seq_len: int) -> Frequencies:
        """Return theta ** (-2j / d) / factor."""
        return _plain(rotary_dim, theta) / self.factor, 1.0


@dataclass(frozen=True, kw_only=True)
class ProportionalRopeScaling(RopeScaling):
    """A share of the frequencies of whole heads; the lowest are zero (Gemma 4).

    Unlike a smaller rotary dimension, it keeps the frequencies and pairs of the whole head.

    Examples
    --------
    >>> from nbflow_kernels import ProportionalRopeScaling
    >>> ProportionalRopeScaling(partial_rotary_factor=0.5).frequencies(8, 1e4, 4096)
    (array([1. , 0.1, 0. , 0. ]), 1.0)
    """

    partial_rotary_factor: float = 1.0
    """Share of the frequencies that are not zero, from 0 to 1."""
    factor: float = 1.0
    """Divisor of the frequencies."""

    def __post_init__(self) -> None:
        _check_positive(factor=self.factor)
        if not 0.0 <= self.partial_rotary_factor <= 1.0:
            raise UsageError(
                f"partial_rotary_factor must be from 0 to 1, got {self.partial_rotary_factor}"
            )

    def frequencies(self, rotary_dim: int, theta: float, seq_len: int) -> Frequencies:
        """Return the first frequencies of the paper, divided by `factor`, then zeros."""
        rotated = np.arange(rotary_dim // 2) < int(self.partial_rotary_factor * rotary_dim // 2)
        return np.where(rotated, _plain(rotary_dim, theta) / self.factor, 0.0), 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicNtkRopeScaling(RopeScaling):
    r"""Dynamic NTK: a base that grows with the sequence length L beyond the trained length M.

    .. math:: \theta' = \theta \left( f \frac{L}{M} - (f - 1) \right)^{d / (d - 2)}

    The lowest frequency is divided by the factor in parentheses, the highest is kept.  With a
    length that grows during decoding, cached keys have stale angles; choose one length per sequence
    (`seq_len`) for results that do not depend on chunking.

    Examples
    --------
    >>> from nbflow_kernels import DynamicNtkRopeScaling
    >>> scaling = DynamicNtkRopeScaling(factor=2.0, original_max_position=4096)
    >>> scaling.frequencies(4, 1e4, 4096)[0], scaling.frequencies(4, 1e4, 8192)[0].round(5)
    (array([1.  , 0.01]), array([1.     , 0.00333]))
    """

    factor: float
    """f."""
    original_max_position: int
    """M, the trained context length."""

    def __post_init__(self) -> None:
        _check_positive(factor=self.factor, original_max_position=self.original_max_position)

    def frequencies(self, rotary_dim: int, theta: float, seq_len: int) -> Frequencies:
        """Return the frequencies of the base for `seq_len`."""
        if rotary_dim <= 2:
            raise UsageError(f"dynamic scaling needs a rotary_dim above 2, got {rotary_dim}")
        ratio = max(seq_len, self.original_max_position) / self.original_max_position
        stretch = self.factor * ratio - (self.factor - 1.0)
        return _plain(rotary_dim, theta * stretch ** (rotary_dim / (rotary_dim - 2))), 1.0


def _mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature factor."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class YarnRopeScaling(RopeScaling):
    r"""YaRN: low frequencies divided, high ones kept, a linear ramp between (arXiv:2309.00071).

    Frequency j makes :math:`r_j = M \theta^{-2j/d} / 2 \pi` turns over the trained length M.  Above
    `beta_fast` turns it is kept, below `beta_slow` divided by the factor; the ramp between is
    linear in j.  The attention factor is :math:`0.1 \ln f + 1` by default.

    Examples
    --------
    >>> from nbflow_kernels import YarnRopeScaling
    >>> scaling = YarnRopeScaling(factor=4.0, original_max_position=4096)
    >>> frequencies, attention_factor = scaling.frequencies(128, 1e4, 16384)
    >>> frequencies[[0, 63]], round(attention_factor, 4)
    (array([1.00000000e+00, 2.88695496e-05]), 1.1386)
    """

    factor: float
    """f, the ratio of the extended to the trained context length."""
    original_max_position: int
    """M, the trained context length."""
    beta_fast: float = 32.0
    """Turns over M above which a frequency is kept."""
    beta_slow: float = 1.0
    """Turns over M below which a frequency is divided."""
    attention_factor: float | None = None
    """Factor of cosines and sines; derived from `factor` and the mscales by default."""
    mscale: float | None = None
    """DeepSeek: the attention factor is the ratio of the terms of `mscale` and `mscale_all_dim`."""
    mscale_all_dim: float | None = None
    """DeepSeek: see `mscale`; the square of its term is `softmax_factor`."""
    truncate: bool = True
    """Round the ends of the ramp outward to whole pairs (False in gpt-oss)."""

    def __post_init__(self) -> None:
        _check_positive(
            factor=self.factor,
            original_max_position=self.original_max_position,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            attention_factor=self.attention_factor,
        )

    @property
    def softmax_factor(self) -> float:
        """Return the factor of the softmax scale in DeepSeek V2 and V3; 1 elsewhere."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(self, rotary_dim: int, theta: float, seq_len: int) -> Frequencies:
        """Return the blended frequencies and the attention factor."""
        if theta <= 1.0:
            raise UsageError(f"YaRN scaling needs a theta above 1, got {theta}")
        plain = _plain(rotary_dim, theta)
        betas = self.beta_fast, self.beta_slow
        low, high = (self._pair(turns, rotary_dim, theta) for turns in betas)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        width = high - low if high != low else 0.001
        ramp = np.clip((np.arange(rotary_dim // 2) - low) / width, 0.0, 1.0)
        return plain / self.factor * ramp + plain * (1.0 - ramp), self._factor()

    def _pair(self, turns: float, rotary_dim: int, theta: float) -> float:
        """Return the real-valued index of the pair with this number of turns over M."""
        wavelength = self.original_max_position / (turns * 2.0 * math.pi)
        return rotary_dim * math.log(wavelength) / (2.0 * math.log(theta))

    def _factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            above = _mscale(self.factor, self.mscale)
            return above / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling(RopeScaling):
    r"""Llama 3.1: long wavelengths divided by the factor, short ones kept, smooth between.

    With M the trained length, wavelengths above M / `low_freq_factor` are divided, those below
    M / `high_freq_factor` kept; between, with s linear in the number of turns over M, the frequency
    is :math:`((1 - s) / f + s) \, \theta^{-2j/d}` (arXiv:2407.21783; Meta's code).

    Examples
    --------
    >>> from nbflow_kernels import Llama3RopeScaling
    >>> Llama3RopeScaling().frequencies(128, 5e5, 131072)[0][[0, 63]]
    array([1.00000000e+00, 3.06892599e-07])
    """

    factor: float = 8.0
    """f, the divisor of low frequencies."""
    low_freq_factor: float = 1.0
    """Turns over M below which a frequency is divided."""
    high_freq_factor: float = 4.0
    """Turns over M above which a frequency is kept."""
    original_max_position: int = 8192
    """M, the trained context length."""

    def __post_init__(self) -> None:
        _check_positive(
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            original_max_position=self.original_max_position,
        )
        if not self.high_freq_factor >= self.low_freq_factor:
            raise UsageError(
                f"high_freq_factor must be at least low_freq_factor {self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )

    def frequencies(self, rotary_dim: int, theta: float, seq_len: int) -> Frequencies:
        """Return the frequencies blended by the number of turns over M."""
        plain = _plain(rotary_dim, theta)
        turns = self.original_max_position * plain / (2.0 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        above = turns - self.low_freq_factor
        # equal factors (Llama 4): a step
        smooth = np.clip(above / span, 0.0, 1.0) if span else np.where(above > 0.0, 1.0, 0.0)
        return ((1.0 - smooth) / self.factor + smooth) * plain, 1.0


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling(RopeScaling):
    r"""LongRoPE: a searched divisor per frequency (arXiv:2402.13753; Phi-3).

    Sequences up to the trained length M use `short_factor`, longer ones `long_factor`.  The
    attention factor is :math:`\sqrt{1 + \ln f / \ln M}` by default; `short_mscale` and
    `long_mscale` (Phi-3.5-MoE) replace it.

    Examples
    --------
    >>> from nbflow_kernels import LongRopeScaling
    >>> scaling = LongRopeScaling(short_factor=(1.0, 1.0), long_factor=(1.0, 4.0),
    ...                           original_max_position=4096, factor=32.0)
    >>> scaling.frequencies(4, 1e4, 4096)[0], scaling.frequencies(4, 1e4, 4097)[0]
    (array([1.  , 0.01]), array([1.    , 0.0025]))
    """

    short_factor: tuple[float, ...]
    """Divisor of each frequency up to M positions."""
    long_factor: tuple[float, ...]
    """Divisor of each frequency beyond M positions."""
    original_max_position: int
    """M, the trained context length."""
    factor: float = 1.0
    """f, the ratio of extended to trained context length, for the attention factor."""
    attention_factor: float | None = None
    """Factor of cosines and sines for all lengths."""
    short_mscale: float | None = None
    """Factor of cosines and sines up to M positions, instead of `attention_factor`."""
    long_mscale: float | None = None
    """Factor of cosines and sines beyond M positions."""

    def __post_init__(self) -> None:
        _check_positive(
            factor=self.factor,
            original_max_position=self.original_max_position,
            attention_factor=self.attention_factor,
            short_mscale=self.short_mscale,
            long_mscale=self.long_mscale,
            **{"least short_factor": min(self.short_factor, default=None)},
            **{"least long_factor": min(self.long_factor, default=None)},
        )
        if self.factor > 1.0 and self.original_max_position < 2:
            raise UsageError(
                "original_max_position must be at least 2, the base of a logarithm, "
                f"got {self.original_max_position}"
            )

    def frequencies(self, rotary_dim: int, theta: float, seq_len: int) -> Frequencies:
        """Return the frequencies and the attention factor for `seq_len`."""
        is_long = seq_len > self.original_max_position
        name = "long_factor" if is_long else "short_factor"
        divisors = np.array(self.long_factor if is_long else self.short_factor)
        if len(divisors) != rotary_dim // 2:
            raise UsageError(
                f"{name} must have a number for each of the {rotary_dim // 2} frequencies, "
                f"got {len(divisors)}"
            )
        return _plain(rotary_dim, theta) / divisors, self._factor(is_long)

    @property
    def depends_on_length(self) -> bool:
        """Return whether sequences beyond M positions have other angles or factors."""
        divisors_differ = self.short_factor != self.long_factor
        return divisors_differ or self._factor(False) != self._factor(True)

    def _factor(self, is_long: bool) -> float:
        mscale = self.long_mscale if is_long else self.short_mscale
        if mscale is not None:
            return mscale
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_max_position))


_TYPES: dict[str, type[RopeScaling]] = {
    "linear": LinearRopeScaling,
    "dynamic": DynamicNtkRopeScaling,
    "yarn": YarnRopeScaling,
    "llama3": Llama3RopeScaling,
    "longrope": LongRopeScaling,
    "su": LongRopeScaling,
    "proportional": ProportionalRopeScaling,
}
"""Type in a config.json to the class; its fields are the keys."""
