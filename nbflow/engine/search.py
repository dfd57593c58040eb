"""Searches over several continuations: beam search and contrastive search."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nbflow.decoding.beam import Beams, BeamSearch, Hypothesis
from nbflow.decoding.contrastive import ContrastiveSearch
from nbflow.engine.draw import top_log_probabilities
from nbflow.engine.generation import Generation
from nbflow.engine.request import Request
from nbflow.engine.session import Session
from nbflow_kernels.errors import UsageError
from nbflow_kernels.logits import log_softmax

if TYPE_CHECKING:
    from nbflow.engine.model import Model

Prompt = str | Sequence[int] | NDArray[Any]


def beam_search(
    model: Model,
    prompt: Prompt,
    max_tokens: int = 128,
    *,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    early_stopping: Any = False,
    n: int = 1,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    decoder_ids: Sequence[int] | None = None,
) -> list[Generation]:
    r"""Return the continuations of greatest probability that a beam search finds.

    Parameters
    ----------
    model : Model
        A decoder, or an encoder and a decoder.
    prompt, max_tokens, ignore_eos, stop_token_ids, decoder_ids
        As of `Model.generate`.
    num_beams : int
        How many continuations are followed.
    length_penalty : float
        The sum of log-probabilities is divided by the length to this power.
    early_stopping : bool or "never"
        When the search ends; see `nbflow.decoding.beam.BeamSearch`.
    n : int
        How many are returned, best first; at most `num_beams`.

    Returns
    -------
    list of Generation
        With `score`.  Scores, penalty and end are those of Hugging Face's ``generate``.

    Raises
    ------
    UsageError
        If a parameter is out of range, or an engine runs the model.

    Examples
    --------
    >>> import nbflow
    >>> with nbflow.load("tiny_python") as model:
    ...     best, *_ = nbflow.beam_search(model, "def __init__(self", 2, num_beams=3)
    ...     best.text
    '):\n       '
    """
    if not 1 <= n <= num_beams:
        raise UsageError(f"n must be in 1..num_beams, 1..{num_beams}, got {n}")
    search = BeamSearch(num_beams, length_penalty, early_stopping)
    request = model.make_request(
        prompt, max_tokens, "greedy", 0, ignore_eos, decoder_ids, stop_token_ids=stop_token_ids
    )
    beams = Beams(search, request.max_tokens, request.stop_ids)
    with model.session() as session:
        held = [session.begin(request.encoder_ids)]
        tokens = [request.prompt]
        while not beams.done:
            rows = session.run(dict(zip(held, tokens, strict=True)), last=True)
            beams.advance(log_softmax(np.concatenate([rows[s].logits for s in held])))
            held = _follow(session, held, beams.parents)
            tokens = [[h.ids[-1]] for h in beams.running]
    return [_generation(model, request, h) for h in beams.finished[:n]]


def contrastive_search(
    model: Model,
    prompt: Prompt,
    max_tokens: int = 128,
    *,
    top_k: int = 4,
    penalty_alpha: float = 0.6,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    decoder_ids: Sequence[int] | None = None,
) -> Generation:
    """Continue a prompt by tokens that are probable, but unlike what was said.

    Each step runs the `top_k` most probable tokens and takes the one of greatest
    ``(1 - penalty_alpha) p - penalty_alpha s``, s the greatest cosine between its last hidden state
    and those of all tokens so far.

    Parameters
    ----------
    model : Model
        A decoder, or an encoder and a decoder.
    prompt, max_tokens, ignore_eos, stop_token_ids, decoder_ids
        As of `Model.generate`.
    top_k : int
        How many tokens are compared.
    penalty_alpha : float
        Weight of the likeness; 0 is greedy.

    Raises
    ------
    UsageError
        If a parameter is out of range, or an engine runs the model.

    References
    ----------
    .. [1] Y. Su et al., arXiv:2202.06417.
    """
    search = ContrastiveSearch(top_k, penalty_alpha)
    request = model.make_request(
        prompt, max_tokens, "greedy", 0, ignore_eos, decoder_ids, stop_token_ids=stop_token_ids
    )
    with model.session() as session:
        held = session.begin(request.encoder_ids)
        first = session.run({held: request.prompt}, hidden=True)[held]
        assert first.hidden is not None
        row, before = first.logits[-1:], first.hidden
        while request.finish_reason is None:
            ids, logprobs = top_log_probabilities(row, search.top_k)
            forks = [session.fork(held) for _ in ids[0]]
            found = session.run(dict(zip(forks, ids.T.tolist(), strict=True)), hidden=True)
            hidden = np.concatenate([found[s].hidden for s in forks])
            best = search.choose(np.exp(logprobs[0]), hidden, before)
            before = np.concatenate([before, hidden[best : best + 1]])
            row = found[forks[best]].logits
            session.drop(held, *forks[:best], *forks[best + 1 :])
            held = forks[best]
            request.accept(int(ids[0, best]), float(logprobs[0, best]))
    return model.generation(request)


SEARCHES = ("beam", "contrastive")
"""Names of the searches, beside those of the strategies."""


def search(model: Model, name: str, prompt: Prompt, max_tokens: int, **options: Any) -> Generation:
    """Return the best that a search finds; the options are those of its function."""
    function = beam_search if name == "beam" else contrastive_search
    known = inspect.signature(function).parameters
    for option in options:
        if option not in known:
            raise UsageError(
                f"decoding {name!r} has no parameter {option!r}; it takes "
                f"{', '.join(list(known)[3:])}"
            )
    found = function(model, prompt, max_tokens, **options)
    return found[0] if isinstance(found, list) else found


def _follow(session: Session, held: list[int], parents: Sequence[int]) -> list[int]:
    """Return sequences that go on as these parents did, and drop all others."""
    free = set(held)
    following = []
    for parent in parents:
        if held[parent] in free:  # the first child goes on in its parent's place
            free.discard(held[parent])
            following.append(held[parent])
        else:
            following.append(session.fork(held[parent]))
    session.drop(*free)
    return following


def _generation(model: Model, request: Request, found: Hypothesis) -> Generation:
    """Return a continuation without its end token."""
    ids, logprobs = list(found.ids), list(found.logprobs)
    ended = ids[-1] in request.stop_ids
    if ended:
        del ids[-1], logprobs[-1]
    done = dataclasses.replace(request, ids=ids, logprobs=logprobs)
    done.finish_reason = "stop" if ended else "length"
    return dataclasses.replace(model.generation(done), score=found.score)
