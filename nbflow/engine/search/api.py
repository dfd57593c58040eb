"""`beam_search` and `contrastive_search`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from nbflow.engine.interfaces import ModelRunner
from nbflow.engine.outputs import RequestOutput
from nbflow.engine.request import Request
from nbflow.engine.search.base import Search
from nbflow.engine.search.beam import BeamSearch
from nbflow.engine.search.contrastive import ContrastiveSearch
from nbflow.options import DECODER_START, SamplingParams
from nbflow_kernels.errors import UsageError

Prompt = str | Sequence[int] | NDArray[Any]


def beam_search(
    model: ModelRunner,
    prompt: Prompt,
    max_tokens: int = SamplingParams.max_tokens,
    *,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    early_stopping: Any = False,
    n: int = 1,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    decoder_ids: Sequence[int] | None = None,
    **start: Any,
) -> list[RequestOutput]:
    r"""Return the best continuations found by beam search.

    Parameters
    ----------
    model : Model
        A decoder, or an encoder and a decoder.
    prompt, max_tokens, ignore_eos, stop_token_ids, decoder_ids
        As in `LLM.generate`.
    num_beams : int
        Number of beams.
    length_penalty : float
        The sum of log-probabilities is divided by the length to this power.
    early_stopping : bool or "never"
        End condition; see `nbflow.engine.search.beam.BeamSearch`.
    n : int
        Number of results, best first; at most `num_beams`.
    **start
        `nbflow.options.DECODER_START`, as in `LLM.generate`.

    Returns
    -------
    list of RequestOutput
        With `score`; see `nbflow.engine.search.beam`.

    Raises
    ------
    UsageError
        If a parameter is out of range, or an engine runs the model.  Use then
        ``engine.submit(model.make_request(prompt, 64, BeamSearch(num_beams=4, n=2)))``, whose
        handle has `results`.

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
    search = BeamSearch(num_beams, length_penalty, early_stopping, n)
    request = model.make_request(
        prompt, max_tokens, search, 0, ignore_eos, decoder_ids, stop_token_ids=stop_token_ids,
        **start,
    )  # fmt: skip
    return _run(model, request)


def contrastive_search(
    model: ModelRunner,
    prompt: Prompt,
    max_tokens: int = SamplingParams.max_tokens,
    *,
    top_k: int = 4,
    penalty_alpha: float = 0.6,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    decoder_ids: Sequence[int] | None = None,
    **start: Any,
) -> RequestOutput:
    """Continue a prompt with probable tokens that differ from the context.

    Each step runs the `top_k` most probable tokens and takes the one of greatest
    ``(1 - penalty_alpha) p - penalty_alpha s``, s the greatest cosine between its last hidden state
    and those of all tokens so far.

    Parameters
    ----------
    model : Model
        A decoder, or an encoder and a decoder.
    prompt, max_tokens, ignore_eos, stop_token_ids, decoder_ids
        As in `LLM.generate`.
    top_k : int
        Number of candidates.
    penalty_alpha : float
        Weight of the similarity; 0 is greedy.
    **start
        `nbflow.options.DECODER_START`, as in `LLM.generate`.

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
        prompt, max_tokens, search, 0, ignore_eos, decoder_ids, stop_token_ids=stop_token_ids,
        **start,
    )  # fmt: skip
    return _run(model, request)[0]


def check_search(search: Search, params: SamplingParams, drafted: bool) -> None:
    """Raise `UsageError` for parameters that the search does not support."""
    free = {"max_tokens", "seed", "ignore_eos", "stop_token_ids", "logprobs", "prompt_logprobs"}
    free |= set(DECODER_START)
    name = search.name
    if name == "contrastive":  # streams its text
        free |= {"stop", "include_stop_str_in_output"}
    for given in params.given():
        if given not in free:
            raise UsageError(f"a {name} search has no parameter {given!r}; leave it out")
    if drafted:
        raise UsageError(f"a {name} search takes no draft")
    if params.max_tokens < 1:
        raise UsageError(f"a {name} search needs max_tokens of at least 1, got {params.max_tokens}")


def _run(model: ModelRunner, request: Request) -> list[RequestOutput]:
    """Run a request and return the results of its search."""
    for _ in model.run_requests([request]):
        pass
    return model.generations(request)


SEARCHES = ("beam", "contrastive")
"""Names of the searches."""


def search(
    model: ModelRunner, name: str, prompt: Prompt, max_tokens: int, **options: Any
) -> RequestOutput:
    """Return the best result of a search; options as for its function."""
    function = beam_search if name == "beam" else contrastive_search
    known = [n for n in inspect.signature(function).parameters if n != "start"]
    known += DECODER_START
    for option in options:
        if option not in known:
            raise UsageError(
                f"decoding {name!r} has no parameter {option!r}; it takes {', '.join(known[3:])}"
            )
    found = function(model, prompt, max_tokens, **options)
    return found[0] if isinstance(found, list) else found
