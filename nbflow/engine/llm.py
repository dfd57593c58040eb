"""The model a user holds: ask it for logits or text."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nbflow.distributed import Plan
from nbflow.distributed.thread_ranks import RankTeam
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

STREAM_MULTI_STEP_S = 2e-3
"""How long tokens are held back when somebody may be reading them one by one."""
BATCH_MULTI_STEP_S = 0.1
"""The same when only the whole result is wanted; an interrupt from the keyboard waits as long."""


class LLM:
    """A loaded model.  Made by `nbflow.load`; usable in a ``with`` statement.

    Any thread may call the methods, and several at once: each gets what it would get alone.  Steps
    run one after the other and are shared, so generations go on together; other calls wait for the
    step that runs.  Between two tokens of a `stream` its reader may call the model, too.  What a
    step itself calls, e.g. a proposer, may not (`UsageError`).

    Under mpirun every rank holds one and calls the same methods in the same order, which only one
    thread of each process can keep to; results are the same on every rank that takes part.  Ranks
    outside the partition have `participates` False and must not call the methods.
    """

    engine_class: ClassVar[type[Any] | None] = None
    """The engine that runs this model, if `nbflow.LLMEngine` itself does not."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        tokenizer: Tokenizer | None,
        workers: list[Worker],
        rank_threads: RankTeam | None,
        threads: int,
        defaults: Mapping[str, float],
        why_no_tokenizer: str = "",
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.threads = threads
        """Threads of each rank."""
        self.defaults = defaults
        """Decoding parameters the model recommends, taken where a call gives none."""
        self.workers = workers
        """The ranks of this process: none, one, or all of them when they are threads."""
        self.engine: object | None = None
        """The `nbflow.LLMEngine` that runs this model at present; the steps are then its own."""
        self._tokenizer = tokenizer
        self._why_no_tokenizer = why_no_tokenizer
        self._rank_threads = rank_threads
        self.lock = ModelLock(self)
        """By which threads call this model one after the other."""
        self._process = os.getpid()

    def check_free(self) -> None:
        """Raise unless the model's steps are the caller's own."""
        if self.engine is not None:
            raise UsageError(
                f"an engine runs {self.spec.name}; submit requests to it, or close it first"
            )

    @property
    def ranks_are_threads(self) -> bool:
        """Whether all ranks are threads of this process."""
        return self._rank_threads is not None

    @property
    def on_rank_thread(self) -> bool:
        """True on the thread of a rank."""
        return self._rank_threads is not None and self._rank_threads.holds_this_thread()

    def claim(self, engine: object) -> None:
        """Let an engine run this model; nobody else may, until it is released."""
        with self.lock.held():
            if self.engine is not None:
                raise UsageError(f"another engine runs {self.spec.name} already; close it first")
            self.engine = engine

    def release(self, engine: object) -> None:
        """Give the model back."""
        if self.engine is engine:
            self.engine = None

    @property
    def leads(self) -> bool:
        """Whether this process says what the ranks of the model do."""
        return bool(self.workers) and self.workers[0].comm.rank == 0

    @functools.cached_property
    def drafter(self) -> DraftModelProposer:
        """What lets this model propose tokens to another one's requests."""
        return DraftModelProposer(self, self.session)

    @property
    def participates(self) -> bool:
        """Whether this process holds a part of the model."""
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
        """Return the scores of the next token after every token of a sequence.

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
            For a masked language model (BERT), the scores of the token itself.

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
        checked = check_ids(self.spec, ids, room=0)
        if not self.spec.head:
            raise UsageError(
                f"{self.spec.name} is an encoder without a head, and gives no logits; use hidden() "
                "or embed()"
            )
        types = check_types(self.spec, token_types, len(checked))
        for_encoder = check_encoder_ids(self.spec, encoder_ids)
        return self._outputs([checked], "logits", _only(types), _only(for_encoder))[0]

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
        checked = check_ids(self.spec, ids, room=0)
        types = check_types(self.spec, token_types, len(checked))
        for_encoder = check_encoder_ids(self.spec, encoder_ids)
        return self._outputs([checked], "y", _only(types), _only(for_encoder))[0]

    def _outputs(
        self,
        sequences: list[list[int]],
        name: str,
        types: list[list[int]] | None = None,
        encoder_ids: list[list[int]] | None = None,
    ) -> list[NDArray[np.float32]]:
        with self.lock.held():
            self.check_free()
            results: list[NDArray[np.float32]] = self.call(
                "sequences", "outputs", sequences, name, types, encoder_ids
            )[0]
        return results

    def embed(
        self,
        ids: Sequence[int] | NDArray[Any],
        token_types: Sequence[int] | NDArray[Any] | None = None,
        *,
        pooling: str = "mean",
        normalize: bool = True,
    ) -> NDArray[np.float32]:
        """Return one vector for a text: its hidden states, pooled.

        Parameters
        ----------
        ids : array of int, shape (T,)
            Token ids with the special tokens the model was trained with.
        token_types : array of int, shape (T,), optional
            As in `hidden`.
        pooling : {"mean", "first", "last"}
            The mean over all tokens (sentence-transformers), or the first or last token alone.
        normalize : bool
            Whether the vector is divided by its length.

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
        """Return one vector for each of several texts; each is what `embed` gives for it alone.

        Texts run together as far as a step has room.
        """
        requests = self.embedding_requests(
            sequences, token_types, pooling=pooling, normalize=normalize
        )
        for _ in LLM.run_requests(self, requests, BATCH_MULTI_STEP_S):  # of replicas each does all
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
        """Return a request for each of several texts; parameters as of `embed_batch`.

        When such a request has ended, its vector is in `Request.vector`.
        """
        return embedding_requests(self.spec, sequences, token_types, pooling, normalize)

    def session(self) -> SequenceEvaluator:
        """Return a `SequenceEvaluator`: sequences that are run, copied and cut step by step."""
        with self.lock.held():
            self.check_free()
            self.lock.configure()
        return SequenceEvaluator(self)

    # ---- generation ---------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int] | NDArray[Any],
        max_tokens: int = SamplingParams.max_tokens,
        decoding: str | Strategy = "greedy",
        seed: int = SamplingParams.seed,
        ignore_eos: bool = SamplingParams.ignore_eos,
        decoder_ids: Sequence[int] | None = None,
        **parameters: Any,
    ) -> RequestOutput:
        """Continue a prompt.

        Parameters
        ----------
        prompt : str or sequence of int
            Text, or token ids.  Text gets the special tokens the tokenizer puts in front.
        max_tokens : int
            At most this many new tokens.
        decoding : str or Strategy
            Name of a strategy, or "auto" for the one that the parameters mean; docs/decoding.md.
        seed : int
            Seed of the draws.
        ignore_eos : bool
            Go on when an end token is drawn.
        decoder_ids : sequence of int, optional
            For a model with an encoder, which reads the prompt: the first tokens of the decoder,
            e.g. the start token and a language's; by default the start token.
        **parameters
            Fields of `nbflow.SamplingParams`, e.g. ``temperature=0.8, stop=["END"]``; those
            not given are what the model recommends (`defaults`), or else the strategy's own.
            ``draft`` is a smaller model with the same vocabulary, or "ngram": its proposals are
            verified, `n_draft` (5) at a time, and the result is the same without; with
            ``draft_verify="chain"`` its distribution is.
            "beam" and "contrastive" take the parameters of `nbflow.beam_search` and
            `nbflow.contrastive_search`.

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
        decoding: str | Strategy = "greedy",
        seed: int = SamplingParams.seed,
        ignore_eos: bool = SamplingParams.ignore_eos,
        decoder_ids: Sequence[int] | None = None,
        n: int = 1,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """Continue several prompts together; each gets the result it would get alone.

        With `n` each prompt gets so many continuations, one after the other in the result, which
        share the full pages of the prompt.  The i-th continuation of all draws with ``seed + i``;
        otherwise as `generate`.
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
        decoding: str | Strategy = "greedy",
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
        yield from request.ids[n:]  # what came while another stream was read

    def make_request(
        self,
        prompt: str | Sequence[int] | NDArray[Any],
        max_tokens: int = SamplingParams.max_tokens,
        decoding: str | Strategy | Search = "greedy",
        seed: int = SamplingParams.seed,
        ignore_eos: bool = SamplingParams.ignore_eos,
        decoder_ids: Sequence[int] | None = None,
        draft: Draft | None = None,
        n_draft: int = SpeculativeConfig.n_draft,
        draft_verify: str = SpeculativeConfig.draft_verify,
        **parameters: Any,
    ) -> Request:
        """Return a checked request; parameters as in `generate`.

        `decoding` may also be a search, `nbflow.sampling.BeamSearch` or `ContrastiveSearch`; the
        first takes no `stop` texts, and neither takes a draft or parameters of strategies.
        """
        params = sampling_params(max_tokens, decoding, seed, ignore_eos, parameters)
        request = validate_request(
            self, prompt, params, decoding, decoder_ids, drafted=draft is not None
        )
        if draft is not None:
            attach(draft, self, request, n_draft, draft_verify)
        return request

    def run_requests(
        self,
        requests: list[Request],
        burst_s: float = STREAM_MULTI_STEP_S,
        share_prompts: bool = False,
    ) -> Iterator[list[tuple[int, TokenOutput]]]:
        """Run requests to their end, yielding new tokens as they come.

        Each item is a list of (index of the request, token) of a step, or of as many steps as
        fit into `burst_s` seconds.  Longer bursts are faster: Python works once for each.  With
        `share_prompts` requests that begin alike share pages, as in `nbflow.LLMEngine`, unless others
        run already without.
        """
        return self.lock.run(requests, burst_s, share_prompts)

    def proposed(self) -> Proposals | None:
        """Return what draft models propose for the next step, the same on every rank."""
        first = self.workers[0]
        running = first.scheduler.running
        if not any(r.n_proposed and r.proposer is None for r in running):
            return None
        found = proposals(running, first.scheduler.max_step_tokens) if self.leads else None
        if not self.ranks_are_threads and self.engine is None:  # an engine tells the others itself
            found = first.comm.bcast_object(found)
        return found

    def generation(self, request: Request) -> RequestOutput:
        """Return what a request that has ended came to."""
        return RequestOutput.of(request, text_of(request, self._tokenizer))

    def generations(self, request: Request) -> list[RequestOutput]:
        """Return all that the search of a request has found, best first; else its continuation."""
        one = self.generation(request)
        return [
            one.replaced(found, request.stop_ids, self._tokenizer) for found in request.found
        ] or [one]

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: the checkpoint's and the tokenizer's."""
        # a GGUF file states one; its vocabulary knows the end of a turn, too
        known = () if self._tokenizer is None else self._tokenizer.eos_ids
        return (*self.spec.eos_token_ids, *known)

    @property
    def optional_tokenizer(self) -> Tokenizer | None:
        """The tokenizer if there is one."""
        return self._tokenizer

    # ---- what it holds and what it sent -------------------------------------------------------

    def memory(self) -> list[dict[str, int]]:
        """Return, for each rank of the plan, the bytes it holds and the peak of its process."""
        return self.gather("memory")

    def reset_traffic(self) -> None:
        """Count the bytes sent between ranks from here on."""
        self.call("reset_traffic")

    def traffic(self) -> dict[str, int]:
        """Return the bytes sent by all ranks since `reset_traffic`, measured and predicted."""
        ranks = self.gather("traffic")
        return {key: sum(r[key] for r in ranks) for key in ("measured_bytes", "predicted_bytes")}

    def exchange_error(self) -> float:
        """Return how much of the partial sums ``exchange="q8"`` has rounded off, relative RMS.

        The largest of all ranks, over everything since the first such exchange; 0 without any.
        """
        return max(float(rank["rounding_error"]) for rank in self.gather("exchange_error"))

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

        Other threads wait for it.  Each rank gets a copy of a request that is submitted.
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
    """Return what belongs to the only one of a list of sequences."""
    return None if ids is None else [ids]
