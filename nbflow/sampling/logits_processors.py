"""Logits processors: biases, penalties and bans applied before a strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from nbflow.sampling.candidates import TopCandidates, top_candidates
from nbflow.sampling.strategy import State, Strategy, check_range
from nbflow.sampling.structured_output import Grammar, Matcher
from nbflow.sampling.token_buffer import TokenBuffer
from nbflow_kernels.arrays import is_cuda, on_device, on_host
from nbflow_kernels.errors import UsageError
from nbflow_kernels.penalties import (
    apply_logit_bias,
    apply_no_repeat_ngram,
    apply_penalties,
    apply_token_bitmask,
    mask_token_ids,
)

MAX_BIAS = 1e6
"""Largest bias: above any logit, but safe in float32 at low temperatures."""


def check_token_ids(name: str, ids: Iterable[int], n_vocab: int) -> None:
    """Raise `UsageError` naming the parameter if a token is outside the vocabulary."""
    for token in ids:
        if not 0 <= token < n_vocab:
            raise UsageError(f"{name} must hold ids in 0..{n_vocab - 1}, got {token!s:.40}", name)


@dataclass(frozen=True)
class LogitsProcessors:
    """Parameters of the logits processors, in the order of application."""

    grammar: Grammar | None = None
    """Grammar that the new text must match."""
    allowed_token_ids: tuple[int, ...] = ()
    """Allowed tokens; empty for all."""
    repetition_penalty: float = 1.0
    """Penalty factor for tokens of prompt and output (Hugging Face); 1 disables."""
    frequency_penalty: float = 0.0
    """Penalty per occurrence in the output (OpenAI)."""
    presence_penalty: float = 0.0
    """Penalty for any occurrence in the output (OpenAI)."""
    no_repeat_ngram_size: int = 0
    """Size of n-grams that may not repeat in prompt and output; 0 disables."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias) pairs; -inf bans the token."""
    banned_token_ids: tuple[int, ...] = ()
    """Banned tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Banned token sequences: bans the last token after the others."""
    min_tokens: int = 0
    """End tokens are banned before this many new tokens."""
    end_ids: tuple[int, ...] = ()
    """End tokens."""

    def __post_init__(self) -> None:
        check_range("constraints", "repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        check_range("constraints", "frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        check_range("constraints", "presence_penalty", self.presence_penalty, -100.0, 100.0)
        check_range("constraints", "no_repeat_ngram_size", self.no_repeat_ngram_size, 0, 2**31 - 1)
        check_range("constraints", "min_tokens", self.min_tokens, 0, 2**31 - 1)
        if () in self.bad_words:
            raise UsageError("bad_words must not hold an empty word", "bad_words")
        for token, bias in self.logit_bias:
            if bias != -math.inf and not -MAX_BIAS <= bias <= MAX_BIAS:
                raise UsageError(
                    f"logit_bias must be in {-MAX_BIAS:,.0f}..{MAX_BIAS:,.0f}, or minus infinity, "
                    f"which bans the token; got {bias:g} for token {token}",
                    "logit_bias",
                )

    @property
    def empty(self) -> bool:
        """True if the logits are unchanged."""
        free = {"end_ids"} if self.min_tokens == 0 else set()
        return all(getattr(self, f.name) == f.default for f in fields(self) if f.name not in free)

    @property
    def only_ban(self) -> str | None:
        """Name of the only processor that bans tokens, if there is one."""
        names = ["grammar", "allowed_token_ids", "no_repeat_ngram_size", "logit_bias"]
        names += ["banned_token_ids", "bad_words", "min_tokens"]
        given = [name for name in names if getattr(self, name)]
        return given[0] if len(given) == 1 else None

    def check_vocabulary(self, n_vocab: int) -> None:
        """Raise `UsageError` if a token is outside the vocabulary."""
        for name, ids in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("allowed_token_ids", self.allowed_token_ids),
            ("banned_token_ids", self.banned_token_ids),
            ("bad_words", [token for word in self.bad_words for token in word]),
        ):
            check_token_ids(name, ids, n_vocab)


class AllBannedError(UsageError):
    """The processors of a request leave no token."""


