"""Block table: pages of the KV cache that belong to each sequence.

Every layer of every rank uses the same page numbers.  A page is *free*; *used* by one or more
sequences; or *cached*: unreferenced, but kept for sequences with the same prefix
(`nbflow.kv_cache.prefix_cache`).  Cached pages are evicted in LRU order when no page is free.  Of
the first page in which a sequence differs from a cached one, the equal leading tokens are reused.

Shared pages are read-only.  A sequence that appends (`extend`) to a shared page gets a copy
(copy-on-write), which the storage makes before the next step (`take_copies`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from nbflow.kv_cache.prefix_cache import HashChain, common_prefix_len, page_hash
from nbflow.kv_cache.state_table import StateTable

UNLIMITED = 2**31 - 1
"""Number of pages without a limit."""

MAX_COMPARED = 8
"""Most recent pages after a prefix that are compared for a partial match."""


GROWTH_PAGES = 16
"""Least growth of a table without a limit, in pages."""


def pages_after_growth(n_pages: int) -> int:
    """Return the size of an unlimited table after `n_pages` pages were needed."""
    have = 0
    while have < n_pages:
        have += max(GROWTH_PAGES, have // 2)
    return have


class NoFreePageError(RuntimeError):
    """All pages are in use; the table is unchanged."""


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0
    chain: HashChain | None = None
    """Hashes of the full pages; None if the pages are not shared."""
    long: bool = False
    """True for the long rotary factors (LongRoPE)."""
    n_cached_pages: int = 0
    """Leading full pages that are in the prefix cache."""
    index: np.ndarray | None = None
    """`pages` as an array, until they change."""
    writable_length: int = 0
    """Length up to which the sequence exclusively owns its pages."""


@dataclass(frozen=True)
class _Content:
    """Content of a page in the prefix cache."""

    hash_: bytes
    before: bytes
    """Hash of the preceding page."""
    tokens: array[int]


@dataclass(frozen=True)
class PageView:
    """Pages of the sequences of a step: FlashInfer's CSR triple and lengths."""

    kv_indptr: np.ndarray
    """int32 (B + 1,): start of each sequence in `kv_indices`."""
    kv_indices: np.ndarray
    """int32: page numbers by sequence."""
    kv_last_page_len: np.ndarray
    """int32 (B,): tokens in the last page, 1..page_size."""
    kv_lens: np.ndarray
    """int32 (B,): sequence lengths."""


