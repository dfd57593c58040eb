"""Which files of a repository a model needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nbflow_kernels.errors import UsageError

BESIDE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja",
)  # fmt: skip
"""Files of a Hugging Face folder that go with the weights."""
SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.)")
"""What the name of one part of several has before its suffix."""
_WEIGHTS = (("model", ".safetensors"), ("pytorch_model", ".bin"))
"""Weights of a folder, in order of preference; a safetensors file needs no unpickling."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository."""

    name: str
    """Path within the repository."""
    n_bytes: int | None
    """Its size, None if the server does not say it."""


def choose_files(repo: str, files: Sequence[HubFile], pattern: str | None) -> list[HubFile]:
    """Return the files of a repository that a model needs, weights last.

    Parameters
    ----------
    repo : str
        The repository, for messages.
    files : sequence of HubFile
        All its files.
    pattern : str, optional
        Shell pattern of the weights that are meant.

    Raises
    ------
    UsageError
        If there are no weights, or it is not clear which are meant.

    Examples
    --------
    >>> from nbflow.hub import HubFile, choose_files
    >>> names = ["README.md", "config.json", "model.safetensors", "pytorch_model.bin"]
    >>> [f.name for f in choose_files("a/b", [HubFile(name, 1) for name in names], None)]
    ['config.json', 'model.safetensors']
    """
    by_name = {file.name: file for file in files if _stays_inside(file.name)}
    if pattern is not None:
        weights = [name for name in by_name if fnmatchcase(name, pattern)]
        _check_one(repo, weights, f"pattern {pattern!r} matches", sorted(by_name))
    else:
        weights = _default_weights(repo, by_name)
    if weights[0].endswith(".gguf"):  # it holds its configuration and its tokenizer
        return [by_name[name] for name in weights]
    index = re.sub(SHARD, "", weights[0]) + ".index.json"
    beside = [name for name in (*BESIDE, index) if name in by_name]
    return [by_name[name] for name in (*beside, *sorted(weights))]


def _stays_inside(name: str) -> bool:
    """Return whether a name that a server says is one of a file within the folder it goes to."""
    parts = name.replace("\\", "/").split("/")
    return not {"", ".", ".."} & set(parts) and ":" not in parts[0]


def _default_weights(repo: str, by_name: dict[str, HubFile]) -> list[str]:
    """Return the weights of a folder, else the one GGUF file."""
    for stem, suffix in _WEIGHTS:
        whole = f"{stem}{suffix}"
        if whole in by_name:
            return [whole]
        parts = [n for n in by_name if n.endswith(suffix) and re.sub(SHARD, "", n) == whole]
        if parts:
            _check_one(repo, parts, "the weights are", sorted(by_name))
            return parts
    ggufs = sorted(name for name in by_name if name.endswith(".gguf"))
    if not ggufs:
        raise UsageError(
            f"{repo} has no weights that can be read (model.safetensors, pytorch_model.bin, "
            f"*.gguf); its files: {shortened(sorted(by_name))}"
        )
    _check_one(repo, ggufs, "there are", ggufs)
    return ggufs


def _check_one(repo: str, weights: list[str], what: str, others: list[str]) -> None:
    """Raise unless the names are one file, or all parts of one."""
    if not weights:
        raise UsageError(f"{repo}: {what} no file; there are {shortened(others)}")
    wholes = {re.sub(SHARD, "", name) for name in weights}
    if len(wholes) > 1:
        raise UsageError(
            f"{repo}: {what} {shortened(sorted(wholes))}; name one, e.g. "
            f"--file '{sorted(wholes)[0].rsplit('/', 1)[-1].replace('.gguf', '*.gguf')}'"
        )
    match = SHARD.search(weights[0])
    if match and len(weights) != int(match.group(1)):
        raise UsageError(
            f"{repo}: {len(weights)} of the {int(match.group(1))} parts of {wholes.pop()} are "
            "there or match; all are needed"
        )


def shortened(names: Iterable[str], most: int = 12) -> str:
    """Return names for a message, not more than a few."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more if listed else "none"
