"""The model a user holds: load it, ask it for logits or text."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.cache import KV_FORMATS
from nbflow.decoding import Strategy, make_strategy
from nbflow.engine.rank import RankEngine, make_groups
from nbflow.engine.request import Request
from nbflow.parallel import Comm, Plan, make_plan, world
from nbflow.parallel.threads import RankTeam
from nbflow.spec import check, resolve
from nbflow.spec.model_spec import ModelSpec
from nbflow.tokenizer import Tokenizer, load_tokenizer
from nbflow.weights import open_weights
from nbflow_kernels.errors import MissingExtraError, UsageError, unknown_name
from nbflow_kernels.threads import available_cores


@dataclass(frozen=True)
class Generation:
    """A continuation."""

    ids: list[int]
    """New token ids."""
    text: str
    """The new tokens as text; empty if the model was loaded without a tokenizer."""
    logprobs: list[float]
    """Natural logarithm of each new token's probability."""
    finish_reason: Literal["stop", "length"]
    """"stop": an end token was drawn; "length": max_tokens or the context is full."""
    prompt_ids: list[int]
    """The prompt as token ids."""


class Model:
    """A loaded model.  Made by `nbflow.load`; usable in a ``with`` statement.

    Under mpirun every rank holds one and calls the same methods in the same order; results are the
    same on every rank that takes part.  Ranks outside the partition have `participates` False and
    must not call the methods.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        tokenizer: Tokenizer | None,
        engines: list[RankEngine],
        team: RankTeam | None,
        threads: int,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.threads = threads
        """Threads of each rank."""
        self.engines = engines
        """The ranks of this process: none, one, or all of them when they are threads."""
        self._tokenizer = tokenizer
        self._team = team

    @property
    def participates(self) -> bool:
        """Whether this process holds a part of the model."""
        return bool(self.engines)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises
        ------
        UsageError
            If the model was loaded without one.
        """
        if self._tokenizer is None:
            raise UsageError(
                f"{self.spec.name} has no tokenizer file beside its weights; give one with "
                "tokenizer=FILE (--tokenizer FILE), or pass token ids instead of text"
            )
        return self._tokenizer

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights and end the threads."""
        self.engines = []
        if self._team is not None:
            self._team.close()
            self._team = None

    # ---- evaluation ---------------------------------------------------------------------------

    def logits(self, ids: Sequence[int] | NDArray[Any]) -> NDArray[np.float32]:
        """Return the scores of the next token after every token of a sequence.

        Parameters
        ----------
        ids : array of int, shape (T,)
            Token ids, at most `spec.max_context`.

        Returns
        -------
        array of float32, shape (T, V)

        Raises
        ------
        UsageError
            If `ids` is empty, too long, or holds an id outside the vocabulary.

        Examples
        --------
        >>> import nbflow
        >>> with nbflow.load("tiny_python") as model:
        ...     model.logits([1, 2, 3]).shape
        (3, 2048)
        """
        checked = self._check_ids(ids, room=0)
        result: NDArray[np.float32] = self._call("outputs", checked, "logits")[0]
        return result

    def hidden(self, ids: Sequence[int] | NDArray[Any]) -> NDArray[np.float32]:
        """Return the hidden states after the final norm, one row per token.

        Parameters
        ----------
        ids : array of int, shape (T,)
            Token ids, at most `spec.max_context`.

        Returns
        -------
        array of float32, shape (T, E)
        """
        checked = self._check_ids(ids, room=0)
        result: NDArray[np.float32] = self._call("outputs", checked, "y")[0]
        return result

    # ---- generation ---------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int] | NDArray[Any],
        max_tokens: int = 128,
        decoding: str | Strategy = "greedy",
        seed: int = 0,
        ignore_eos: bool = False,
        **parameters: float | None,
    ) -> Generation:
        """Continue a prompt.

        Parameters
        ----------
        prompt : str or sequence of int
            Text, or token ids.  Text gets the special tokens the tokenizer puts in front.
        max_tokens : int
            At most this many new tokens.
        decoding : str or Strategy
            Name of a strategy: greedy, sample, top_k, top_p, min_p.
        seed : int
            Seed of the draws.
        ignore_eos : bool
            Go on when an end token is drawn.
        **parameters : float
            The strategy's parameters, e.g. ``temperature=0.8, top_p=0.9``.

        Returns
        -------
        Generation

        Examples
        --------
        >>> import nbflow
        >>> with nbflow.load("tiny_python") as model:
        ...     model.generate("def __init__(self", max_tokens=1).text
        ','
        """
        return self.generate_batch([prompt], max_tokens, decoding, seed, ignore_eos, **parameters)[
            0
        ]

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int] | NDArray[Any]],
        max_tokens: int = 128,
        decoding: str | Strategy = "greedy",
        seed: int = 0,
        ignore_eos: bool = False,
        **parameters: float | None,
    ) -> list[Generation]:
        """Continue several prompts together; each gets the result it would get alone.

        The i-th prompt draws with ``seed + i``; otherwise as `generate`.
        """
        requests = [
            self.make_request(p, max_tokens, decoding, seed + i, ignore_eos, **parameters)
            for i, p in enumerate(prompts)
        ]
        for _ in self.run_requests(requests):
            pass
        return [self._generation(r) for r in requests]

    def stream(
        self,
        prompt: str | Sequence[int] | NDArray[Any],
        max_tokens: int = 128,
        decoding: str | Strategy = "greedy",
        seed: int = 0,
        ignore_eos: bool = False,
        **parameters: float | None,
    ) -> Iterator[int]:
        """Yield the new token ids one by one; parameters as in `generate`."""
        request = self.make_request(prompt, max_tokens, decoding, seed, ignore_eos, **parameters)
        for _ in self.run_requests([request]):
            if request.finish_reason != "stop":
                yield request.ids[-1]

    def make_request(
        self,
        prompt: str | Sequence[int] | NDArray[Any],
        max_tokens: int,
        decoding: str | Strategy,
        seed: int,
        ignore_eos: bool,
        **parameters: float | None,
    ) -> Request:
        """Return a checked request; parameters as in `generate`."""
        if max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, got {max_tokens}")
        if not 0 <= seed < 2**64:
            raise UsageError(f"seed must be in 0..2**64 - 1, got {seed}")
        strategy = (
            decoding if isinstance(decoding, Strategy) else make_strategy(decoding, **parameters)
        )
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, add_special_tokens=True)
        ids = self._check_ids(prompt, room=1)
        room = self.spec.max_context - len(ids)
        stop = frozenset() if ignore_eos else frozenset(self._end_ids())
        return Request(ids, min(max_tokens, room), strategy, seed, stop)

    def run_requests(self, requests: list[Request]) -> Iterator[list[tuple[int, int, float]]]:
        """Run requests to their end, yielding after each step (request, token, log-probability)."""
        copies = [_copy(requests) for _ in self.engines[1:]]
        self._call("begin", per_engine=[requests, *copies])
        try:
            while any(r.finish_reason is None for r in requests):
                events = self._call("advance")[0]
                if events:
                    yield events
        finally:
            with contextlib.suppress(Exception):
                self._call("end")

    def _generation(self, request: Request) -> Generation:
        assert request.finish_reason is not None
        text = self._tokenizer.decode(request.ids) if self._tokenizer is not None else ""
        return Generation(
            request.ids, text, request.logprobs, request.finish_reason, request.prompt
        )

    def _end_ids(self) -> tuple[int, ...]:
        if self.spec.eos_token_ids:
            return tuple(self.spec.eos_token_ids)
        return tuple(self._tokenizer.eos_ids) if self._tokenizer is not None else ()

    def _check_ids(self, ids: Sequence[int] | NDArray[Any], room: int) -> list[int]:
        array = np.asarray(ids)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise UsageError(
                f"token ids must be a non-empty sequence of integers, got shape {array.shape} "
                f"of {array.dtype}"
            )
        if array.size + room > self.spec.max_context:
            more = f" (and {room} more to generate)" if room else ""
            raise UsageError(
                f"the prompt has {array.size} tokens{more}, but the context of {self.spec.name} "
                f"holds {self.spec.max_context}; shorten it"
            )
        if array.min() < 0 or array.max() >= self.spec.vocab_size:
            bad = int(array[(array < 0) | (array >= self.spec.vocab_size)][0])
            raise UsageError(
                f"token id {bad} is outside the vocabulary of {self.spec.name}, "
                f"0..{self.spec.vocab_size - 1}"
            )
        return [int(i) for i in array]

    # ---- what it holds and what it sent -------------------------------------------------------

    def memory(self) -> list[dict[str, int]]:
        """Return, for each rank of the plan, the bytes it holds and the peak of its process."""
        return self._gather("memory")

    def reset_traffic(self) -> None:
        """Count the bytes sent between ranks from here on."""
        self._call("reset_traffic")

    def traffic(self) -> dict[str, int]:
        """Return the bytes sent by all ranks since `reset_traffic`, measured and predicted."""
        ranks = self._gather("traffic")
        return {key: sum(r[key] for r in ranks) for key in ("measured_bytes", "predicted_bytes")}

    def _gather(self, method: str) -> list[dict[str, int]]:
        """Return the results of all ranks of the plan, on every one of them."""
        results = self._call(method)
        if self._team is None:
            comm = self.engines[0].comm
            results = comm.bcast_object(comm.gather_object(results[0]))
        return results

    def _call(self, method: str, *args: Any, per_engine: list[Any] | None = None) -> list[Any]:
        """Call a method of every rank of this process."""
        if not self.engines:
            raise UsageError(
                f"this process holds no part of the model (partition {self.plan.partition!r}), "
                "or the model is closed"
            )
        if self._team is None:
            extra = per_engine[:1] if per_engine else []
            return [getattr(self.engines[0], method)(*args, *extra)]

        def run(comm: Comm) -> Any:
            extra = [per_engine[comm.rank]] if per_engine else []
            return getattr(self.engines[comm.rank], method)(*args, *extra)

        return self._team.run(run)


def _copy(requests: list[Request]) -> list[Request]:
    return [Request(r.prompt, r.max_tokens, r.strategy, r.seed, r.stop_ids) for r in requests]


def load(
    model: str | Path,
    *,
    spec: str | Path | None = None,
    weights: str | None = None,
    kv: str = "f16",
    partition: str = "0",
    device: str = "auto",
    tokenizer: str | Path | None = None,
    max_context: int | None = None,
    threads: int | None = None,
    max_step_tokens: int = 512,
    comm: Comm | None = None,
) -> Model:
    """Load a model, each rank its own part.

    Parameters
    ----------
    model : str or Path
        A Hugging Face folder, a .safetensors file, a llama2.c .bin, or the name of a model spec.
    spec : str or Path, optional
        A spec file (TOML) to use instead of what the checkpoint says about itself.
    weights : str, optional
        Format of the attention and feed-forward matrices: a name of `nbflow_kernels.FORMATS`, e.g.
        "q4".  None keeps what the checkpoint stores.
    kv : {"f16", "f32"}
        Element format of the key/value cache.
    partition : str
        Who holds what, e.g. ``"0"``, ``"0;1"`` (by layer), ``"0&1"`` (by tensor), ``"0&1;2&3"``.
        Under mpirun the numbers are MPI ranks; without it they are threads of this process.
    device : {"auto", "cpu"}
        Where to run.
    tokenizer : str or Path, optional
        Tokenizer file, if it does not lie beside the weights.
    max_context : int, optional
        Shorten the context to this many tokens.
    threads : int, optional
        Threads of each rank; by default the cores of the machine are shared out evenly.
    max_step_tokens : int
        Most tokens in one step; longer prompts are run in pieces, with the same result.
    comm : Comm, optional
        Ranks to use; by default those mpirun started.

    Returns
    -------
    Model

    Raises
    ------
    UsageError
        If a file, name or setting is wrong, or the partition does not fit the model or the ranks.

    Examples
    --------
    >>> import nbflow
    >>> with nbflow.load("tiny_python", weights="q4", partition="0&1") as model:
    ...     model.plan.numbers
    (0, 1)
    """
    resolved = resolve(model, spec=spec)
    the_spec = _shorten(resolved.spec, max_context)
    block_size = 1 if weights is None else nk.FORMATS[weights].block_size
    if kv not in KV_FORMATS:
        raise unknown_name("KV cache format", kv, KV_FORMATS)
    if device == "cuda":
        raise MissingExtraError(
            "device 'cuda': this version of nbflow has no CUDA executor; use device 'cpu' or 'auto'"
        )
    if device not in ("auto", "cpu"):
        raise unknown_name("device", device, ("auto", "cpu"))
    if max_step_tokens < 1:
        raise UsageError(f"max_step_tokens must be at least 1, got {max_step_tokens}")
    comm = comm or world()
    plan = make_plan(the_spec, partition, block_size)
    _check_ranks(plan, comm)
    token_file = tokenizer or resolved.tokenizer
    tok = load_tokenizer(token_file) if token_file is not None else None
    if threads is None:
        threads = max(1, available_cores() // _ranks_here(plan, comm))
    options: dict[str, Any] = {
        "spec": the_spec,
        "weights": weights,
        "kv": kv,
        "threads": threads,
        "max_step_tokens": max_step_tokens,
    }
    engines, team = _start(plan, comm, resolved.path, options)
    return Model(the_spec, plan, tok, engines, team, threads)


def _start(
    plan: Plan, comm: Comm, path: Path, options: dict[str, Any]
) -> tuple[list[RankEngine], RankTeam | None]:
    """Make the ranks of this process."""

    def make(mine: Comm) -> RankEngine:
        groups = make_groups(plan, mine)
        engine, failure = None, None
        try:
            with open_weights(path) as file:
                check(options["spec"], file)
                engine = RankEngine(plan, file, mine, groups, **options)
        except (UsageError, OSError, MemoryError) as error:
            failure = error
        _agree(mine, failure)
        assert engine is not None
        return engine

    if comm.size == 1 and len(plan.ranks) > 1:
        team = RankTeam(len(plan.ranks))
        try:
            return team.run(make), team
        except BaseException:
            team.close()
            raise
    mine = comm.split(plan.numbers) if comm.size > 1 else comm
    return ([] if mine is None else [make(mine)]), None


def _agree(comm: Comm, failure: Exception | None) -> None:
    """Raise on every rank if one has failed, so that no rank waits for one that has given up."""
    failures = comm.bcast_object(comm.gather_object(failure))
    if failure is not None:
        raise failure
    for rank, other in enumerate(failures):
        if other is not None:
            raise UsageError(f"rank {rank} could not load its part: {other}") from other


def _shorten(spec: ModelSpec, max_context: int | None) -> ModelSpec:
    if max_context is None:
        return spec
    if not 1 <= max_context <= spec.max_context:
        raise UsageError(
            f"max_context must be 1..{spec.max_context} for {spec.name}, got {max_context}"
        )
    return dataclasses.replace(spec, max_context=max_context)


def _check_ranks(plan: Plan, comm: Comm) -> None:
    if comm.size == 1:
        return
    missing = [rank for rank in plan.numbers if rank >= comm.size]
    if missing:
        raise UsageError(
            f"partition {plan.partition!r} names rank {max(missing)}, but mpirun started "
            f"{comm.size} ranks, 0..{comm.size - 1}; use mpirun -n {max(missing) + 1} or another "
            "partition"
        )


def _ranks_here(plan: Plan, comm: Comm) -> int:
    """Return how many ranks of the plan share this machine."""
    if comm.size == 1:
        return len(plan.ranks)
    hosts: list[str] = comm.bcast_object(comm.gather_object(platform.node()))
    return max(1, sum(hosts[rank] == hosts[comm.rank] for rank in plan.numbers))
