"""Keys of single layers: the table ``per_layer_config`` that transformers writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbflow.spec.family import Family
from nbflow.spec.layer_specs import LayerKind
from nbflow.utils.safe_repr import shown
from nbflow.utils.toml_schema import check_value
from nbflow_kernels.errors import UsageError

TABLE = "per_layer_config"


def check_layer_keys(
    family: Family,
    config: Mapping[str, Any],
    kinds: Sequence[LayerKind],
    n_layers: int,
    where: str,
) -> None:
    """Refuse keys of single layers that the specification cannot say.

    The family's rules read a key of all layers without the window as ``per_layer_config.*.KEY``.

    Parameters
    ----------
    family : Family
        Its rules name the keys that may differ between layers with and without the window.
    config : mapping
        The configuration.
    kinds : sequence of LayerKind
        Kinds of the layers, empty if there is one.
    n_layers : int
        Number of layers.
    where : str
        Begins the error messages.

    Raises
    ------
    UsageError
        If a layer's key differs from the others' in another way.
    """
    at = f"{where}: {TABLE}"
    table = check_value(config.get(TABLE) or {}, at, dict)
    stated: dict[str, dict[int, Any]] = {}
    for number, keys in table.items():
        i = int(number) if str(number).isdecimal() and len(number) < 10 else -1
        if not 0 <= i < n_layers:
            raise UsageError(
                f"{at}: must have numbers of layers, 0..{n_layers - 1}, got {shown(number)}"
            )
        for key, value in check_value(keys, f"{at} {number}", dict).items():
            stated.setdefault(key, {})[i] = value
    prefix = f"{TABLE}.*."
    read = {k for rules in family.config.values() for rule in rules for k in rule.keys}
    wide = {i for i, kind in enumerate(kinds) if not kind.window}
    for key, each in stated.items():
        usual = config.get(key)
        differ = {i: value for i, value in each.items() if value != usual}
        is_read = prefix + key in read
        if differ and not (is_read and set(differ) == wide and _is_one(differ.values())):
            raise _refusal(at, key, differ, usual, is_read)


def _is_one(values: Any) -> bool:
    found = list(values)
    return all(value == found[0] for value in found)


def _refusal(at: str, key: str, differ: Mapping[int, Any], usual: Any, is_read: bool) -> UsageError:
    layers = ", ".join(map(str, sorted(differ)))
    found = " and ".join(dict.fromkeys(shown(value) for value in differ.values()))
    can = "one value for all layers without the window" if is_read else "one value for all layers"
    return UsageError(
        f"{at}: {key} is {found:.80} in layers {layers:.80} and {shown(usual):.80} in the others, "
        f"but must have {can}; take the entries away if the weights do not need them, or describe "
        "the layers with the fields of a family file for --spec, such as ffn_sizes "
        "(docs/bring_your_own_architecture.md)"
    )
