"""Downloading a model, through the huggingface_hub package (extra ``hub``)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbflow.hub.cache import cache_folder, is_repo_name, repo_folder
from nbflow.hub.choose import HubFile, choose_files
from nbflow.hub.download import download
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command

ENDPOINT = "https://huggingface.co"

_COMMIT = re.compile(r"[0-9a-f]{40,64}")

Report = Callable[[str], None]


def pull(
    repo: str,
    *,
    files: str | None = None,
    revision: str = "main",
    folder: str | os.PathLike[str] | None = None,
    report: Report = lambda line: None,
) -> Path:
    """Download what is needed to run a model, and nothing else.

    That is the configuration, the tokenizer, and the weights: safetensors if there are any, else a
    torch checkpoint, else the one GGUF file.  What is there already is not downloaded again.

    Parameters
    ----------
    repo : str
        ``org/name``.
    files : str, optional
        Shell pattern of the weights that are meant, e.g. ``"*Q4_K_M.gguf"``; it must match one
        file, or the parts of one.
    revision : str
        Branch, tag or commit.
    folder : path, optional
        Where to put the files; by default the cache of huggingface_hub, where `nbflow.load`
        finds the model by its name.
    report : callable
        Given a line for every file.

    Returns
    -------
    Path
        The folder, or the GGUF file: what `nbflow.load` takes.

    Raises
    ------
    UsageError
        If there is no such repository, revision or file, access is not granted, the server cannot
        be reached, or it is not clear which weights are meant.
    MissingExtraError
        If huggingface_hub is not installed.
    """
    if not is_repo_name(repo):
        raise UsageError(f"a model of the Hub must be named ORG/NAME, got {repo!r:.80}")
    hub = _import_hub()
    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
    where = _Where(hub, endpoint, repo, revision)
    with where:
        info = hub.HfApi(endpoint=endpoint).model_info(repo, revision=revision, files_metadata=True)
    if not _COMMIT.fullmatch(info.sha or ""):
        raise UsageError(f"{endpoint} says no commit of {repo}")
    listed = [HubFile(s.rfilename, getattr(s, "size", None)) for s in info.siblings or ()]
    wanted = choose_files(repo, listed, files)
    paths = []
    place = None if folder is None else Path(folder)
    for file in wanted:
        report(f"{file.name}  {_size(file.n_bytes)}")
        with where:
            path = download(hub, endpoint, repo, file.name, info.sha, cache_folder(), place)
        paths.append(path)
    if folder is None and revision != info.sha:
        _remember(repo, revision, info.sha)
    ggufs = [path for path in paths if path.suffix == ".gguf"]
    if ggufs:
        return ggufs[0]
    depth = wanted[0].name.count("/") + 1
    return paths[0].parents[depth - 1]


def _remember(repo: str, revision: str, commit: str) -> None:
    """Write down which commit a branch is at; downloads by commit leave that out."""
    ref = repo_folder(repo) / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit, encoding="utf-8")


def _size(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "size unknown"
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"


def _import_hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.file_download
        import huggingface_hub.utils
    except ImportError as error:
        raise MissingExtraError(
            f"downloading models needs huggingface_hub: {install_command('hub')}"
        ) from error
    return huggingface_hub


class _Where:
    """A context that says in our words what went wrong."""

    def __init__(self, hub: Any, endpoint: str, repo: str, revision: str) -> None:
        self._errors = hub.utils
        self._endpoint, self._repo, self._revision = endpoint, repo, revision

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, UsageError):
            raise UsageError(self._explained(error)) from error

    def _explained(self, error: Exception) -> str:
        known, page = self._errors, f"{self._endpoint}/{self._repo}"
        if isinstance(error, known.GatedRepoError):
            return (
                f"{self._repo} is gated: accept its terms at {page}, make an access token, and "
                "set HF_TOKEN to it"
            )
        if isinstance(error, known.RepositoryNotFoundError):
            return (
                f"there is no model {self._repo} at {self._endpoint}, or it is private: check the "
                "name; for a private one set HF_TOKEN to an access token"
            )
        if isinstance(error, known.RevisionNotFoundError):
            return f"{self._repo} has no revision {self._revision!r}; see {page}/tree/main"
        if isinstance(error, known.HfHubHTTPError):
            return f"{self._repo}: {self._endpoint} answers: {error}"
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return (
            f"{self._repo} could not be downloaded from {self._endpoint}: {reason[0]:.200}; what "
            "has arrived is kept, and the same command goes on from there"
        )
