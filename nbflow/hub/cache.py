"""Where huggingface_hub, which need not be installed, keeps models, and finding them there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nbflow.hub.choose import SHARD, shortened
from nbflow_kernels.errors import UsageError

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_repo_name(name: str) -> bool:
    """Return whether a name has the form of a repository's, ``org/name``."""
    return _REPO.fullmatch(name) is not None


def cache_folder() -> Path:
    """Return the cache of huggingface_hub, which need not be installed."""
    home = os.environ.get("HF_HOME")
    if home is None:
        above = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
        home = os.fspath(Path(above) / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", Path(home) / "hub")).expanduser()


def repo_folder(repo: str) -> Path:
    """Return where the cache keeps what belongs to a repository."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def find_cached(repo: str) -> Path | None:
    """Return a model that lies in the cache: its folder, or its GGUF file.

    Raises
    ------
    UsageError
        If several GGUF files of the repository lie there.
    """
    ref = repo_folder(repo) / "refs" / "main"
    if not ref.is_file():
        return None
    snapshot = repo_folder(repo) / "snapshots" / ref.read_text(encoding="utf-8").strip()[:64]
    if any(snapshot.glob("*.safetensors")) or any(snapshot.glob("*.bin")):
        return snapshot
    ggufs = sorted(snapshot.rglob("*.gguf"))
    whole = {re.sub(SHARD, "", path.name): path for path in reversed(ggufs)}
    if len(whole) > 1:
        raise UsageError(
            f"several files of {repo} have been downloaded; name one: "
            f"{shortened(map(str, sorted(whole.values())))}"
        )
    return next(iter(whole.values()), None)


def repo_of(path: Path) -> str | None:
    """Return the name of the repository that a file or folder in the cache belongs to."""
    for parent in (path, *path.parents):
        if parent.parent.name == "snapshots" and parent.parent.parent.name.startswith("models--"):
            return parent.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return None
