"""Special token ids of a vocabulary, and those that the files of a Hugging Face folder state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbflow.utils.json_file import read_object
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id: kernels take them as int32.  A model may state ids beyond its vocabulary."""
MAX_VOCABULARY = 1 << 22
"""Most ids of a vocabulary, gaps included: 16 times the largest published; lists have this size."""
MAX_PIECE_CHARACTERS = 1 << 16
"""Longest piece; each of thousands of tokens may be it when ids are decoded."""
NO_TOKEN = (-1, 2**32 - 1)
"""Ids that files write where they mean none."""


@dataclass(frozen=True)
class SpecialIds:
    """Special ids of a vocabulary, and what goes around a text."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    unknown: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def around(self, ids: list[int]) -> list[int]:
        """Return `ids` between the special ids that belong there."""
        return [*self.before, *ids, *self.after]


def special_ids(folder: Path) -> tuple[int | None, tuple[int, ...]]:
    """Return the BOS id and the EOS ids of a model.

    Parameters
    ----------
    folder : Path
        Folder with generation_config.json, which wins, or config.json.

    Returns
    -------
    bos : int or None
        None if neither file states it.
    eos : tuple of int
        Empty if neither file states it.

    Raises
    ------
    UsageError
        If a file is not JSON, or states an id that is not a number.
    """
    stated: dict[str, tuple[int, ...]] = {}
    for name in ("generation_config.json", "config.json"):
        config = read_object(folder / name, missing_ok=True) or {}
        for key in ("bos_token_id", "eos_token_id"):
            if config.get(key) is not None:
                stated.setdefault(key, _ids(config[key], f"{folder / name}: {key}"))
    bos = stated.get("bos_token_id", ())
    return (bos[0] if bos else None), stated.get("eos_token_id", ())


def role_ids(folder: Path) -> dict[str, int]:
    """Return "user_token" and "assistant_token" where generation_config.json states their ids."""
    path = folder / "generation_config.json"
    config = read_object(path, missing_ok=True) or {}
    stated = {role: config.get(f"{role}_id") for role in ("user_token", "assistant_token")}
    found = {role: _ids(value, f"{path}: {role}_id") for role, value in stated.items() if value}
    return {role: ids[0] for role, ids in found.items() if ids}


def _ids(value: Any, where: str) -> tuple[int, ...]:
    """Return one id or a list of ids as a tuple, without those that mean none."""
    values = value if isinstance(value, list) else [value]
    for i in values:
        if type(i) is not int or not (0 <= i <= MAX_TOKEN_ID or i in NO_TOKEN):
            raise UsageError(
                f"{where} must be a token id, 0 to {MAX_TOKEN_ID}, or a list of them, "
                f"got {shown(value)}"
            )
    return tuple(i for i in values if i not in NO_TOKEN)
