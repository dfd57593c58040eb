"""Special token ids, and where the files of a Hugging Face folder state them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbflow.utils.json_file import read_object
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id (int32 in kernels).  A model may state ids beyond its vocabulary."""
MAX_VOCABULARY = 1 << 22
"""Bound on the ids of a vocabulary, gaps included: 16 times the largest published one."""
MAX_PIECE_CHARACTERS = 1 << 16
"""Bound on the length of a piece, which thousands of decoded tokens may repeat."""
NO_TOKEN = (-1, 2**32 - 1)
"""Ids that files write for an absent token."""


@dataclass(frozen=True)
class SpecialIds:
    """Special ids of a vocabulary, and those around a text."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    unknown: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def around(self, ids: list[int]) -> list[int]:
        """Return `ids` between `before` and `after`."""
        return [*self.before, *ids, *self.after]


def special_ids(folder: Path) -> tuple[int | None, tuple[int, ...]]:
    """Return the BOS id (or None) and the EOS ids that the files of a folder state.

    generation_config.json wins over config.json.
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
    """Return one id or a list of ids as a tuple, without absent ones."""
    values = value if isinstance(value, list) else [value]
    for i in values:
        if type(i) is not int or not (0 <= i <= MAX_TOKEN_ID or i in NO_TOKEN):
            raise UsageError(
                f"{where} must be a token id, 0 to {MAX_TOKEN_ID}, or a list of them, "
                f"got {shown(value)}"
            )
    return tuple(i for i in values if i not in NO_TOKEN)
