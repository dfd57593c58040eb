"""Breakers of the DRY sampler as token sequences."""

from __future__ import annotations

from nbflow.decoding.token_bytes import vocabulary_bytes
from nbflow.tokenizer import Tokenizer
from nbflow_kernels.errors import UsageError

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's."""
MAX_BYTES = 40
"""Longest breaker, as in llama.cpp."""
MAX_TAIL = 20
"""Most tokens after a sequence's first, as in llama.cpp."""


def breaker_sequences(
    tokenizer: Tokenizer, breakers: tuple[str, ...] = DEFAULT_BREAKERS
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences in which a breaker's text may come.

    A token that contains the breaker is a sequence of one; a token that ends in its beginning is
    one with the tokens of the rest, as in llama.cpp.

    Parameters
    ----------
    tokenizer : Tokenizer
        The model's.
    breakers : tuple of str
        Texts over which no repetition reaches, each of at most 40 bytes.

    Raises
    ------
    UsageError
        If a breaker is empty or too long.
    """
    kept: dict[tuple[str, ...], tuple[tuple[int, ...], ...]]
    kept = tokenizer.__dict__.setdefault("_breaker_sequences", {})
    if breakers not in kept:
        found: dict[tuple[int, ...], None] = {}
        for breaker in breakers:
            if not 0 < len(breaker.encode()) <= MAX_BYTES:
                raise UsageError(f"breakers must have 1..{MAX_BYTES} bytes, got {breaker!r:.60}")
            found |= dict.fromkeys(_sequences(tokenizer, breaker))
        kept[breakers] = tuple(found)
    return kept[breakers]


def _sequences(tokenizer: Tokenizer, breaker: str) -> list[tuple[int, ...]]:
    whole = breaker.encode()
    tails = {
        n: tuple(tokenizer.encode(whole[n:].decode("utf-8", "ignore")))[:MAX_TAIL]
        for n in range(1, len(whole))
    }
    found: list[tuple[int, ...]] = []
    for token, text in enumerate(vocabulary_bytes(tokenizer)):
        if text is None:
            continue
        if whole in text:
            found.append((token,))
        else:
            found += [(token, *tail) for n, tail in tails.items() if text.endswith(whole[:n])]
    return found
