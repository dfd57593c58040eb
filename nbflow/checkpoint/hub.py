"""Models of the Hugging Face Hub: select, download and find their files.

`huggingface_hub` (extra ``hub``) downloads files to its cache or to a folder.  Finding a model in
the cache does not need the package.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nbflow.checkpoint.shards import refuse_embedded_adapter
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command

ENDPOINT = "https://huggingface.co"
AUXILIARY_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja",
)  # fmt: skip
"""Files of a Hugging Face folder besides the weights."""
_SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.)")
"""Part number in the name of a shard, before its suffix."""
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = (("model", ".safetensors"), ("pytorch_model", ".bin"))
"""Weights of a folder, in order of preference."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository."""

    name: str
    """Path within the repository."""
    n_bytes: int | None
    """Size, None if the server does not state it."""


def choose_files(repo: str, files: Sequence[HubFile], pattern: str | None) -> list[HubFile]:
    """Select the files of a repository that a model needs, weights last.

    `pattern` is a shell pattern of the weights; without weights, or with several of which none is
    selected, it raises `UsageError`.

    Examples
    --------
    >>> from nbflow.checkpoint.hub import HubFile, choose_files
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
    index = re.sub(_SHARD, "", weights[0]) + ".index.json"
    others = [name for name in (*AUXILIARY_FILES, index) if name in by_name]
    return [by_name[name] for name in (*others, *sorted(weights))]


def _stays_inside(name: str) -> bool:
    """Return whether the name of a remote file stays within its folder."""
    parts = name.replace("\\", "/").split("/")
    return not {"", ".", ".."} & set(parts) and ":" not in parts[0]


def _default_weights(repo: str, by_name: dict[str, HubFile]) -> list[str]:
    """Return the weights of the repository, else its only GGUF file."""
    for stem, suffix in _WEIGHTS:
        whole = f"{stem}{suffix}"
        parts = [n for n in by_name if n.endswith(suffix) and re.sub(_SHARD, "", n) == whole]
        if parts:
            refuse_embedded_adapter(repo, by_name, f"name its weights: --file '{stem}*{suffix}'")
        if whole in by_name:
            return [whole]
        if parts:
            _check_one(repo, parts, "the weights are", sorted(by_name))
            return parts
    ggufs = sorted(name for name in by_name if name.endswith(".gguf"))
    if not ggufs:
        raise UsageError(
            f"{repo} has no weights that can be read (model.safetensors, pytorch_model.bin, "
            f"*.gguf); its files: {_shortened(sorted(by_name))}"
        )
    _check_one(repo, ggufs, "there are", ggufs)
    return ggufs


def _check_one(repo: str, weights: list[str], what: str, others: list[str]) -> None:
    """Raise unless the names are one file, or all shards of one."""
    if not weights:
        raise UsageError(f"{repo}: {what} no file; its files: {_shortened(others)}")
    wholes = {re.sub(_SHARD, "", name) for name in weights}
    if len(wholes) > 1:
        raise UsageError(
            f"{repo}: {what} {_shortened(sorted(wholes))}; name one, e.g. "
            f"--file '{sorted(wholes)[0].rsplit('/', 1)[-1].replace('.gguf', '*.gguf')}'"
        )
    match = _SHARD.search(weights[0])
    if match and len(weights) != int(match.group(1)):
        raise UsageError(
            f"{repo}: {len(weights)} of the {int(match.group(1))} parts of {wholes.pop()} are "
            "there or match; all are needed"
        )


def _shortened(names: Iterable[str]) -> str:
    """Return at most 12 names for a message."""
    listed = list(names)
    more = f" and {len(listed) - 12} more" if len(listed) > 12 else ""
    return ", ".join(listed[:12]) + more if listed else "none"


def is_repo_name(name: str) -> bool:
    """Return whether a name has the form ``org/name``."""
    return _REPO.fullmatch(name) is not None


def _cache_folder() -> Path:
    """Return the cache folder of huggingface_hub, without the package."""
    home = os.environ.get("HF_HOME")
    if home is None:
        above = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
        home = os.fspath(Path(above) / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", Path(home) / "hub")).expanduser()


def find_cached(repo: str) -> Path | None:
    """Return a cached model: its folder or GGUF file, or None."""
    folder = _cache_folder() / f"models--{repo.replace('/', '--')}"
    ref = folder / "refs" / "main"
    if not ref.is_file():
        return None
    snapshot = folder / "snapshots" / ref.read_text(encoding="utf-8").strip()[:64]
    if any(snapshot.glob("*.safetensors")) or any(snapshot.glob("*.bin")):
        return snapshot
    ggufs = sorted(snapshot.rglob("*.gguf"))
    whole = {re.sub(_SHARD, "", path.name): path for path in reversed(ggufs)}
    if len(whole) > 1:
        raise UsageError(
            f"several files of {repo} have been downloaded; name one: "
            f"{_shortened(map(str, sorted(whole.values())))}"
        )
    return next(iter(whole.values()), None)


def repo_of(path: Path) -> str | None:
    """Return the repository of a file or folder in the cache, or None."""
    for parent in (path, *path.parents):
        if parent.parent.name == "snapshots" and parent.parent.parent.name.startswith("models--"):
            return parent.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return None


def pull(
    repo: str,
    *,
    files: str | None = None,
    revision: str = "main",
    folder: str | os.PathLike[str] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Download the files of a model that are needed to run it.

    These are the configuration, the tokenizer, and the weights: safetensors if available, else a
    torch checkpoint, else the only GGUF file.  Complete files are not downloaded again.

    Parameters
    ----------
    repo : str
        ``org/name``.
    files : str, optional
        Shell pattern of the weights, e.g. ``"*Q4_K_M.gguf"``; it must match one file, or the
        shards of one.
    revision : str
        Branch, tag or commit.
    folder : path, optional
        Target folder; by default the cache of huggingface_hub, where `nbflow.load` finds the model
        by its name.
    report : callable
        Called with a line for every file.

    Returns
    -------
    Path
        The folder or the GGUF file, for `nbflow.load`.

    Raises
    ------
    UsageError
        If the repository, revision or file does not exist, access is denied, the server cannot be
        reached, or the selection of weights is ambiguous.
    MissingExtraError
        If huggingface_hub is not installed.
    """
    if not is_repo_name(repo):
        raise UsageError(f"a model of the Hub must be named ORG/NAME, got {repo!r:.80}")
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise MissingExtraError(
            f"downloading models needs huggingface_hub: {install_command('hub')}"
        ) from error
    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
    try:
        info = hub.HfApi(endpoint=endpoint).model_info(repo, revision=revision, files_metadata=True)
        listed = [HubFile(s.rfilename, getattr(s, "size", None)) for s in info.siblings or ()]
        wanted = choose_files(repo, listed, files)
        for file in wanted:
            report(f"{file.name}  {_size(file.n_bytes)}")
        root = hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[glob.escape(file.name) for file in wanted],
            endpoint=endpoint,
            cache_dir=_cache_folder(),
            local_dir=None if folder is None else Path(folder),
        )
    except UsageError:
        raise
    except Exception as error:  # also of its HTTP library, which depends on the version
        raise UsageError(_explained(error, hub.utils, endpoint, repo, revision)) from error
    weights = wanted[-1].name
    first = min(file.name for file in wanted) if weights.endswith(".gguf") else ""
    return Path(root) / first


def _size(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "size unknown"
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"


def _explained(error: Exception, known: Any, endpoint: str, repo: str, revision: str) -> str:
    """Return the message for an error of huggingface_hub or of its HTTP library."""
    if isinstance(error, known.GatedRepoError):
        return (
            f"{repo} is gated: accept its terms at {endpoint}/{repo}, make an access token, and "
            "set HF_TOKEN to it"
        )
    if isinstance(error, known.RepositoryNotFoundError):
        return (
            f"model {repo} does not exist at {endpoint}, or is private: check the name; for a "
            "private model set HF_TOKEN to an access token"
        )
    if isinstance(error, known.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}; see {endpoint}/{repo}/tree/main"
    if isinstance(error, known.HfHubHTTPError):
        return f"{repo}: {endpoint} answers: {error}"
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return f"{repo} could not be downloaded from {endpoint}: {reason[0]:.200}"
