"""What names a page by its content: a chain of digests over the tokens up to its end.

Two sequences that begin with the same tokens compute the same keys and values for them, so a page
is named by the tokens from the beginning of the sequence to the last one it holds.  The chain
begins with a salt: whatever else the keys and values depend on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

DIGEST_BYTES = 16
"""128 bits: that two texts get one name is as good as impossible, even if somebody tries."""


def page_hash(before: bytes, tokens: array[int]) -> bytes:
    """Return the name of a page with these tokens, which follows the page of name `before`."""
    return blake2b(before + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginnings."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


@dataclass
class HashChain:
    """The names of a sequence's full pages, from the first one on.

    Examples
    --------
    >>> a, b = Chain(b""), Chain(b"")
    >>> a.extend([1, 2, 3, 4], page_size=2, n_pages=2)
    >>> b.extend([1, 2, 3, 5], page_size=2, n_pages=2)
    >>> a.names[0] == b.names[0], a.names[1] == b.names[1]
    (True, False)
    """

    salt: bytes
    """What the chain begins with."""
    hashes: list[bytes] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("i"))
    """The tokens that are looked up."""

    def before(self, page: int) -> bytes:
        """Return the name of the page before this one."""
        return self.hashes[page - 1] if page else self.salt

    def extend(self, ids: Sequence[int], page_size: int, n_pages: int) -> None:
        """Have the names of the first `n_pages` pages; `ids` are the sequence's tokens."""
        for page in range(len(self.hashes), n_pages):
            tokens = array("i", ids[page * page_size : (page + 1) * page_size])
            self.hashes.append(page_hash(self.before(page), tokens))

    def copy(self) -> HashChain:
        """Return a chain that goes its own way from here."""
        return HashChain(self.salt, list(self.hashes), self.ids)
