"""Structured output: choice, regular expression, JSON schema or grammar.

llguidance (extra ``structured``) computes the allowed tokens of each step.  It needs a vocabulary
that covers all bytes: with others (some Unigram ones) a structure that requires a missing character
fails.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nbflow.options import STRUCTURES
from nbflow.tokenization import Tokenizer
from nbflow.tokenization.token_bytes import vocabulary_bytes
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command, unknown_name

_MAX_ENGINES = 8
_JSON_BLANKS = r"( |\n{1,2}[ \t]{0,20})?"
"""Blanks between tokens of JSON: a space, or line breaks with indentation, as in llama.cpp.

Without a bound a model can emit blanks until `max_tokens`.  It also holds where a schema states
another pattern (``x-guidance`` of llguidance), which would allow text that is not JSON.
"""
_MESSAGES = {"NoExtensionBias": "no text matches it", "NoExtension": "no text matches it"}
"""Messages of llguidance in plain words."""


class StructureError(UsageError):
    """Structure of a kind (`STRUCTURES`) that is invalid or beyond the limits of llguidance."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}{'' if reason.startswith('must ') else ':'} {reason}", kind)
        self.kind = kind
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return StructureError, (self.kind, self.reason)


class Grammar:
    """Compiled structure, shared by any number of requests.

    Parameters
    ----------
    kind : {"choice", "regex", "json_schema", "grammar"}
        Kind of `text`.
    text : str, dict or sequence of str
        Choices; a regular expression for the whole text (Rust's syntax); a JSON
        schema; a grammar in llama.cpp's GBNF or in Lark's notation.
    tokenizer : Tokenizer
        Tokenizer of the model.
    n_vocab : int
        Number of logits; ids beyond the tokenizer are banned.
    end_ids : sequence of int
        End tokens, allowed where the structure is complete.

    Raises
    ------
    UsageError
        If the structure is invalid or too complex, or there are no end tokens.
    MissingExtraError
        If llguidance is not installed.
    """

    def __init__(
        self, kind: str, text: Any, tokenizer: Tokenizer, n_vocab: int, end_ids: Sequence[int]
    ) -> None:
        library = _library()
        if kind not in STRUCTURES:
            raise unknown_name("structure", kind, STRUCTURES)
        if not end_ids:
            raise UsageError(
                f"{kind} needs an end token to end with, and there is none: leave out ignore_eos, "
                "or give stop_token_ids",
                kind,
            )
        self._end_ids = tuple(end_ids)
        self._vocabulary = _vocabulary(tokenizer, n_vocab, self._end_ids)
        self._kind = kind
        self._source = _source(library, kind, text)
        self._first: Matcher | None = None
        self._compile_and_step(n_vocab)

    def begin(self) -> Matcher:
        """Return a matcher at the start of the text."""
        if self._first is None:  # unpickled
            self._first = self._compiled()
        return self._first.fork()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_first": None}

    def _compiled(self) -> Matcher:
        """Compile the structure."""
        library, engine = _library(), _engine(self._vocabulary)
        matcher = library.LLMatcher(engine, self._source, log_level=0, limits=_limits(library))
        return Matcher(matcher, self._end_ids, self._kind)

    def _compile_and_step(self, n_vocab: int) -> None:
        """Compile the structure and take a step, so that limits are exceeded here.

        Otherwise the steps of all requests would wait, and a request fail in one of them.
        """
        self._first = self._compiled()
        mask = self._first.bitmask(n_vocab).view(np.uint32)[0]
        words = mask.nonzero()[0]
        if not len(words):
            raise StructureError(self._kind, "no token of the vocabulary can start it")
        word = int(mask[words[0]])
        copy = self._first.fork()
        copy.accept(32 * int(words[0]) + (word & -word).bit_length() - 1)
        copy.bitmask(n_vocab)


