"""Time prompt processing and generation of a loaded model.

Timings include whole steps as `LLM.generate` runs them (scheduling, kernels, communication, greedy
sampling), from the first to the last; a decode step is timed while all sequences decode
(`times_of`).  They exclude loading, compilation (a warm-up run comes first) and building
requests.  Prompts are random tokens with a fixed seed; end tokens are ignored;
log-probabilities are off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from nbflow.engine.llm import BATCH_MULTI_STEP_S, LLM
from nbflow.engine.request import Request

T = TypeVar("T")


@dataclass(frozen=True)
class Test:
    """Benchmark case, with llama-bench's names."""

    n_prompt: int
    """Prompt tokens, timed."""
    n_gen: int
    """Generated tokens of each sequence, timed."""
    batch: int = 1
    """Concurrent sequences."""
    depth: int = 0
    """Tokens in each sequence before generation, not timed; only without a prompt."""

    __test__ = False  # keeps pytest from collecting it

    @property
    def name(self) -> str:
        """Return e.g. ``pp512``, ``tg128``, ``pp512+tg128``, ``tg32 @ d4096``."""
        parts = (("pp", self.n_prompt), ("tg", self.n_gen))
        at = f" @ d{self.depth}" if self.depth else ""
        return "+".join(f"{kind}{n}" for kind, n in parts if n) + at

    @property
    def n_tokens(self) -> int:
        """Return the number of timed tokens."""
        return self.batch * (self.n_prompt + self.n_gen)

    @property
    def context(self) -> int:
        """Return the length of a sequence at the end."""
        return max(self.depth + self.n_prompt, 1) + self.n_gen


@dataclass(frozen=True)
class Times:
    """Seconds of a batch of prompts and of the tokens generated after them."""

    prefill_s: float
    """Until every sequence has its first token."""
    rest_s: float
    """From then until every sequence has its last token.  Shorter than the decode steps where some
    sequences decode before others have their first token."""
    step_s: float
    """A decode step (a token for every sequence) while all sequences decode, of the slowest
    replica; NaN if they never all decode at once."""


class Timed(Protocol):
    """Peer program that runs the same tests (`nbflow.benchmark.llama_cpp`)."""

    name: str
    """Name and version."""

    def seconds(self, test: Test) -> float:
        """Return the seconds of one repetition."""


def time_test(model: LLM, test: Test) -> float:
    """Return the seconds of one repetition; collective over the model's ranks.

    The tokens before generation alone (`Test.depth`) are computed by the first repetition and stay
    in the prefix cache for the next ones, which compute the last of them only.  Generation counts
    `Times.step_s` for each token, or `Times.rest_s` as a whole if the sequences never all decode at
    once.
    """
    n_before = max(test.depth + test.n_prompt, 1)
    times = time_both(model, n_before, test.n_gen, test.batch, keep=not test.n_prompt)
    if test.n_prompt:
        return times.prefill_s + (times.rest_s if test.n_gen else 0.0)
    decode_s = test.n_gen * times.step_s
    return times.rest_s if math.isnan(decode_s) else decode_s


def repeat_for(
    min_s: float,
    run: Callable[[], T],
    seconds: Callable[[T], float] = float,  # type: ignore[assignment]
    agree: Callable[[bool], Any] = bool,
) -> list[T]:
    """Run until the timed seconds reach `min_s`, at least once; return the result of each run.

    Parameters
    ----------
    min_s : float
        Minimum of the sum of `seconds` over the runs.
    run : callable
        One run.
    seconds : callable
        Timed seconds of a result; by default the result itself.
    agree : callable
        Returns the first rank's value on every rank, so that all run equally often.
    """
    runs = [run()]
    total = seconds(runs[0])
    while min_s > 0 and agree(total < min_s):
        runs.append(run())
        total += seconds(runs[-1])
    return runs


