"""LLM: a loaded model, for logits, hidden states, embeddings and text."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.distributed import Plan
from nbflow.distributed.thread_ranks import ThreadRanks
from nbflow.engine.classification_head import ClassificationHead
from nbflow.engine.evaluator import SequenceEvaluator
from nbflow.engine.model_lock import ModelLock
from nbflow.engine.outputs import RequestOutput, TokenOutput, text_of
from nbflow.engine.request import Proposals, Request
from nbflow.engine.request_validation import (
    check_encoder_ids,
    check_ids,
    check_types,
    embedding_requests,
    sampling_params,
    validate_request,
)
from nbflow.engine.search import Search
from nbflow.engine.search.api import SEARCHES, search
from nbflow.engine.speculative.config import Draft, attach
from nbflow.engine.speculative.draft_model import DraftModelProposer, proposals
from nbflow.engine.worker import Worker
from nbflow.options import SamplingParams, SpeculativeConfig
from nbflow.sampling import Strategy
from nbflow.spec.model_spec import ModelSpec
from nbflow.tokenization import Tokenizer
from nbflow_kernels.errors import UsageError

STREAM_MULTI_STEP_S = 16e-3
"""Seconds of decode steps per engine step where tokens are streamed: a frame of a screen.  To
deliver tokens costs some 50 microseconds per sequence, as much as a small model takes for one."""
BATCH_MULTI_STEP_S = 0.1
"""Seconds of decode steps per engine step where only the final result is needed.

