"""Download of one file that goes on where it stopped, also after the program was ended.

huggingface_hub goes on after a cut connection, but some versions of it begin anew when the program
is started again.  Here what has arrived stays in a file of its own until all of it is there; then
the file gets its name and is checked against the hash that the Hub states.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from nbflow_kernels.errors import UsageError

_NAME = re.compile(r"[\w-][\w.-]{7,127}")
"""What a hash is made of, which becomes the name of a file."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 50 * 10**9
"""Files above are not served whole; huggingface_hub fetches them in another way."""
_READ_BYTES = 1 << 22


def download(
    hub: Any, endpoint: str, repo: str, name: str, commit: str, cache: Path, folder: Path | None
) -> Path:
    """Download a file unless it is there, and return where it is.

    Parameters
    ----------
    hub : module
        The package huggingface_hub.
    endpoint : str
        Address of the server.
    repo, name, commit : str
        Repository, path within it, and commit.
    cache : Path
        The cache of huggingface_hub.
    folder : Path, optional
        Where to put it instead, under its own name.
    """
    url = hub.hf_hub_url(repo, name, revision=commit, endpoint=endpoint)
    headers = hub.utils.build_hf_headers()
    about = hub.get_hf_file_metadata(url, headers=headers)
    if about.size is None or not _NAME.fullmatch(about.etag or ""):
        raise UsageError(f"{url}: the server says no size or hash of the file")
    if about.size > _LARGEST:
        place = {"cache_dir": cache} if folder is None else {"local_dir": folder}
        return Path(hub.hf_hub_download(repo, name, revision=commit, endpoint=endpoint, **place))
    if folder is None:
        target: Path = cache / f"models--{repo.replace('/', '--')}" / "blobs" / about.etag
    else:
        target = folder / name
    if not target.is_file() or (folder is not None and target.stat().st_size != about.size):
        if urlparse(about.location).netloc != urlparse(url).netloc:
            headers.pop("authorization", None)  # the token is for the Hub alone
        _fetch(hub, about, headers, target)
    if folder is not None:
        return target
    # it lies there already: this puts a link to it where other programs look for it
    return Path(
        hub.hf_hub_download(repo, name, revision=commit, endpoint=endpoint, cache_dir=cache)
    )


def _fetch(hub: Any, about: Any, headers: dict[str, str], target: Path) -> None:
    """Download to a file beside the target, whose name says what is in it, and rename it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name[:64]}.{about.etag[:16]}.nbflow-incomplete")
    with open(partial, "ab") as file:
        _lock(file, target)
        here = file.tell()
        if here > about.size:
            file.truncate(here := 0)
        free = shutil.disk_usage(target.parent).free
        if about.size - here > free:
            raise UsageError(
                f"{target.name}: {about.size - here:,} bytes are to come, but {target.parent} has "
                f"room for {free:,} only"
            )
        hub.file_download.http_get(
            about.location, file, resume_size=here, headers=headers, expected_size=about.size
        )
    if _SHA256.fullmatch(about.etag) and _sha256(partial) != about.etag:
        partial.unlink()
        raise UsageError(
            f"{target.name}: what has arrived has another hash than the Hub states; it was "
            "removed, download it again"
        )
    os.replace(partial, target)


def _lock(file: Any, target: Path) -> None:
    """Raise if another program is at work on the same file."""
    try:
        import fcntl
    except ImportError:  # Windows has none
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"{target.name}: another program is downloading it") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()