def time_prefill(
    model: LLM,
    n_prompt: int,
    batch: int = 1,
    repeats: int = 5,
    warmup: int = 1,
    min_s: float = 0.0,
) -> list[float]:
    """Return the seconds to process `batch` prompts of `n_prompt` tokens and sample one token each.

    Collective over the model's ranks.  One entry per repetition: the mean over as many runs as take
    `min_s` seconds; ``batch * n_prompt`` divided by it is tokens per second.
    """
    return _time_repetitions(model, Test(n_prompt, 0, batch), repeats, warmup, min_s)


def time_decode(
    model: LLM,
    n_prompt: int,
    n_gen: int,
    batch: int = 1,
    repeats: int = 5,
    warmup: int = 1,
    min_s: float = 0.0,
) -> list[float]:
    """Return the seconds of `n_gen` decode steps of `batch` sequences.

    Collective over the model's ranks.  The sequences begin with `n_prompt` tokens, whose prefill is
    not timed.  One entry per repetition: the mean over as many runs as take `min_s` seconds;
    ``batch * n_gen`` divided by it is tokens per second.
    """
    test = Test(0, n_gen, batch, depth=n_prompt)
    return _time_repetitions(model, test, repeats, warmup, min_s)


def _time_repetitions(
    model: LLM, test: Test, repeats: int, warmup: int, min_s: float
) -> list[float]:
    """Return the mean seconds of a run, for each repetition after `warmup` discarded runs."""

    def run() -> float:
        return time_test(model, test)

    for _ in range(warmup):
        run()
    means = []
    for _ in range(repeats):
        seconds = repeat_for(min_s, run, agree=model.broadcast)
        means.append(sum(seconds) / len(seconds))
    return means


def time_both(model: LLM, n_prompt: int, n_gen: int, batch: int = 1, keep: bool = False) -> Times:
    """Return the times of a batch: its prompts, and the `n_gen` decode steps after them.

    Collective over the model's ranks.  `keep` leaves the prompts' keys and values in the prefix
    cache for the next call: the time of the prompts then says nothing.
    """
    requests = make_requests(model, n_prompt, n_gen + 1, batch)
    model.gather("record_token_times")
    for _ in model.run_requests(requests, BATCH_MULTI_STEP_S, share_prompts=keep):
        pass
    replicas = [rank["times"] for rank in model.gather("token_times") if rank["leads"]]
    return times_of([times for times in replicas if times])


def times_of(replicas: Sequence[Sequence[Sequence[float]]]) -> Times:
    """Return the times of a batch from those of its tokens.

    Parameters
    ----------
    replicas : sequence of sequence of sequence of float
        For each replica the times of the tokens of each sequence, in seconds since the start.

    Notes
    -----
    A decode step is a token for every sequence.  Only the window from the last first token to the
    first last one counts: before it some sequences still process their prompts, and after it some
    are finished, as in a pipeline, whose sequences take turns.  In the window the number of tokens
    of a sequence is read off a straight line through those around, so that a window may begin
    between two tokens, as it does where one replica is ahead of another.

    Examples
    --------
    >>> times_of([[[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]])
    Times(prefill_s=2.0, rest_s=4.0, step_s=2.0)
    """
    sequences = [times for replica in replicas for times in replica]
    first, last = max(t[0] for t in sequences), min(t[-1] for t in sequences)
    end = max(t[-1] for t in sequences)
    if last <= first:
        return Times(first, end - first, math.nan)
    steps_s = []
    for replica in replicas:
        counts = [np.interp([first, last], times, range(len(times))) for times in replica]
        n_steps = sum(float(b - a) for a, b in counts) / len(replica)
        steps_s.append((last - first) / n_steps)
    return Times(first, end - first, max(steps_s))


def make_requests(model: LLM, n_prompt: int, n_new: int, batch: int) -> list[Request]:
    """Return requests with random prompts that generate exactly `n_new` tokens each."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.spec.vocab_size, (batch, n_prompt))
    requests = [model.make_request(row, n_new, "greedy", 0, ignore_eos=True) for row in ids]
    for request in requests:
        request.wants_logprobs = False
    return requests