A keyboard interrupt waits as long."""


class LLM:
    """Loaded model, returned by `nbflow.load`; usable in a ``with`` statement.

    The methods are thread-safe, and the results do not depend on other threads.  Requests of all
    threads share steps; other calls wait for the current step.  The reader of a `stream` may call
    the model between two tokens; callbacks of a step, e.g. a proposer, may not (`UsageError`).

    Under mpirun every rank makes the same calls in the same order, from one thread per process, and
    gets the same results.  Ranks outside the partition (`participates` False) make no calls.
    """

    engine_class: type[Any] | None = None
    """Subclass of `nbflow.LLMEngine` for this kind of model, if any."""
    classification_head: ClassificationHead | None = None
    """Head of a classifier; see `nbflow.classify`."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        tokenizer: Tokenizer | None,
        workers: list[Worker],
        rank_threads: ThreadRanks | None,
        threads: int,
        defaults: Mapping[str, float],
        why_no_tokenizer: str = "",
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.threads = threads
        """Threads of each rank."""
        self.defaults = defaults
        """Sampling parameters recommended by the model, used where a call gives none."""
        self.workers = workers
        """Workers of this process: none, one, or all of them when ranks are threads."""
        self.engine: object | None = None
        """The `nbflow.LLMEngine` that currently runs the steps of this model."""
        self._tokenizer = tokenizer
        self._why_no_tokenizer = why_no_tokenizer
        self._rank_threads = rank_threads
        self.lock = ModelLock(self)
        """Serializes calls of several threads."""
        self._process = os.getpid()

    def check_free(self) -> None:
        """Raise `UsageError` if an engine runs the model."""
        if self.engine is not None:
            raise UsageError(
                f"an engine runs {self.spec.name}; submit requests to it, or close it first"
            )

    @property
    def ranks_are_threads(self) -> bool:
        """True if all ranks are threads of this process."""
        return self._rank_threads is not None

    @property
    def on_rank_thread(self) -> bool:
        """True on the thread of a rank."""
        return self._rank_threads is not None and self._rank_threads.holds_this_thread()

    def claim(self, engine: object) -> None:
        """Reserve the model for an engine until `release`."""
        with self.lock.held():
            if self.engine is not None:
                raise UsageError(f"another engine runs {self.spec.name} already; close it first")
            self.engine = engine

    def release(self, engine: object) -> None:
        """End the reservation by `claim`."""
        if self.engine is engine:
            self.engine = None

    @property
    def leads(self) -> bool:
        """True on the process with the first rank, which decides for all."""
        return bool(self.workers) and self.workers[0].comm.rank == 0

    @functools.cached_property
    def drafter(self) -> DraftModelProposer:
        """Proposer that uses this model as draft model."""
        return DraftModelProposer(self, self.session)

    @property
    def participates(self) -> bool:
        """True if this process holds a shard of the model."""
        return bool(self.workers)

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
                f"{self.spec.name} {self._why_no_tokenizer}; give one with "
                "tokenizer=FILE (--tokenizer FILE), or pass token ids instead of text"
            )
        return self._tokenizer

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights and end the threads."""
        with self.lock.held():
            self.workers = []
            if self._rank_threads is not None:
                self._rank_threads.close()
                self._rank_threads = None

    # ---- evaluation ---------------------------------------------------------------------------

    def logits(
        self,
        ids: Sequence[int] | NDArray[Any],
        encoder_ids: Sequence[int] | NDArray[Any] | None = None,
        token_types: Sequence[int] | NDArray[Any] | None = None,
    ) -> NDArray[np.float32]:
        """Return the logits after every token of a sequence.

        Parameters
        ----------
        ids : array of int, shape (T,)
            Token ids, at most `spec.max_context`; for a model with an encoder, the decoder's.
        encoder_ids : array of int, optional
            Token ids for the encoder, if the model has one.
        token_types : array of int, shape (T,), optional
            As in `hidden`.

        Returns
        -------
        array of float32, shape (T, V)
            For a masked language model (BERT), the logits of the token itself.

        Raises
        ------
        UsageError
            If `ids` is empty, too long, or holds an id outside the vocabulary; if the model has no
            head; if the types do not fit the tokens or the model.

        Examples
        --------
        >>> import nbflow
        >>> with nbflow.load("tiny_python") as model:
        ...     model.logits([1, 2, 3]).shape
        (3, 2048)
        """
        if not self.spec.head:
            raise UsageError(
                f"{self.spec.name} is an encoder without a head, and gives no logits; use "
                "hidden(), embed() or classify()"
            )
        return self._evaluate("logits", ids, token_types, encoder_ids)

    def hidden(
        self,
        ids: Sequence[int] | NDArray[Any],
        token_types: Sequence[int] | NDArray[Any] | None = None,
        encoder_ids: Sequence[int] | NDArray[Any] | None = None,
    ) -> NDArray[np.float32]:
        """Return the hidden states after the last layer and its norm, one row per token.

        Parameters
        ----------
        ids : array of int, shape (T,)
            Token ids, at most `spec.max_context`.
        token_types : array of int, shape (T,), optional
            Types of the tokens (0 for the first of two texts, 1 for the second), for models that
            have an embedding for them; 0 by default.
        encoder_ids : array of int, optional
            As in `logits`.

        Returns
        -------
        array of float32, shape (T, E)

        Raises
        ------
        UsageError
            As `logits`.
        """
        return self._evaluate("y", ids, token_types, encoder_ids)

    def _evaluate(
        self,
        name: str,
        ids: Sequence[int] | NDArray[Any],
        token_types: Sequence[int] | NDArray[Any] | None,
        encoder_ids: Sequence[int] | NDArray[Any] | None,
    ) -> NDArray[np.float32]:
        """Return a buffer of the program, "logits" or "y", after every token."""
        checked = check_ids(self.spec, ids, room=0)
        types = check_types(self.spec, token_types, len(checked))
        for_encoder = check_encoder_ids(self.spec, encoder_ids)
        with self.lock.held():
            self.check_free()
            result: NDArray[np.float32] = self.call(
                "sequences", "outputs", [checked], name, _only(types), _only(for_encoder)
            )[0][0]
        return result

    def embed(
        self,
        ids: Sequence[int] | NDArray[Any],
        token_types: Sequence[int] | NDArray[Any] | None = None,
        *,
        pooling: str = "mean",
        normalize: bool = True,
    ) -> NDArray[np.float32]:
        """Return the embedding of a text: its pooled hidden states.

        Parameters
        ----------
        ids : array of int, shape (T,)
            Token ids, including the special tokens of the model.
        token_types : array of int, shape (T,), optional
            As in `hidden`.
        pooling : {"mean", "first", "last"}
            The mean over all tokens (sentence-transformers), or the first or last token alone.
        normalize : bool
            True to normalize the vector to length 1.

        Returns
        -------
        array of float32, shape (E,)
        """
        types = None if token_types is None else [token_types]
        return self.embed_batch([ids], types, pooling=pooling, normalize=normalize)[0]

    def embed_batch(
        self,
        sequences: Sequence[Sequence[int] | NDArray[Any]],
        token_types: Sequence[Sequence[int] | NDArray[Any]] | None = None,
        *,
        pooling: str = "mean",
        normalize: bool = True,
    ) -> list[NDArray[np.float32]]:
        """Return the embeddings of several texts, in shared steps; each equals that of `embed`."""
        requests = self.embedding_requests(
            sequences, token_types, pooling=pooling, normalize=normalize
        )
        for _ in LLM.run_requests(self, requests, BATCH_MULTI_STEP_S):  # each replica runs all
            pass
        return [request.finished_vector() for request in requests]

    def embedding_requests(
        self,
        sequences: Sequence[Sequence[int] | NDArray[Any]],
        token_types: Sequence[Sequence[int] | NDArray[Any]] | None = None,
        *,
        pooling: str = "mean",
        normalize: bool = True,
    ) -> list[Request]:
        """Return a pooling request for each text; parameters as in `embed_batch`.

        `Request.finished_vector` returns the result of a finished request.
        """
        return embedding_requests(self.spec, sequences, token_types, pooling, normalize)

    def session(self) -> SequenceEvaluator:
        """Return a `SequenceEvaluator` for stepwise evaluation, forks and truncation."""
        with self.lock.held():
            self.check_free()
            self.lock.configure()
        return SequenceEvaluator(self)

    # ---- generation ---------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int] | NDArray[Any],
        max_tokens: int = SamplingParams.max_tokens,
        decoding: str | Strategy | None = None,
        seed: int = SamplingParams.seed,
        ignore_eos: bool = SamplingParams.ignore_eos,
        decoder_ids: Sequence[int] | None = None,
        **parameters: Any,
    ) -> RequestOutput:
        """Continue a prompt.

        Parameters
        ----------
        prompt : str or sequence of int
            Text or token ids.  The tokenizer adds its special tokens to text.
        max_tokens : int
            Most new tokens.
        decoding : str or Strategy, optional
            Name of a strategy; see docs/decoding.md.  By default greedy, or with parameters of a
            strategy the one that they imply; "auto" also follows the model's recommendation.
        seed : int
            Seed of the random numbers.
        ignore_eos : bool
            Continue after an end token.
        decoder_ids : sequence of int, optional
            Decoder prompt of an encoder-decoder model, e.g. start token and language token; by
            default the start token, and what `target_lang` and `decoder_prefix` say.
        **parameters
            Fields of `nbflow.SamplingParams`, e.g. ``temperature=0.8, stop=["END"]``; others come
            from the model (`defaults`) or the strategy.
            ``draft`` is a smaller model with the same vocabulary, or "ngram": `n_draft` (5) draft
            tokens are verified per step.  The result is that without a draft; with
            ``draft_verify="chain"`` only its distribution is.
            "beam" and "contrastive" take the parameters of `nbflow.beam_search` and
            `nbflow.contrastive_search`.

        Returns
        -------
        RequestOutput

        Examples
        --------
        >>> import nbflow
        >>> with nbflow.load("tiny_python") as model:
        ...     model.generate("def __init__(self", max_tokens=1).text
        ','
        """
        if isinstance(decoding, str) and decoding in SEARCHES:
            return search(
                self, decoding, prompt, max_tokens, ignore_eos=ignore_eos, decoder_ids=decoder_ids,
                **parameters,
            )  # fmt: skip
        (result,) = self.generate_batch(
            [prompt], max_tokens, decoding, seed, ignore_eos, decoder_ids, **parameters
        )
        return result

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int] | NDArray[Any]],
        max_tokens: int = SamplingParams.max_tokens,
        decoding: str | Strategy | None = None,
        seed: int = SamplingParams.seed,
        ignore_eos: bool = SamplingParams.ignore_eos,
        decoder_ids: Sequence[int] | None = None,
        n: int = 1,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """Continue several prompts in shared steps; each result is that of the prompt alone.

        Each prompt gets `n` consecutive results, which share the full pages of the prompt.  The
        i-th result of all uses ``seed + i``; otherwise as `generate`.
        """
        requests = [
            self.make_request(
                p, max_tokens, decoding, seed + i, ignore_eos, decoder_ids, **parameters
            )
            for i, p in enumerate(p for p in prompts for _ in range(n))
        ]
        for _ in self.run_requests(requests, BATCH_MULTI_STEP_S, share_prompts=n > 1):
            pass
        return [self.generation(r) for r in requests]

    def stream(
        self,
        prompt: str | Sequence[int] | NDArray[Any],
        max_tokens: int = SamplingParams.max_tokens,
        decoding: str | Strategy | None = None,
        seed: int = SamplingParams.seed,
        ignore_eos: bool = SamplingParams.ignore_eos,
        decoder_ids: Sequence[int] | None = None,
        **parameters: Any,
    ) -> Iterator[int]:
        """Yield the new token ids one by one; parameters as in `generate`."""
        request = self.make_request(
            prompt, max_tokens, decoding, seed, ignore_eos, decoder_ids, **parameters
        )
        n = 0
        for _ in self.run_requests([request]):
            new = request.ids[n:]
            n += len(new)
            yield from new
        yield from request.ids[n:]  # tokens of steps run by another reader

    def make_request(
        self,
        prompt: str | Sequence[int] | NDArray[Any],
        max_tokens: int = SamplingParams.max_tokens,
        decoding: str | Strategy | Search | None = None,
        seed: int = SamplingParams.seed,
        ignore_eos: bool = SamplingParams.ignore_eos,
        decoder_ids: Sequence[int] | None = None,
        draft: Draft | None = None,
        n_draft: int = SpeculativeConfig.n_draft,
        draft_verify: str = SpeculativeConfig.draft_verify,
        **parameters: Any,
    ) -> Request:
        """Return a validated request; parameters as in `generate`.

        `decoding` may also be a search, `nbflow.engine.search.BeamSearch` or `ContrastiveSearch`,
        without a draft or parameters of strategies; the first has no `stop` texts either.
        """
        params = sampling_params(max_tokens, decoding, seed, ignore_eos, parameters)
        request = validate_request(
            self, prompt, params, decoding, decoder_ids, drafted=draft is not None
        )
        attach(draft, self, request, n_draft, draft_verify)
        return request

    def run_requests(
        self,
        requests: list[Request],
        burst_s: float = STREAM_MULTI_STEP_S,
        share_prompts: bool = False,
    ) -> Iterator[list[tuple[int, TokenOutput]]]:
        """Run requests until they finish, yielding new tokens.

        Each item is a list of (index of the request, token) of one step, or of as many decode steps
        as fit into `burst_s` seconds; more steps mean less Python overhead.  `share_prompts`
        enables the prefix cache, unless requests already run without.
        """
        return self.lock.run(requests, burst_s, share_prompts)

    def proposed(self) -> Proposals | None:
        """Return the draft tokens for the next step, the same on every rank."""
        first = self.workers[0]
        running = first.scheduler.running
        if not any(r.n_proposed and r.proposer is None for r in running):
            return None
        found = proposals(running, first.scheduler.max_step_tokens) if self.leads else None
        if not self.ranks_are_threads and self.engine is None:  # an engine broadcasts them itself
            found = first.comm.bcast_object(found)
        return found

    def generation(self, request: Request) -> RequestOutput:
        """Return the result of a finished request."""
        return RequestOutput.of(request, text_of(request, self._tokenizer))

    def generations(self, request: Request) -> list[RequestOutput]:
        """Return all results of a search, best first; otherwise the only result."""
        one = self.generation(request)
        return [
            one.replaced(found, request.stop_ids, self._tokenizer) for found in request.found
        ] or [one]

    @property
    def end_ids(self) -> tuple[int, ...]:
        """End-of-text tokens of checkpoint and tokenizer."""
        # a GGUF file states one; its vocabulary has end-of-turn tokens, too
        known = () if self._tokenizer is None else self._tokenizer.eos_ids
        return (*self.spec.eos_token_ids, *known)

    @property
    def optional_tokenizer(self) -> Tokenizer | None:
        """Tokenizer, or None."""
        return self._tokenizer

    # ---- memory, traffic, workers -------------------------------------------------------------

    def memory(self) -> list[dict[str, int]]:
        """Return the memory of each rank in bytes, and the peak of its process.

        A rank on a device also has readings of the device's memory in use, which count all ranks on
        it: ``vram_before_bytes`` before the model was loaded, and in addition to that
        ``vram_load_bytes`` after loading, ``vram_bytes`` now, ``vram_peak_bytes`` at most.
        """
        return self.gather("memory")

    def devices(self) -> list[dict[str, str]]:
        """Return name and hardware of each rank's device; ranks with the same key share it."""
        return self.gather("devices")

    def reset_memory(self) -> None:
        """Free the KV cache and step buffers of earlier steps, and restart the peaks of `memory`.

        Requests end; collective over the model's ranks.
        """
        self.call("reset_memory")

    def reset_traffic(self) -> None:
        """Reset the counters of bytes sent between ranks."""
        self.call("reset_traffic")

    def traffic(self) -> dict[str, int]:
        """Return measured and predicted bytes sent by all ranks since `reset_traffic`."""
        ranks = self.gather("traffic")
        return {key: sum(r[key] for r in ranks) for key in ("measured_bytes", "predicted_bytes")}

    def transport(self) -> list[dict[str, str]]:
        """Return the transport of arrays between ranks, for each rank.

        ``transport`` is "nccl", "mpi" (CUDA-aware), "host" (host memory), or empty for one rank;
        ``reason`` says why a faster one is impossible.
        """
        return self.gather("transport")

    def all_reduce_error(self) -> float:
        """Return the relative RMS rounding error of partial sums with ``all_reduce="q8"``.

        The maximum over ranks, since the first such all-reduce; 0 without any.
        """
        return max(float(rank["rounding_error"]) for rank in self.gather("all_reduce_error"))

    def broadcast(self, value: Any) -> Any:
        """Broadcast a value of the first rank to all ranks; collective."""
        return value if self._rank_threads is not None else self.workers[0].comm.bcast_object(value)

    def gather(self, method: str) -> list[dict[str, Any]]:
        """Return the results of all ranks of the plan, on every one of them."""
        with self.lock.held():
            results = self.call(method)
            if self._rank_threads is None:
                comm = self.workers[0].comm
                results = comm.bcast_object(comm.gather_object(results[0]))
        return results

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every `Worker` of this process; return their results.

        Other threads wait.  Each rank gets its own copy of a submitted request.
        """
        with self.lock.calling():
            if not self.workers:
                raise UsageError(
                    f"this process holds no part of the model (partition {self.plan.partition!r}), "
                    "or the model is closed"
                )
            if self._process != os.getpid():
                self._check_fork()
            if self._rank_threads is None:
                return [getattr(self.workers[0], method)(*args)]
            of_rank = [args] * len(self.workers)
            if method == "submit":
                of_rank = [args, *((args[0].copy(),) for _ in self.workers[1:])]
            return self._rank_threads.run(
                lambda comm: getattr(self.workers[comm.rank], method)(*of_rank[comm.rank])
            )

    def _check_fork(self) -> None:
        """Raise in a forked child if the model has ranks that are not in this process."""
        if self._rank_threads is not None or self.workers[0].comm.size > 1:
            raise UsageError(
                f"the {len(self.plan.ranks)} ranks of {self.spec.name} (partition "
                f"{self.plan.partition!r}) are not in this process, which was forked; load the "
                "model here, or load it before the fork with a partition of one rank"
            )


def _only(ids: list[int] | None) -> list[list[int]] | None:
    """Return a batch of one, or None."""
    return None if ids is None else [ids]