@dataclass(frozen=True)
class Constrained(Strategy):
    """Strategy behind logits processors."""

    strategy: Strategy
    """The wrapped strategy."""
    constraints: LogitsProcessors
    """The logits processors."""

    compiled: ClassVar[bool] = False

    def begin(self, prompt_ids: Sequence[int], seed: int) -> ConstrainedState:
        inner = self.strategy.begin(prompt_ids, seed)
        grammar = self.constraints.grammar
        matcher = None if grammar is None else grammar.begin()
        return ConstrainedState(inner, self.constraints, matcher, TokenBuffer(prompt_ids))


class ConstrainedState(State):
    """Tokens so far, grammar state, and the state of the wrapped strategy.

    Rows on a CUDA device are processed there.
    """

    takes_device_rows = True

    def __init__(
        self,
        inner: State,
        constraints: LogitsProcessors,
        matcher: Matcher | None,
        tokens: TokenBuffer,
    ) -> None:
        self._inner = inner
        self._constraints = constraints
        self._matcher = matcher
        self._tokens = tokens

    def choose(self, logits: np.ndarray | TopCandidates) -> int:
        assert not isinstance(logits, TopCandidates)
        row = self._changed(logits)
        n_best = self._inner.n_best()
        if not is_cuda(row) or self._inner.takes_device_rows:
            return self._inner.choose(row)
        return self._inner.choose(
            on_host(row) if n_best is None else top_candidates(row[None], n_best)[0]
        )

    def probs(self, logits: np.ndarray) -> np.ndarray:
        return self._inner.probs(self._changed(logits))

    def accept(self, token: int) -> None:
        self._inner.accept(token)
        self._tokens.append(token)
        if self._matcher is not None:
            self._matcher.accept(token)

    def fork(self) -> ConstrainedState:
        matcher = None if self._matcher is None else self._matcher.fork()
        inner, tokens = self._inner.fork(), self._tokens.copy()
        return ConstrainedState(inner, self._constraints, matcher, tokens)

    def _changed(self, logits: np.ndarray) -> np.ndarray:
        """Apply the processors in place."""
        rules, row = self._constraints, logits[None]

        def on_device_of_row(array: np.ndarray) -> np.ndarray:
            found: np.ndarray = on_device(array, row) if is_cuda(row) else array
            return found

        def ragged(ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return on_device_of_row(np.array(ids, np.int32)), on_device_of_row(
                np.array([0, len(ids)], np.int32)
            )

        history, whole = ragged(self._tokens.array)
        if rules.allowed_token_ids:
            mask_token_ids(row, *ragged(rules.allowed_token_ids), keep=True)
        penalties = (rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty)
        if penalties != (1.0, 0.0, 0.0):
            apply_penalties(
                row, history, whole, repetition_penalty=penalties[0],
                frequency_penalty=penalties[1], presence_penalty=penalties[2],
                prompt_lens=self._tokens.n_prompt,
            )  # fmt: skip
        if rules.no_repeat_ngram_size:
            apply_no_repeat_ngram(row, history, whole, rules.no_repeat_ngram_size)
        if rules.logit_bias:
            tokens, indptr = ragged([token for token, _ in rules.logit_bias])
            biases = np.array([bias for _, bias in rules.logit_bias], np.float32)
            apply_logit_bias(row, tokens, on_device_of_row(biases), indptr)
        banned = [*rules.banned_token_ids, *self._ends_of_bad_words()]
        if self._tokens.n_new < rules.min_tokens:
            banned += rules.end_ids
        if banned:
            mask_token_ids(row, *ragged(banned))
        if self._matcher is not None:
            apply_token_bitmask(row, on_device_of_row(self._matcher.bitmask(row.shape[1])))
        if not is_cuda(row) and row.max() == -math.inf:
            raise AllBannedError(
                "every token is banned, so that no token can be sampled; change allowed_token_ids, "
                "banned_token_ids, logit_bias, bad_words, no_repeat_ngram_size, min_tokens or the "
                "structure",
                rules.only_ban,
            )
        return logits

    def _ends_of_bad_words(self) -> list[int]:
        """Return the tokens that would complete a bad word."""
        words = self._constraints.bad_words
        longest = max(map(len, words), default=0)
        n = min(self._tokens.n_new, longest)
        new = tuple(self._tokens.array[len(self._tokens) - n :].tolist())
        return [w[-1] for w in words if len(w) == 1 or new[-len(w) + 1 :] == w[:-1]]


def constrain(strategy: Strategy, constraints: LogitsProcessors) -> Strategy:
    """Wrap the strategy in these processors, if any."""
    return strategy if constraints.empty else Constrained(strategy, constraints)
