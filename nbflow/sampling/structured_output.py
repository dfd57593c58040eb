"""Text of a given structure: a choice, a regular expression, a JSON schema, a grammar.

The grammar engine is llguidance (extra ``structured``); it says for each step which tokens may
come.  It wants a vocabulary that can spell every byte: with one that cannot (some Unigram ones), a
structure that forces a character without a token ends in an error.
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
_MESSAGES = {"NoExtensionBias": "no text matches it", "NoExtension": "no text matches it"}
"""The engine's words in ours."""


class StructureError(UsageError):
    """A structure is wrong, or more than the engine can do.

    Parameters
    ----------
    kind : str
        Which of `nbflow.options.STRUCTURES` it is.
    reason : str
        What is wrong with it.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}{'' if reason.startswith('must ') else ':'} {reason}")
        self.kind = kind
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return StructureError, (self.kind, self.reason)


class Grammar:
    """A structure for the new text, ready to be begun for any number of requests.

    Parameters
    ----------
    kind : {"choice", "regex", "json_schema", "grammar"}
        What `text` is.
    text : str, dict or sequence of str
        Texts to choose from; a regular expression for the whole text (Rust's syntax); a JSON
        schema; a grammar in llama.cpp's GBNF or in Lark's notation.
    tokenizer : Tokenizer
        The model's.
    n_vocab : int
        Number of the model's logits; those beyond the tokenizer never come.
    end_ids : sequence of int
        The end tokens, which may come where the structure is complete.

    Raises
    ------
    UsageError
        If the structure is wrong, or more than the engine can do; if there is no end token.
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
                "or give stop_token_ids"
            )
        self._end_ids = tuple(end_ids)
        self._vocabulary = _vocabulary(tokenizer, n_vocab, self._end_ids)
        self._kind = kind
        self._source = _source(library, kind, text)
        self._first: Matcher | None = None
        self._compile_and_step(n_vocab)

    def begin(self) -> Matcher:
        """Return the beginning of a text."""
        if self._first is None:  # it came from another process
            self._first = self._compiled()
        return self._first.fork()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_first": None}

    def _compiled(self) -> Matcher:
        """Return the structure as the engine runs it."""
        library, engine = _library(), _engine(self._vocabulary)
        matcher = library.LLMatcher(engine, self._source, log_level=0, limits=_limits(library))
        return Matcher(matcher, self._end_ids, self._kind)

    def _compile_and_step(self, n_vocab: int) -> None:
        """Compile the structure and take a step: what is too much is found here.

        The steps of all requests would wait for it otherwise, and a request fail in one of them.
        """
        self._first = self._compiled()
        mask = self._first.bitmask(n_vocab).view(np.uint32)[0]
        words = mask.nonzero()[0]
        if not len(words):
            raise StructureError(self._kind, "no token of the vocabulary can begin it")
        word = int(mask[words[0]])
        copy = self._first.fork()
        copy.accept(32 * int(words[0]) + (word & -word).bit_length() - 1)
        copy.bitmask(n_vocab)


class Matcher:
    """A place in a structure of the kind `kind`."""

    def __init__(self, matcher: Any, end_ids: tuple[int, ...], kind: str) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._kind = kind
        self._check()

    def bitmask(self, n_vocab: int) -> np.ndarray:
        """Return which tokens may come, int32 (1, ceil(n_vocab / 32))."""
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
        """Go on by a token.

        Raises
        ------
        UsageError
            If the structure does not allow it.
        """
        if self._matcher.is_stopped() or token in self._end_ids:
            return  # what comes after the end is nobody's
        if not self._matcher.consume_token(token):
            self._check()

    def fork(self) -> Matcher:
        """Return a copy that goes on by itself."""
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
    """Return what a structure may cost: a fifth of a second to compile it, less in each step."""
    return library.LLParserLimits(
        initial_lexer_fuel=200_000, step_lexer_fuel=50_000, verbose_errors=False
    )


_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


def _source(library: Any, kind: str, text: Any) -> str:
    """Return the structure as the engine's grammar."""
    if kind == "choice":
        texts = [text] if isinstance(text, str) else list(text)
        if not texts or not all(isinstance(t, str) and t for t in texts):
            raise StructureError(kind, f"must be non-empty texts, got {text!r:.100}")
        # as one expression: a grammar of alternatives may have 2,000 of them at most
        kind, text = "regex", "|".join(_SPECIAL.sub(r"\\\g<0>", t) for t in texts)
    if kind == "json_schema" and not isinstance(text, str):
        text = json.dumps(text)
    if not isinstance(text, str):
        raise StructureError(kind, f"must be a text, got {type(text).__name__}")
    try:
        return str(library.grammar_from(kind, text))
    except ValueError as error:
        raise StructureError(kind, str(error)) from None


class _Vocabulary:
    """A tokenizer as the engine wants to see it.

    It is sent to other ranks with a request, and spells by the longest tokens there: without the
    tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, end_ids: tuple[int, ...]) -> None:
        self._tokenizer: Tokenizer | None = tokenizer
        texts = vocabulary_bytes(tokenizer)[:n_vocab]
        special = {i for i, text in enumerate(texts) if text is None}
        self.tokens = [
            # a name for what has no text; the first byte, which no text has, marks it
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
        """Return ids whose bytes are the text, the tokenizer's own where it adds no space."""
        if self._tokenizer is not None:
            ids = self._tokenizer.encode(text.decode("utf-8"))
            if b"".join(self.tokens[i] for i in ids) == text:
                return ids
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """Return the longest tokens one after the other, as far as there are any."""
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
"""The engine's view of the vocabularies used last, by digest."""
_lock = threading.Lock()
"""Held while one of the two collections of vocabularies is looked at or changed."""


def _vocabulary(tokenizer: Tokenizer, n_vocab: int, end_ids: tuple[int, ...]) -> _Vocabulary:
    """Return a tokenizer's vocabulary, made once for each."""
    made: OrderedDict[Any, _Vocabulary]
    made = tokenizer.__dict__.setdefault("_grammar_vocabularies", OrderedDict())
    found: _Vocabulary
    found = _cached_in(made, (n_vocab, end_ids), lambda: _Vocabulary(tokenizer, n_vocab, end_ids))
    return found


def _cached_in(cache: OrderedDict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return what is kept under a key, made where it is not; the ones used last stay."""
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
    """Return the engine's view of a vocabulary."""

    def make() -> Any:
        library = _library()
        return library.LLTokenizer(
            library.TokenizerWrapper(vocabulary),
            n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.end_ids),
        )  # fmt: skip

    return _cached_in(_ENGINES, vocabulary.digest, make)