class BlockTable:
    """Page allocator and prefix cache for sequences.

    Parameters
    ----------
    page_size : int
        Tokens per page.
    max_pages : int, optional
        Most pages; unlimited by default.  `n_pages` is the number that the storage must have; it
        grows up to `max_pages`.
    states : StateTable, optional
        Rows of recurrent states, for models that have them.  A prefix is then shared up to a page
        after which a snapshot of the state was kept (`commit`).
    """

    def __init__(
        self,
        page_size: int = 16,
        max_pages: int | None = None,
        states: StateTable | None = None,
    ) -> None:
        self.states = states
        self.page_size = page_size
        self.max_pages = UNLIMITED if max_pages is None else max_pages
        self.n_pages = 0
        self.most_used_pages = 0
        """Largest number of pages that were in use at once."""
        self.hit_tokens = self.asked_tokens = 0
        """Tokens found in the prefix cache, and tokens looked up."""
        self._sequences: dict[int, _Sequence] = {}
        self._free: list[int] = []
        self._ref_counts: list[int] = []  # of each page
        self._page_of_hash: dict[bytes, int] = {}  # by name
        self._content: dict[int, _Content] = {}  # of cached pages
        self._children: dict[bytes, dict[int, None]] = {}  # pages by preceding hash, oldest 1st
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, LRU first
        self._in_flight: dict[bytes, int] = {}  # hash to the sequence that computes it
        self._copies: list[tuple[int, int]] = []

    # ---- sequences ----------------------------------------------------------------------------

    def chain(self, ids: Sequence[int], salt: bytes = b"") -> HashChain:
        """Return the page hashes of a sequence of tokens, for `find` and `add`.

        `salt` is what keys and values depend on besides tokens, e.g. the
        input of an encoder.
        """
        chain = HashChain(salt, ids=array("i", ids))
        chain.extend(ids, self.page_size, len(ids) // self.page_size)
        return chain

    def find(self, chain: HashChain, n_tokens: int) -> tuple[int, bool]:
        """Look up a sequence of `n_tokens` tokens without side effects.

        Returns
        -------
        int
            Number of cached leading tokens.  The last token is never taken from the cache, because
            the next one needs its logits.
        bool
            True if a running sequence is computing the first missing page.
        """
        n_full = self._n_cached_full_pages(chain, n_tokens)
        length = n_full * self.page_size + self._partial_match(chain, n_full, n_tokens)[1]
        hashes = chain.hashes[: max(0, n_tokens - 1) // self.page_size]
        return length, n_full < len(hashes) and hashes[n_full] in self._in_flight

    def n_new_pages(self, chain: HashChain | None, n_tokens: int) -> int:
        """Return the number of available pages that a new sequence takes."""
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
        """Add a sequence; return the number of its leading tokens found in the cache.

        Parameters
        ----------
        sequence : int
            Unused sequence number.
        chain : Chain, optional
            Page hashes from `chain`, owned by the table afterwards.  Without it the prefix cache is
            not used for this sequence.
        n_tokens : int
            Number of tokens.
        long : bool
            True for the long rotary factors (LongRoPE); also part of the salt of `chain`.
        """
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is in the block table already")
        entry = self._sequences[sequence] = _Sequence(chain=chain, long=long)
        n_full = 0 if chain is None else self._n_cached_full_pages(chain, n_tokens)
        if self.states is not None:
            self.states.add(sequence, chain.hashes[n_full - 1] if chain and n_full else None)
        if chain is None:
            return 0
        entry.n_cached_pages = n_full
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
        """Append `n_tokens` tokens to a sequence and allocate their pages.

        Raises
        ------
        NoFreePageError
            If pages are short; the sequence is unchanged.
        """
        self.reserve(sequence, n_tokens)
        self._sequences[sequence].length += n_tokens

    def reserve(self, sequence: int, n_tokens: int) -> None:
        """Allocate pages for `n_tokens` more tokens without appending them."""
        if not self.try_reserve(sequence, n_tokens):
            raise NoFreePageError(f"no page is free for sequence {sequence}")

    def try_reserve(self, sequence: int, n_tokens: int) -> bool:
        """Reserve as `reserve` and return True, or return False if pages are short."""
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
        """Return the number of pages that `reserve` would allocate."""
        entry = self._sequences[sequence]
        if entry.length + n_tokens <= entry.writable_length:
            return 0
        copied = n_tokens > 0 and self._last_page_is_shared(entry)
        return int(copied) + max(
            0, -(-(entry.length + n_tokens) // self.page_size) - len(entry.pages)
        )

    def commit(self, sequence: int, ids: Sequence[int], keep_state: bool = False) -> None:
        """Enter the computed full pages of a sequence into the prefix cache.

        `ids` are all its tokens.  Tokens that may be truncated should not be committed.  With
        `keep_state`, if the last page is full, a snapshot of the recurrent state is kept.
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
        if keep_state and self.states is not None and entry.length == n_full * self.page_size:
            self.states.keep(sequence, entry.chain.hashes[n_full - 1])

    def has_full_page(self, sequence: int) -> bool:
        """Return whether `commit` has pages to enter."""
        entry = self._sequences[sequence]
        return entry.length // self.page_size > entry.n_cached_pages

    def fork(self, sequence: int, new: int) -> None:
        """Fork a sequence; both share its pages, copy-on-write."""
        if new in self._sequences:
            raise ValueError(f"sequence {new} is in the block table already")
        entry = self._sequences[sequence]
        pages = entry.pages[: -(-entry.length // self.page_size)]
        for page in pages:
            self._ref(page)
        entry.writable_length = 0
        chain = None if entry.chain is None else entry.chain.copy()
        if self.states is not None:
            self.states.fork(sequence, new)
        self._sequences[new] = _Sequence(
            pages, entry.length, chain, entry.long, entry.n_cached_pages
        )

    def save_state(self, sequence: int) -> None:
        """Keep the recurrent state of a sequence, if it has one, for a later `truncate`."""
        if self.states is not None:
            self.states.save(sequence, self._sequences[sequence].length)

    def truncate(self, sequence: int, length: int) -> int:
        """Truncate a sequence to its first `length` tokens and free the pages after them.

        Returns the length, which is less than `length` with recurrent states: that of the last
        `save_state`, or 0.
        """
        entry = self._sequences[sequence]
        if not 0 <= length <= entry.length:
            raise ValueError(f"length must be 0..{entry.length}, got {length}")
        if self.states is not None and length < entry.length:
            length = self.states.restore(sequence, length)
        n_pages = -(-length // self.page_size)
        self._unref(entry.pages[n_pages:])
        self._drop_in_flight(sequence, entry)
        n_full = length // self.page_size
        del entry.pages[n_pages:]
        if entry.chain is not None:
            del entry.chain.hashes[n_full:]
        entry.n_cached_pages = min(entry.n_cached_pages, n_full)
        entry.length, entry.index, entry.writable_length = length, None, 0
        return length

    def drop(self, sequence: int, ids: Sequence[int] = ()) -> None:
        """Remove a sequence; its unreferenced pages become free or cached.

        With `ids`, its computed tokens, the partial last page is cached, too.
        """
        entry = self._sequences.pop(sequence)
        if self.states is not None:
            self.states.drop(sequence)
        self._cache_partial_page(entry, ids[: entry.length])
        self._drop_in_flight(sequence, entry)
        self._unref(entry.pages)

    def clear_cache(self) -> None:
        """Clear the prefix cache; unreferenced pages become free."""
        if self.states is not None:
            for hash_ in self._page_of_hash:
                self.states.drop_snapshot(hash_)
        self._free += self._cached
        self._cached.clear()
        self._page_of_hash.clear()
        self._content.clear()
        self._children.clear()

    def grow(self, n_pages: int) -> None:
        """Grow to at least `n_pages` pages."""
        more = min(n_pages, self.max_pages) - self.n_pages
        if more > 0:
            self._free[:0] = range(self.n_pages + more - 1, self.n_pages - 1, -1)
            self._ref_counts += [0] * more
            self.n_pages += more

    # ---- queries ------------------------------------------------------------------------------

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    @property
    def sequences(self) -> list[int]:
        """Sequence numbers."""
        return list(self._sequences)

    @property
    def n_available(self) -> int:
        """Number of allocatable pages: free, cached, or growth."""
        return len(self._free) + len(self._cached) + self.max_pages - self.n_pages

    @property
    def n_used_pages(self) -> int:
        """Number of pages in use."""
        return self.n_pages - len(self._free) - len(self._cached)

    @property
    def n_cached(self) -> int:
        """Number of unreferenced pages in the prefix cache."""
        return len(self._cached)

    def length(self, sequence: int) -> int:
        """Return the length of a sequence in tokens."""
        return self._sequences[sequence].length

    def is_long(self, sequence: int) -> bool:
        """Return whether a sequence uses the long rotary factors."""
        return self._sequences[sequence].long

    def view(self, sequences: Sequence[int]) -> PageView:
        """Return the pages of these sequences in order."""
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
        """Return the page copies (from, to) to make, in order, before the next step."""
        copies, self._copies = self._copies, []
        return copies

    # ---- pages --------------------------------------------------------------------------------

    def _n_cached_full_pages(self, chain: HashChain, n_tokens: int) -> int:
        """Return the number of leading full pages in the prefix cache.

        With recurrent states they end where a snapshot was kept.
        """
        hashes = chain.hashes[: max(0, n_tokens - 1) // self.page_size]
        found = (i for i, hash_ in enumerate(hashes) if hash_ not in self._page_of_hash)
        n = next(found, len(hashes))
        if self.states is not None:
            while n and not self.states.has_snapshot(hashes[n - 1]):
                n -= 1
        return n

    def _partial_match(self, chain: HashChain, n_full: int, n_tokens: int) -> tuple[int, int]:
        """Return the cached page with the longest match after `n_full` pages, and its length."""
        if self.states is not None:  # states are kept at page borders only
            return -1, 0
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
        """Cache the partial last page of a removed sequence if no other one uses it."""
        if self.states is not None:
            return
        at, length = divmod(len(ids), self.page_size)
        if entry.chain is None or not length or at > entry.n_cached_pages:
            return
        page = entry.pages[at]
        if self._ref_counts[page] == 1:
            before, tokens = entry.chain.before(at), array("i", ids[at * self.page_size :])
            self._enter_cache(page, _Content(page_hash(before, tokens), before, tokens))

    def _enter_cache(self, page: int, content: _Content) -> None:
        """Enter a page into the prefix cache unless it or an equal one is there."""
        if content.hash_ not in self._page_of_hash and page not in self._content:
            self._page_of_hash[content.hash_], self._content[page] = page, content
            self._children.setdefault(content.before, {})[page] = None

    def _ref(self, page: int) -> None:
        self._ref_counts[page] += 1
        self._cached.pop(page, None)

    def _unref(self, pages: Sequence[int]) -> None:
        """Decrement reference counts; last pages first, so that they are evicted first."""
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                if page in self._content:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def _allocate(self) -> int:
        """Allocate a page."""
        if not self._free and self.n_pages < self.max_pages:
            self.grow(self.n_pages + max(GROWTH_PAGES, self.n_pages // 2))
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._evict(page)
        self._ref_counts[page] = 1
        self.most_used_pages = max(self.most_used_pages, self.n_used_pages)
        return page

    def _evict(self, page: int) -> None:
        content = self._content.pop(page, None)
        if content is None:
            return
        del self._page_of_hash[content.hash_]
        if self.states is not None:
            self.states.drop_snapshot(content.hash_)
        after = self._children[content.before]
        del after[page]
        if not after:
            del self._children[content.before]

    def _last_page_is_shared(self, entry: _Sequence) -> bool:
        """Return whether the next token goes to a shared page."""
        if entry.length % self.page_size == 0:
            return False
        return self._ref_counts[entry.pages[entry.length // self.page_size]] > 1

    def _copy_on_write(self, entry: _Sequence) -> None:
        """Copy the partial last page of a sequence if it is shared."""
        if entry.length % self.page_size == 0:
            return
        at, used = divmod(entry.length, self.page_size)
        page = entry.pages[at]
        more = page in self._content and used < len(self._content[page].tokens)
        copy_is_free = self._free or self.n_pages < self.max_pages
        if self._ref_counts[page] == 1 and not (more and copy_is_free):
            self._evict(page)  # it will be overwritten
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
