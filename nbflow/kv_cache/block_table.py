"""Which pages of the key/value cache belong to which sequence.  Plain Python and index arrays.

Pages are numbered; every layer of every rank uses the same numbers.  A page is in one of three
states: *free*; *held* by one or more sequences; or *cached*: held by none, but kept for a sequence
that begins with the same tokens (`nbflow.kv_cache.prefix_cache`).  Cached pages are given away when
no other page is left, the one that was used longest ago first.  A sequence need not go on as the
cached one did: of the first page in which they differ it takes the tokens that are alike.

Several sequences may hold one page, but only to read it: who writes behind the end of a sequence
(`extend`) has the page it writes to for itself.  Where it is shared, the sequence gets a copy,
which the storage makes before the next step (`take_copies`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from nbflow.kv_cache.prefix_cache import HashChain, common_prefix_len, page_hash

UNLIMITED = 2**31 - 1
"""Number of pages when there is no limit."""

MAX_COMPARED = 8
"""Pages behind one prefix, the youngest ones, that a sequence's next tokens are compared with."""


GROWTH_PAGES = 16
"""Least number of pages that a table without a limit makes at a time."""


def pages_after_growth(n_pages: int) -> int:
    """Return how many pages a table without a limit has made when `n_pages` have been needed."""
    have = 0
    while have < n_pages:
        have += max(GROWTH_PAGES, have // 2)
    return have


class NoFreePageError(RuntimeError):
    """Every page is held by a sequence; nothing has changed."""


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0
    chain: HashChain | None = None
    """Names of the full pages of the known tokens; None if the pages are not to be shared."""
    long: bool = False
    """True if its rotary angles are those of long sequences (LongRoPE)."""
    n_cached_pages: int = 0
    """Leading full pages that have been entered into the cache, or were found there."""
    index: np.ndarray | None = None
    """`pages` as an array, until they change."""
    writable_length: int = 0
    """Up to this length it is known that the sequence may write to its pages."""


@dataclass(frozen=True)
class _Content:
    """What a named page holds."""

    hash_: bytes
    before: bytes
    """Name of the page before it."""
    tokens: array[int]


@dataclass(frozen=True)
class PageView:
    """The pages of a step's sequences, as FlashInfer's CSR triple and lengths."""

    kv_indptr: np.ndarray
    """int32 (B + 1,): where each sequence's pages begin in `kv_indices`."""
    kv_indices: np.ndarray
    """int32: page numbers, sequence after sequence."""
    kv_last_page_len: np.ndarray
    """int32 (B,): tokens in each sequence's last page, 1..page_size."""
    kv_lens: np.ndarray
    """int32 (B,): tokens of each sequence."""


class BlockTable:
    """Pages of `page_size` tokens, given to sequences and taken back.

    Parameters
    ----------
    page_size : int
        Tokens per page.
    max_pages : int, optional
        Most pages there may be; by default as many as are asked for.  `n_pages` says how many the
        storage must have; it grows up to `max_pages`.
    salt : bytes
        What the content of the pages depends on besides the tokens, e.g. model and format.
    """

    def __init__(
        self, page_size: int = 16, max_pages: int | None = None, salt: bytes = b""
    ) -> None:
        self.page_size = page_size
        self.max_pages = UNLIMITED if max_pages is None else max_pages
        self.n_pages = 0
        self.hit_tokens = self.asked_tokens = 0
        """Tokens found in the cache, and those looked for, since the beginning."""
        self._salt = salt
        self._sequences: dict[int, _Sequence] = {}
        self._free: list[int] = []
        self._ref_counts: list[int] = []  # of each page
        self._page_of_hash: dict[bytes, int] = {}  # by name
        self._content: dict[int, _Content] = {}  # of the named pages
        self._children: dict[
            bytes, dict[int, None]
        ] = {}  # named pages by the name before, oldest 1st
        self._cached: OrderedDict[int, None] = OrderedDict()  # named pages nobody holds, oldest 1st
        self._in_flight: dict[bytes, int] = {}  # name to who computes it
        self._copies: list[tuple[int, int]] = []

    # ---- sequences ----------------------------------------------------------------------------

    def chain(self, ids: Sequence[int], salt: bytes = b"") -> HashChain:
        """Return the names of the full pages of a sequence of tokens, for `find` and `add`.

        `salt` is what its keys and values depend on besides these tokens and the table's own salt,
        e.g. the input of an encoder.
        """
        chain = HashChain(self._salt + salt, ids=array("i", ids))
        chain.extend(ids, self.page_size, len(ids) // self.page_size)
        return chain

    def find(self, chain: HashChain, n_tokens: int) -> tuple[int, bool]:
        """Look a sequence of `n_tokens` tokens up, without changing anything.

        Returns
        -------
        int
            How many of its first tokens the cache has.  The last token is never taken from there:
            something must be computed for the next token to come out.
        bool
            Whether a present sequence is computing the first page that is missing.
        """
        n_full = self._n_cached_full_pages(chain, n_tokens)
        length = n_full * self.page_size + self._partial_match(chain, n_full, n_tokens)[1]
        hashes = chain.hashes[: max(0, n_tokens - 1) // self.page_size]
        return length, n_full < len(hashes) and hashes[n_full] in self._in_flight

    def n_new_pages(self, chain: HashChain | None, n_tokens: int) -> int:
        """Return how many available pages a new sequence of `n_tokens` tokens takes."""
        total = -(-n_tokens // self.page_size)
        if chain is None:
            return total
        n_full = self._n_cached_full_pages(chain, n_tokens)
        return total - sum(
            self._ref_counts[self._page_of_hash[n]] > 0 for n in chain.hashes[:n_full]
        )

    def add(
        self, sequence: int, chain: HashChain | None = None, n_tokens: int = 0, long: bool = False
    ) -> int:
        """Begin a sequence; return how many of its first tokens the cache has already.

        Parameters
        ----------
        sequence : int
            A number that no present sequence has.
        chain : Chain, optional
            Names of its pages, from `chain`; the table goes on to use it.  Without it, nothing is
            looked up in the cache and nothing of this sequence kept there.
        n_tokens : int
            How many tokens there are.
        long : bool
            Whether its rotary angles are those of long sequences (LongRoPE); the salt of `chain`
            must say so, too.
        """
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is in the page table already")
        entry = self._sequences[sequence] = _Sequence(chain=chain, long=long)
        if chain is None:
            return 0
        entry.n_cached_pages = self._n_cached_full_pages(chain, n_tokens)
        entry.pages = [self._page_of_hash[hash_] for hash_ in chain.hashes[: entry.n_cached_pages]]
        part, n_in_part = self._partial_match(chain, entry.n_cached_pages, n_tokens)
        if n_in_part:
            entry.pages.append(part)
        entry.length = length = entry.n_cached_pages * self.page_size + n_in_part
        for page in entry.pages:
            self._ref(page)
        for hash_ in chain.hashes[entry.n_cached_pages :]:
            self._in_flight.setdefault(hash_, sequence)
        self.hit_tokens += length
        self.asked_tokens += n_tokens
        return length

    def extend(self, sequence: int, n_tokens: int) -> None:
        """Make room for `n_tokens` more tokens of a sequence and count them in.

        Raises
        ------
        NoFreePageError
            If there are not enough pages; the sequence is as it was.
        """
        self.reserve(sequence, n_tokens)
        self._sequences[sequence].length += n_tokens

    def reserve(self, sequence: int, n_tokens: int) -> None:
        """Give a sequence the pages for `n_tokens` more tokens without counting these in."""
        if not self.try_reserve(sequence, n_tokens):
            raise NoFreePageError(f"no page is free for sequence {sequence}")

    def try_reserve(self, sequence: int, n_tokens: int) -> bool:
        """Do what `reserve` does, or nothing if there are not enough pages; return which."""
        entry = self._sequences[sequence]
        if entry.length + n_tokens <= entry.writable_length:
            return True
        if self.n_missing_pages(sequence, n_tokens) > self.n_available:
            return False
        if n_tokens > 0:
            self._copy_on_write(entry)
        n_pages = -(-(entry.length + n_tokens) // self.page_size)
        if len(entry.pages) < n_pages:
            entry.pages += [self._allocate() for _ in range(n_pages - len(entry.pages))]
            entry.index = None
        if n_tokens > 0:
            entry.writable_length = len(entry.pages) * self.page_size
        return True

    def n_missing_pages(self, sequence: int, n_tokens: int) -> int:
        """Return how many pages `reserve` would take."""
        entry = self._sequences[sequence]
        if entry.length + n_tokens <= entry.writable_length:
            return 0
        copied = n_tokens > 0 and self._last_page_is_shared(entry)
        return int(copied) + max(
            0, -(-(entry.length + n_tokens) // self.page_size) - len(entry.pages)
        )

    def commit(self, sequence: int, ids: Sequence[int]) -> None:
        """Say that the pages of a sequence are computed, and enter the full ones into the cache.

        `ids` are its tokens from the beginning, at least as many as its length.  Tokens that may
        be taken back (`truncate`) are better not among them.
        """
        entry = self._sequences[sequence]
        n_full = entry.length // self.page_size
        if entry.chain is None or n_full <= entry.n_cached_pages:
            return
        entry.chain.extend(ids, self.page_size, n_full)
        for at in range(entry.n_cached_pages, n_full):
            hash_ = entry.chain.hashes[at]
            if self._in_flight.get(hash_) == sequence:
                del self._in_flight[hash_]
            tokens = array("i", ids[at * self.page_size : (at + 1) * self.page_size])
            self._enter_cache(entry.pages[at], _Content(hash_, entry.chain.before(at), tokens))
        entry.n_cached_pages = n_full

    def has_full_page(self, sequence: int) -> bool:
        """Return whether `commit` has something to enter."""
        entry = self._sequences[sequence]
        return entry.length // self.page_size > entry.n_cached_pages

    def fork(self, sequence: int, new: int) -> None:
        """Begin a sequence with everything another one has; they share its pages.

        The first of them to go on gets a copy of the last page, if that is not full.
        """
        if new in self._sequences:
            raise ValueError(f"sequence {new} is in the page table already")
        entry = self._sequences[sequence]
        pages = entry.pages[: -(-entry.length // self.page_size)]
        for page in pages:
            self._ref(page)
        entry.writable_length = 0
        chain = None if entry.chain is None else entry.chain.copy()
        self._sequences[new] = _Sequence(
            pages, entry.length, chain, entry.long, entry.n_cached_pages
        )

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens of a sequence, and the pages behind them."""
        entry = self._sequences[sequence]
        if not 0 <= length <= entry.length:
            raise ValueError(f"length must be 0..{entry.length}, got {length}")
        n_pages = -(-length // self.page_size)
        self._unref(entry.pages[n_pages:])
        self._drop_in_flight(sequence, entry)
        n_full = length // self.page_size
        del entry.pages[n_pages:]
        if entry.chain is not None:
            del entry.chain.hashes[n_full:]
        entry.n_cached_pages = min(entry.n_cached_pages, n_full)
        entry.length, entry.index, entry.writable_length = length, None, 0

    def drop(self, sequence: int, ids: Sequence[int] = ()) -> None:
        """End a sequence; pages that nobody else holds become free, or cached.

        `ids`, if given, are its computed tokens from the beginning, at least those of the pages
        that have been entered: the last page is then kept, too, though it is not full.
        """
        entry = self._sequences.pop(sequence)
        self._cache_partial_page(entry, ids[: entry.length])
        self._drop_in_flight(sequence, entry)
        self._unref(entry.pages)

    def clear_cache(self) -> None:
        """Forget which tokens the pages hold; those nobody holds become free."""
        self._free += self._cached
        self._cached.clear()
        self._page_of_hash.clear()
        self._content.clear()
        self._children.clear()

    def grow(self, n_pages: int) -> None:
        """Have at least `n_pages` pages, so that the storage need not grow in between."""
        more = min(n_pages, self.max_pages) - self.n_pages
        if more > 0:
            self._free[:0] = range(self.n_pages + more - 1, self.n_pages - 1, -1)
            self._ref_counts += [0] * more
            self.n_pages += more

    # ---- looking ------------------------------------------------------------------------------

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    @property
    def sequences(self) -> list[int]:
        """The numbers of the present sequences."""
        return list(self._sequences)

    @property
    def n_available(self) -> int:
        """Number of pages that can be given out: free, cached, or yet to be made."""
        return len(self._free) + len(self._cached) + self.max_pages - self.n_pages

    @property
    def n_used_pages(self) -> int:
        """Number of pages that sequences hold."""
        return self.n_pages - len(self._free) - len(self._cached)

    @property
    def n_cached(self) -> int:
        """Number of pages that are kept for sequences that begin alike."""
        return len(self._cached)

    def length(self, sequence: int) -> int:
        """Return the tokens of a sequence."""
        return self._sequences[sequence].length

    def is_long(self, sequence: int) -> bool:
        """Return whether a sequence's rotary angles are those of long sequences."""
        return self._sequences[sequence].long

    def view(self, sequences: Sequence[int]) -> PageView:
        """Return the pages of these sequences, in this order."""
        entries = [self._sequences[s] for s in sequences]
        indptr = np.zeros(len(entries) + 1, np.int32)
        np.cumsum([len(e.pages) for e in entries], out=indptr[1:])
        parts = []
        for entry in entries:
            if entry.index is None:
                entry.index = np.array(entry.pages, np.int32)
            parts.append(entry.index)
        indices = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        lengths = np.array([e.length for e in entries], np.int32)
        return PageView(indptr, indices, (lengths - 1) % self.page_size + 1, lengths)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return pairs (from, to) of pages to be copied, in this order, before the next step."""
        copies, self._copies = self._copies, []
        return copies

    # ---- pages --------------------------------------------------------------------------------

    def _n_cached_full_pages(self, chain: HashChain, n_tokens: int) -> int:
        """Return how many pages of a sequence of `n_tokens` the cache has, one after the other."""
        hashes = chain.hashes[: max(0, n_tokens - 1) // self.page_size]
        return next(
            (i for i, hash_ in enumerate(hashes) if hash_ not in self._page_of_hash), len(hashes)
        )

    def _partial_match(self, chain: HashChain, n_full: int, n_tokens: int) -> tuple[int, int]:
        """Return the page that goes on most like a sequence behind `n_full` pages, and how far."""
        begin = n_full * self.page_size
        wanted = chain.ids[begin : min(begin + self.page_size, n_tokens - 1)]
        best, most = -1, 0
        after = self._children.get(chain.before(n_full), {})
        for page in islice(reversed(after), MAX_COMPARED):
            alike = common_prefix_len(self._content[page].tokens, wanted)
            if alike > most:
                best, most = page, alike
        return best, most

    def _cache_partial_page(self, entry: _Sequence, ids: Sequence[int]) -> None:
        """Name the last page of a sequence that ends, if it is not full and nobody else has it."""
        at, length = divmod(len(ids), self.page_size)
        if entry.chain is None or not length or at > entry.n_cached_pages:
            return
        page = entry.pages[at]
        if self._ref_counts[page] == 1:
            before, tokens = entry.chain.before(at), array("i", ids[at * self.page_size :])
            self._enter_cache(page, _Content(page_hash(before, tokens), before, tokens))

    def _enter_cache(self, page: int, content: _Content) -> None:
        """Enter a page into the cache, if it is not there and no other one holds the same."""
        if content.hash_ not in self._page_of_hash and page not in self._content:
            self._page_of_hash[content.hash_], self._content[page] = page, content
            self._children.setdefault(content.before, {})[page] = None

    def _ref(self, page: int) -> None:
        self._ref_counts[page] += 1
        self._cached.pop(page, None)

    def _unref(self, pages: Sequence[int]) -> None:
        """Count one holder less; the last pages of a sequence are given away before the first."""
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                if page in self._content:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def _allocate(self) -> int:
        """Return a page for one sequence alone."""
        if not self._free and self.n_pages < self.max_pages:
            self.grow(self.n_pages + max(GROWTH_PAGES, self.n_pages // 2))
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._evict(page)
        self._ref_counts[page] = 1
        return page

    def _evict(self, page: int) -> None:
        content = self._content.pop(page, None)
        if content is None:
            return
        del self._page_of_hash[content.hash_]
        after = self._children[content.before]
        del after[page]
        if not after:
            del self._children[content.before]

    def _last_page_is_shared(self, entry: _Sequence) -> bool:
        """Return whether the next token goes to a page that others read, too."""
        if entry.length % self.page_size == 0:
            return False
        return self._ref_counts[entry.pages[entry.length // self.page_size]] > 1

    def _copy_on_write(self, entry: _Sequence) -> None:
        """See to it that the page with the last token, if not full, is this sequence's alone."""
        if entry.length % self.page_size == 0:
            return
        at, used = divmod(entry.length, self.page_size)
        page = entry.pages[at]
        more = page in self._content and used < len(self._content[page].tokens)
        copy_is_free = self._free or self.n_pages < self.max_pages
        if self._ref_counts[page] == 1 and not (more and copy_is_free):
            self._evict(page)  # it is going to hold something else
            return
        copy = self._allocate()
        self._copies.append((page, copy))
        self._unref([page])
        entry.pages[at], entry.index = copy, None

    def _drop_in_flight(self, sequence: int, entry: _Sequence) -> None:
        if entry.chain is not None:
            for hash_ in entry.chain.hashes[entry.n_cached_pages :]:
                if self._in_flight.get(hash_) == sequence:
                    del self._in_flight[hash_]
