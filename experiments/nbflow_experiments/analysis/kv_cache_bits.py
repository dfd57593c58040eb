"""KV-cache bit widths, keys and values separately: layer errors and divergence."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from nbflow.spec import resolve
from nbflow_experiments.analysis.changes import Change
from nbflow_experiments.analysis.kv_cache_error import split_kv
from nbflow_experiments.analysis.layer_errors import LayerErrors, Windows, layer_errors
from nbflow_experiments.analysis.ratios import Table
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import kv_format

EXACT = "f32"


def kv_errors(
    model: str | os.PathLike[str],
    formats: Sequence[str],
    windows: Windows,
    *,
    spec: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LayerErrors:
    """Measure the error of KV-cache formats, with float32 weights.

    Parameters
    ----------
    model : str or path
        Model, as `nbflow.load` takes it.
    formats : sequence of str
        KV-cache formats.  Each is applied to keys alone (values float32), to values alone, and to
        both; ``q8/q4`` is used as given: keys in q8, values in q4.
    windows, spec, progress
        As in `nbflow_experiments.analysis.layer_errors.layer_errors`.

    Returns
    -------
    LayerErrors
        Its tables `layers` and `models` have the formats and bits of keys and values too; there are
        no modules.

    Raises
    ------
    UsageError
        If the model or cache format does not exist, or a window does not fit.

    Examples
    --------
    >>> found = kv_errors("tiny_python", ["q4_0"], [[0, 5, 7, 9]])
    >>> found.models[["keys", "values", "bits"]].values.tolist()
    [['q4_0', 'f32', 18.25], ['f32', 'q4_0', 18.25], ['q4_0', 'q4_0', 4.5]]
    """
    the_spec = resolve(model, spec=spec).spec
    if the_spec.latent is not None:
        raise UsageError(
            f"{the_spec.name} caches latent vectors, which are keys and values at once; measure "
            "them together: layer_errors(model, [Change(kv=...)], windows)"
        )
    pairs = []
    for format in formats:
        one = [format] if "/" in format else [f"{format}/{EXACT}", f"{EXACT}/{format}", format]
        pairs += [pair for pair in one if pair not in pairs]
    changes = [Change(kv=pair) for pair in pairs]
    found = layer_errors(model, changes, windows, spec=spec, progress=progress)
    for table in (found.layers, found.models):
        _add_formats(table, {c.label: c.kv for c in changes}, the_spec.head_dim)
    return found


def _add_formats(table: Table, kv: dict[str, str], head_dim: int) -> None:
    """Add columns for the key and value formats and their bits."""
    both = [split_kv(kv[label]) for label in table.change]
    for i, side in enumerate(("keys", "values")):
        names = [pair[i] for pair in both]
        table.insert(1 + i, side, names)
        table[f"{side}_bits"] = [kv_format(name).bits_per_value(head_dim) for name in names]
    table["bits"] = (table.keys_bits + table.values_bits) / 2
