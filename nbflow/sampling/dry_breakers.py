"""Breakers of the DRY sampler as token sequences."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from nbflow.tokenization import Tokenizer
from nbflow.tokenization.token_bytes import vocabulary_bytes
from nbflow_kernels.errors import UsageError
from nbflow_kernels.penalties import Breakers

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's."""
MAX_BYTES = 40
"""Longest breaker, as in llama.cpp."""
MAX_BREAKERS = 64
"""Most breakers at once."""
MAX_TAIL = 20
"""Most tokens after a sequence's first, as in llama.cpp."""
MAX_SEQUENCES = 1 << 18
"""Most token sequences of all breakers."""
_KEPT = 32
"""LRU cache size per tokenizer."""
_END = 256
"""End marker of a token in the index; not a byte."""


def _error(message: str) -> UsageError:
    return UsageError(message, "dry_sequence_breakers")


def breaker_sequences(
    tokenizer: Tokenizer, breakers: tuple[str, ...] = DEFAULT_BREAKERS
) -> Breakers:
    """Return the token sequences that spell the breakers.

    As in llama.cpp, a token that contains a breaker is a sequence; a token that ends with a prefix
    of it is one together with the tokens of the rest.

    Parameters
    ----------
    tokenizer : Tokenizer
        Tokenizer of the model.
    breakers : tuple of str
        Texts that end a repetition; at most 64 of at most 40 bytes each.

    Raises
    ------
    UsageError
        If there are too many breakers, one is empty, too long or not Unicode, or they stand for
        too many sequences.
    """
    if len(breakers) > MAX_BREAKERS:
        raise _error(f"there may be at most {MAX_BREAKERS} breakers, got {len(breakers):,}")
    for breaker in breakers:
        if not 0 < len(breaker.encode("utf-8", "surrogatepass")) <= MAX_BYTES:
            raise _error(f"breakers must have 1..{MAX_BYTES} bytes, got {breaker!r:.60}")
        if any("\ud800" <= character <= "\udfff" for character in breaker):
            raise _error(f"breakers must be valid Unicode, got {breaker!r:.60}")
    with _lock:
        index: _Index = tokenizer.__dict__.setdefault("_breaker_index", _Index(tokenizer))
    return index.sequences(breakers)


_lock = threading.Lock()


class _Index:
    """Byte index of a vocabulary, with an LRU cache of results."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, ...], Breakers] = OrderedDict()
        self._bytes: np.ndarray | None = None

    def sequences(self, breakers: tuple[str, ...]) -> Breakers:
        """Return the token sequences of all breakers."""
        with self._lock:
            if breakers in self._kept:
                self._kept.move_to_end(breakers)
                return self._kept[breakers]
        found: dict[tuple[int, ...], None] = {}
        for breaker in breakers:
            found |= dict.fromkeys(self._of(breaker))
            if len(found) > MAX_SEQUENCES:
                raise _error(
                    f"the breakers expand to more than {MAX_SEQUENCES:,} token sequences; give "
                    "fewer of them"
                )
        made = Breakers(found)
        _ = made.arrays  # built here, not between steps
        with self._lock:
            self._kept[breakers] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def _build(self) -> np.ndarray:
        """Build the index; return the bytes of all tokens, each with an end marker."""
        with self._lock:
            if self._bytes is not None:
                return self._bytes
            texts = vocabulary_bytes(self._tokenizer)
            sizes = np.array([1 + len(text or b"") for text in texts], np.int64)
            data = np.full(int(sizes.sum()), _END, np.int16)
            ends = np.cumsum(sizes) - 1
            inside = np.ones(len(data), bool)
            inside[ends] = False
            data[inside] = np.frombuffer(b"".join(text or b"" for text in texts), np.uint8)
            self._ends = ends
            order = np.argsort(data, kind="stable")
            edges = np.searchsorted(data[order], np.arange(_END + 1))
            self._places = [order[edges[b] : edges[b + 1]] for b in range(_END)]
            self._bytes = data
            return data

    def _of(self, breaker: str) -> list[tuple[int, ...]]:
        """Return the token sequences of one breaker."""
        data, whole = self._build(), breaker.encode()
        places = self._places[whole[0]]  # starts of matches so far
        partial: list[tuple[int, np.ndarray]] = []
        for n in range(1, len(whole)):
            following = data[places + n]
            at_end = places[following == _END]
            if len(at_end):
                partial.append((n, self._tokens(at_end)))
            places = places[following == whole[n]]
            if not len(places):
                break
        holding = self._tokens(places)
        found: list[tuple[int, ...]] = [(token,) for token in holding.tolist()]
        for n, tokens in partial:
            tokens = np.setdiff1d(tokens, holding)
            if len(tokens):
                rest = whole[n:].decode("utf-8", "ignore")
                tail = tuple(self._tokenizer.encode(rest))[:MAX_TAIL]
                found += [(token, *tail) for token in tokens.tolist()]
        return found

    def _tokens(self, places: np.ndarray) -> np.ndarray:
        """Return the distinct tokens at positions of the index."""
        return np.unique(np.searchsorted(self._ends, places))
