"""Proposals of the next tokens, which the model then verifies several at a time.

By default the tokens are drawn as without proposals, so the result is the same bit for bit,
whatever the strategy (`nbflow.engine.outcome.verify`); good proposals only make it come sooner.  A
draft model draws with the request's own random numbers: where the two distributions are alike, so
are the tokens.  With "chain" the distribution is the same, but not the tokens, and more of a draft
model's proposals are taken (`nbflow.engine.verify`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

import numpy as np

from nbflow.decoding import Greedy, Strategy
from nbflow.decoding.ngram import NgramProposer
from nbflow.engine.request import Proposer, Request
from nbflow_kernels.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from nbflow.engine.model import Model

Draft = Union[str, Proposer, "Model"]
"""Who proposes: "ngram" (the text itself), a smaller model, or a function of one's own."""

_OWN_STREAM = 0x9E3779B97F4A7C15
"""Makes another seed of a seed: 2**64 divided by the golden ratio."""


class ModelProposer:
    """Proposes what a smaller model would say.

    Parameters
    ----------
    draft : Model
        A model with the same vocabulary, of one rank.
    strategy : Strategy
        How it draws: the request's strategy if that is compiled, else greedy.
    seed : int
        The request's.
    n_prompt : int
        Length of the request's prompt.
    chain : bool
        Whether `probs` are wanted: then it draws with numbers of its own.
    """

    def __init__(
        self, draft: Model, strategy: Strategy, seed: int, n_prompt: int, chain: bool
    ) -> None:
        self.probs: np.ndarray | None = None
        """What the last proposals were drawn from, float32 (n, V), for verification as a chain."""
        self._draft = draft
        self._chain = chain
        if chain:  # the verification uses the request's numbers
            seed ^= _OWN_STREAM
        self._strategy = strategy if strategy.compiled else Greedy()
        self._seed, self._n_prompt = seed, n_prompt
        self._session = draft.session()
        self._sequence = self._session.begin()
        self._ids: list[int] = []

    def __del__(self) -> None:
        """Free the pages that the draft holds for the request, which is gone."""
        session = getattr(self, "_session", None)
        if session is not None and self._draft.engines:
            session.close()

    def __call__(self, ids: Sequence[int], n: int) -> list[int]:
        """Return `n` tokens that may follow `ids`, or as many as the draft's context holds."""
        n = min(n, self._draft.spec.max_context - len(ids))
        if n < 1:
            return []
        # the last token is always run: its logits are wanted
        same = 0
        for a, b in zip(self._ids, ids[:-1], strict=False):
            if a != b:
                break
            same += 1
        self._session.truncate(self._sequence, same)
        pending, proposed, probs = list(ids[same:]), list[int](), list[np.ndarray]()
        while len(proposed) < n:
            logits = self._session.run({self._sequence: pending}, last=True)[self._sequence].logits
            place = len(ids) - self._n_prompt + len(proposed)
            seeds, offsets = np.array([self._seed], np.uint64), np.array([place], np.uint64)
            pending = self._strategy.choose(logits, seeds, offsets).tolist()
            proposed += pending
            if self._chain:
                probs.append(self._strategy.distribution(logits))
        if self._chain:
            self.probs = np.concatenate(probs)
        self._ids = [*ids, *proposed[:-1]]
        return proposed


def make_proposer(draft: Draft, model: Model, request: Request, verify: str) -> Proposer:
    """Return who proposes tokens to a request.

    Raises
    ------
    UsageError
        If the draft model does not fit the model, or `verify` is neither "same" nor "chain".
    """
    if verify not in ("same", "chain"):
        raise unknown_name("verification", verify, ["same", "chain"])
    if isinstance(draft, str):
        if draft != "ngram":
            raise unknown_name("draft", draft, ["ngram"])
        return NgramProposer()
    if callable(draft):
        return draft
    if draft is model:
        raise UsageError("the draft model must be another one than the model itself")
    if draft.spec.vocab_size != model.spec.vocab_size:
        raise UsageError(
            f"the draft model must have the vocabulary of {model.spec.name}, "
            f"{model.spec.vocab_size} tokens; {draft.spec.name} has {draft.spec.vocab_size}"
        )
    if draft.spec.encoder is not None or not draft.spec.causal or not draft.spec.head:
        raise UsageError(f"the draft model must be a decoder; {draft.spec.name} is none")
    if len(model.plan.numbers) > 1 or len(draft.plan.numbers) > 1:
        raise UsageError(
            "a draft model needs both models on one rank; with more of them take draft='ngram'"
        )
    return ModelProposer(
        draft, request.strategy, request.seed, len(request.prompt), verify == "chain"
    )
