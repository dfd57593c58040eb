"""The measures of a sweep: one file each, listed here in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from nbflow_experiments.measures import (
    batching,
    cascade,
    communication,
    decode,
    divergence,
    memory,
    perplexity,
    prefill,
    shared_prefix,
    speculation,
    weight_error,
)
from nbflow_experiments.measures.measure import (
    Array,
    Context,
    Measure,
    MeasureResult,
    Reading,
    Scope,
)
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.plugins import Registry

__all__ = [
    "BUILT_IN",
    "MEASURES",
    "METRICS_VERSION",
    "Array",
    "Context",
    "Measure",
    "MeasureResult",
    "Reading",
    "needs_reference",
    "needs_text",
    "register_measure",
    "unregister_measure",
]

METRICS_VERSION = 3
"""Raised when a measure changes its meaning, so that old results are not taken for new ones.

1: first version.  2: memory of the point alone, and a minimum time of a repetition.  3: the device
is a setting; memory of devices, and the plan's.
"""

MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        weight_error.MEASURE,
        perplexity.MEASURE,
        divergence.MEASURE,
        prefill.MEASURE,
        decode.MEASURE,
        batching.MEASURE,
        shared_prefix.MEASURE,
        cascade.MEASURE,
        speculation.MEASURE,
        communication.MEASURE,
        memory.MEASURE,
    )
}
"""Every measure by name."""
BUILT_IN = frozenset(MEASURES)
"""Names of the measures of this folder."""


_REGISTERED: Registry[Measure] = Registry("measure", "register_measure")


def register_measure(
    name: str,
    run: Callable[[Context], MeasureResult | Mapping[str, float]],
    *,
    scope: Scope = "point",
    about: str = "",
    needs_text: bool = False,
    needs_reference: bool = False,
) -> Measure:
    """Register a measure; sweeps run it where they name it in `measures`.

    Parameters
    ----------
    name : str
        The name, which must differ from those of the built-in measures.
    run : callable
        Called as ``run(context)`` on every rank of the model; see `Context`.  It returns columns of
        points.csv, name to number; or a `MeasureResult`, which also has units, errors and arrays.
        The result counts where ``context.leads`` is True.
    scope : {"point", "quality", "format"}
        What the result depends on, so that nothing is measured twice: every setting; everything but
        batch and lengths; or the model and its weight format alone.
    about : str
        Definition, exclusions, unit and repetitions, for reports; by default the docstring of
        `run`.
    needs_text : bool
        True if it evaluates ``context.windows``.
    needs_reference : bool
        True if it compares with the logits of the unquantized model, ``context.reference``.

    Returns
    -------
    Measure

    Raises
    ------
    UsageError
        If the name is taken, or the scope unknown.
    """
    if not callable(run):
        raise UsageError(f"register_measure({name!r}): run must be a function, got {run!r:.80}")
    if scope not in get_args(Scope):
        raise unknown_name(f"register_measure({name!r}): scope", scope, get_args(Scope))
    if name in BUILT_IN:
        raise UsageError(f"register_measure({name!r}): this is a built-in measure; choose another")

    def measured(context: Context) -> MeasureResult:
        found = run(context)
        if isinstance(found, MeasureResult):
            return found
        if not context.leads:
            return MeasureResult()
        if not isinstance(found, Mapping):
            kind = type(found).__name__
            raise UsageError(f"measure {name}: must return columns or a MeasureResult, got {kind}")
        return MeasureResult([Reading(key, float(value), "1") for key, value in found.items()])

    text = about or run.__doc__ or f"{name}, a measure of a plugin."
    measure = Measure(name, scope, measured, text, needs_text, needs_reference, by_default=False)
    _REGISTERED.add(name, measure, run)
    MEASURES[name] = measure
    return measure


def unregister_measure(name: str) -> None:
    """Remove a registered measure."""
    _REGISTERED.remove(name)
    del MEASURES[name]


_OF_TEXT = tuple(measure.name for measure in MEASURES.values() if measure.needs_text)
_USERS = {
    **dict.fromkeys(("eval_text", "eval_tokens", "eval_window", "eval_context"), _OF_TEXT),
    **dict.fromkeys(("draft", "n_draft"), ("speculation",)),
    **dict.fromkeys(("shared_keys", "own_keys", "heads"), ("cascade",)),
    "prefix": ("shared_prefix",),
}
"""Settings that only some of the built-in measures use."""


def check_used(settings: Iterable[str], measures: Iterable[str]) -> None:
    """Raise `UsageError` for a setting of the command line that none of the measures uses.

    Registered measures may use every setting.
    """
    names = set(measures)
    if names & set(_REGISTERED):
        return
    for setting in settings:
        users = _USERS.get(setting, names)
        if not names & set(users):
            raise UsageError(
                f"--{setting.replace('_', '-')} is for --measures {' or '.join(users)}, got "
                f"--measures {','.join(sorted(names))}"
            )


def needs_text(names: Iterable[str]) -> bool:
    """Return whether any of these measures evaluates text."""
    return any(MEASURES[name].needs_text for name in names)


def needs_reference(names: Iterable[str]) -> bool:
    """Return whether any of these measures needs reference logits."""
    return any(MEASURES[name].needs_reference for name in names)