class Matcher:
    """State of a structure within a text."""

    def __init__(self, matcher: Any, end_ids: tuple[int, ...], kind: str) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._kind = kind
        self._check()

    def bitmask(self, n_vocab: int) -> np.ndarray:
        """Return the bitmask of allowed tokens, int32 (1, ceil(n_vocab / 32))."""
        words = np.zeros(-(-n_vocab // 32), np.uint32)
        if self._matcher.is_stopped():
            for token in self._end_ids:
                words[token // 32] |= np.uint32(1 << token % 32)
        else:
            found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            words[: len(found)] = found[: len(words)]
            self._check()
        return words.view(np.int32)[None]

    def accept(self, token: int) -> None:
        """Advance by a token.

        Raises
        ------
        UsageError
            If the structure does not allow it.
        """
        if self._matcher.is_stopped() or token in self._end_ids:
            return  # nothing follows the end
        if not self._matcher.consume_token(token):
            self._check()

    def fork(self) -> Matcher:
        """Return an independent copy."""
        return Matcher(self._matcher.deep_copy(), self._end_ids, self._kind)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = (self._matcher.get_error().splitlines() or ["unknown"])[0]
            raise StructureError(self._kind, f"structured output: {_MESSAGES.get(reason, reason)}")


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError(
            f"structured output needs llguidance: {install_command('structured')}"
        ) from None
    return llguidance


def _limits(library: Any) -> Any:
    """Return limits: about 0.2 s for compilation, less for each step."""
    return library.LLParserLimits(
        initial_lexer_fuel=200_000, step_lexer_fuel=50_000, verbose_errors=False
    )


_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


def _source(library: Any, kind: str, text: Any) -> str:
    """Return the structure as a grammar of llguidance."""
    if kind == "choice":
        texts = [text] if isinstance(text, str) else list(text)
        if not texts or not all(isinstance(t, str) and t for t in texts):
            raise StructureError(kind, f"must be non-empty texts, got {text!r:.100}")
        # as a regex: a grammar has at most 2,000 alternatives
        kind, text = "regex", "|".join(_SPECIAL.sub(r"\\\g<0>", t) for t in texts)
    if kind == "json_schema" and not isinstance(text, str):
        text = json.dumps(text)
    if not isinstance(text, str):
        raise StructureError(kind, f"must be a text, got {type(text).__name__}")
    try:
        if kind == "json_schema":
            text = {"true": "{}", "false": '{"not": {}}'}.get(text.strip(), text)  # need an object
            blanks = {"whitespace_pattern": _JSON_BLANKS}
            return str(library.LLMatcher.grammar_from_json_schema(text, overrides=blanks))
        return str(library.grammar_from(kind, text))
    except ValueError as error:
        raise StructureError(kind, str(error)) from None


class _Vocabulary:
    """Adapter of a tokenizer for llguidance.

    It is pickled without the tokenizer for other ranks, where it encodes by longest match.
    """

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, end_ids: tuple[int, ...]) -> None:
        self._tokenizer: Tokenizer | None = tokenizer
        texts = vocabulary_bytes(tokenizer)[:n_vocab]
        special = {i for i, text in enumerate(texts) if text is None}
        self.tokens = [
            # placeholder for tokens without text; \xff does not occur in UTF-8
            b"\xff<%d>" % i if text is None or i in end_ids else text
            for i, text in enumerate(texts)
        ] + [b"\xff<%d>" % i for i in range(len(texts), n_vocab)]
        self.special_token_ids = sorted(special | set(end_ids) | set(range(len(texts), n_vocab)))
        self.end_ids = end_ids
        self.eos_token_id = end_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self._ids = {text: i for i, text in reversed(list(enumerate(texts))) if text}
        self._longest = max(map(len, self._ids))
        self.digest = hashlib.blake2b(repr((self.tokens, end_ids)).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}

    def __call__(self, text: bytes) -> list[int]:
        """Encode bytes, with the tokenizer unless that adds a space."""
        if self._tokenizer is not None:
            ids = self._tokenizer.encode(text.decode("utf-8"))
            if b"".join(self.tokens[i] for i in ids) == text:
                return ids
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """Encode bytes by longest match, up to the first byte without a token."""
        ids, start = [], 0
        while start < len(text):
            n = min(self._longest, len(text) - start)
            while n and text[start : start + n] not in self._ids:
                n -= 1
            if not n:
                break
            ids.append(self._ids[text[start : start + n]])
            start += n
        return ids


_ENGINES: OrderedDict[str, Any] = OrderedDict()
"""LRU cache of llguidance tokenizers by digest."""
_lock = threading.Lock()
"""Guards both vocabulary caches."""


def _vocabulary(tokenizer: Tokenizer, n_vocab: int, end_ids: tuple[int, ...]) -> _Vocabulary:
    """Return the cached vocabulary of a tokenizer."""
    made: OrderedDict[Any, _Vocabulary]
    made = tokenizer.__dict__.setdefault("_grammar_vocabularies", OrderedDict())
    found: _Vocabulary
    found = _cached_in(made, (n_vocab, end_ids), lambda: _Vocabulary(tokenizer, n_vocab, end_ids))
    return found


def _cached_in(cache: OrderedDict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return an LRU cache entry, created if missing."""
    with _lock:
        if key in cache:
            cache.move_to_end(key)
            return cache[key]
    made = make()
    with _lock:
        cache[key] = made
        while len(cache) > _MAX_ENGINES:
            cache.popitem(last=False)
    return made


def _engine(vocabulary: _Vocabulary) -> Any:
    """Return the llguidance tokenizer of a vocabulary."""

    def make() -> Any:
        library = _library()
        return library.LLTokenizer(
            library.TokenizerWrapper(vocabulary),
            n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.end_ids),
        )  # fmt: skip

    return _cached_in(_ENGINES, vocabulary.digest, make)
