"""Models of the Hugging Face Hub: which files a model needs, downloading them, finding them again.

They come into the cache of huggingface_hub, which other programs share, or into a folder.
"""

from nbflow.hub.cache import find_cached, is_repo_name, repo_of
from nbflow.hub.choose import BESIDE, HubFile, choose_files
from nbflow.hub.pull import pull

__all__ = [
    "BESIDE",
    "HubFile",
    "choose_files",
    "find_cached",
    "is_repo_name",
    "pull",
    "repo_of",
]
