"""Prefix cache keys: chained hashes of page contents.

Sequences with equal prefixes have equal keys and values, so a full page is identified by a hash of
all tokens up to its end.  The chain starts with a salt: everything else that keys and values depend
on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

DIGEST_BYTES = 16
"""128 bits: collisions are negligible, also adversarial ones."""


def page_hash(before: bytes, tokens: array[int]) -> bytes:
    """Return the hash of a page with these tokens after the page with hash `before`."""
    return blake2b(before + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


@dataclass
class HashChain:
    """Hashes of the full pages of a sequence.

    Examples
    --------
    >>> a, b = HashChain(b""), HashChain(b"")
    >>> a.extend([1, 2, 3, 4], page_size=2, n_pages=2)
    >>> b.extend([1, 2, 3, 5], page_size=2, n_pages=2)
    >>> a.hashes[0] == b.hashes[0], a.hashes[1] == b.hashes[1]
    (True, False)
    """

    salt: bytes
    """Start of the chain."""
    hashes: list[bytes] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("i"))
    """Tokens to look up."""

    def before(self, page: int) -> bytes:
        """Return the hash of the preceding page, or the salt."""
        return self.hashes[page - 1] if page else self.salt

    def extend(self, ids: Sequence[int], page_size: int, n_pages: int) -> None:
        """Hash pages up to `n_pages`; `ids` are the tokens of the sequence."""
        for page in range(len(self.hashes), n_pages):
            tokens = array("i", ids[page * page_size : (page + 1) * page_size])
            self.hashes.append(page_hash(self.before(page), tokens))

    def copy(self) -> HashChain:
        """Return an independent copy."""
        return HashChain(self.salt, list(self.hashes), self.ids)
