"""Request validation: token ids, sampling parameters, and the fields of a `Request`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.engine.decoder_prompt import decoder_prompt, refuse_decoder_options
from nbflow.engine.interfaces import ModelInfo
from nbflow.engine.pooling import POOLINGS, Pooling
from nbflow.engine.request import Request
from nbflow.engine.search import Search
from nbflow.engine.search.api import check_search
from nbflow.options import SamplingParams
from nbflow.sampling import (
    Greedy,
    Strategy,
    build_strategy,
    end_ids,
    implied_decoding,
    with_recommended,
)
from nbflow.sampling.logits_processors import LogitsProcessors, check_token_ids, constrain
from nbflow.spec.model_spec import ModelSpec
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError, unknown_name


def check_ids(spec: ModelSpec, ids: Sequence[int] | NDArray[Any], room: int) -> list[int]:
    """Return valid token ids that leave `room` tokens of the context."""
    array = np.asarray(ids)
    if array.size == 0:
        raise UsageError("the prompt is empty; it must have at least one token", "prompt")
    if array.ndim == 1 and array.dtype.kind in "fO":  # also whole numbers beyond 64 bits
        for i in ids:
            if type(i) is int and not 0 <= i < 2**63:
                raise _unknown_id(spec, i)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            f"token ids must be a non-empty sequence of integers, got shape {array.shape} "
            f"of {array.dtype}",
            "prompt",
        )
    if array.size + room > spec.max_context:
        more = f" (and {room} more to generate)" if room else ""
        raise UsageError(
            f"the prompt has {array.size} tokens{more}, but the context of {spec.name} "
            f"holds {spec.max_context}; shorten it",
            "prompt",
        )
    if array.min() < 0 or array.max() >= spec.vocab_size:
        raise _unknown_id(spec, int(array[(array < 0) | (array >= spec.vocab_size)][0]))
    return [int(i) for i in array]


def _unknown_id(spec: ModelSpec, token: int) -> UsageError:
    return UsageError(
        f"token id {shown(token)} is outside the vocabulary of {spec.name}, "
        f"0..{spec.vocab_size - 1}",
        "prompt",
    )


def check_encoder_ids(
    spec: ModelSpec, ids: Sequence[int] | NDArray[Any] | None
) -> list[int] | None:
    """Return valid encoder token ids; None for a model without encoder."""
    if spec.encoder is None:
        if ids is not None:
            raise UsageError(f"{spec.name} has no encoder; leave encoder_ids out")
        return None
    if ids is None:
        raise UsageError(f"{spec.name} has an encoder; give its token ids as encoder_ids")
    return check_ids(spec.encoder, ids, room=0)


def check_types(
    spec: ModelSpec, types: Sequence[int] | NDArray[Any] | None, n: int
) -> list[int] | None:
    """Return valid types of `n` tokens, or None."""
    if types is None:
        return None
    array = np.asarray(types)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise UsageError(
            f"token_types must be {n} integers, one per token, got shape {array.shape} of "
            f"{array.dtype}"
        )
    most = spec.type_vocab_size
    if most == 0 or array.min() < 0 or array.max() >= most:
        raise UsageError(
            f"{spec.name} has {most} token types; token_types must lie below, got "
            f"{int(array.min())}..{int(array.max())}"
        )
    return [int(t) for t in array]


def check_request(spec: ModelSpec, request: Request) -> None:
    """Raise `UsageError` if a field of a request is invalid.

    Requests share steps, so a bad field must not reach the scheduler or the sampler, also where
    the caller has set it on the `Request`.
    """
    for name, low, high in (
        ("max_tokens", 0, 2**31 - 1),
        ("seed", 0, 2**64 - 1),
        ("priority", -(2**31), 2**31 - 1),
        ("n_top_logprobs", 0, spec.vocab_size),
        ("n_proposed", 0, 2**20),
        ("prompt_logprobs", 0, spec.vocab_size),
    ):
        value = getattr(request, name)
        if value is None and name == "prompt_logprobs":
            continue
        if not isinstance(value, (int, np.integer)) or not low <= value <= high:
            raise UsageError(f"{name} must be a whole number in {low}..{high}, got {value!r:.40}")
    deadline = request.deadline
    if deadline is not None and not isinstance(deadline, (int, float)):
        raise UsageError(f"deadline must be a number of seconds or None, got {deadline!r:.40}")
    if not isinstance(request.cache_salt, str):
        raise UsageError(f"cache_salt must be a text, got {request.cache_salt!r:.40}")
    check_ids(spec, request.prompt, room=0)
    if request.encoder_ids is not None and spec.encoder is not None:
        check_ids(spec.encoder, request.encoder_ids, room=0)
    check_token_ids("stop_ids", request.stop_ids, spec.vocab_size)


def embedding_requests(
    spec: ModelSpec,
    sequences: Sequence[Sequence[int] | NDArray[Any]],
    types: Sequence[Sequence[int] | NDArray[Any]] | None,
    pooling: str,
    normalize: bool,
) -> list[Request]:
    """Return a pooling request for each text; parameters as in `LLM.embed_batch`."""
    if spec.encoder is not None:
        raise UsageError(f"{spec.name} has an encoder and a decoder; use hidden()")
    if pooling not in POOLINGS:
        raise unknown_name("pooling", pooling, POOLINGS, "pooling")
    texts = [check_ids(spec, ids, room=0) for ids in sequences]
    if types is not None and len(types) != len(texts):
        raise UsageError(
            f"token_types must be given for each of the {len(texts)} texts, got {len(types)}"
        )
    requests = []
    for i, ids in enumerate(texts):
        some = None if types is None else check_types(spec, types[i], len(ids))
        request = Request(ids, 0, Greedy(), wants_logprobs=False)
        request.pooling = Pooling(pooling, normalize, not spec.causal, some)
        requests.append(request)
    return requests


def sampling_params(
    max_tokens: int,
    decoding: str | Strategy | Search | None,
    seed: int,
    ignore_eos: bool,
    parameters: Mapping[str, Any],
) -> SamplingParams:
    """Return the keyword arguments of `LLM.generate` as `SamplingParams`."""
    if decoding is None:
        decoding = implied_decoding(name for name, v in parameters.items() if v is not None)
    named = decoding if isinstance(decoding, str) and decoding != "auto" else None
    params = SamplingParams.parse(
        {
            **parameters, "max_tokens": max_tokens, "decoding": named, "seed": seed,
            "ignore_eos": ignore_eos,
        }
    )  # fmt: skip
    if params.n != 1:
        raise UsageError("n is an argument of generate_batch; submit n requests instead")
    return params


def validate_request(
    model: ModelInfo,
    prompt: str | Sequence[int] | NDArray[Any],
    params: SamplingParams,
    decoding: str | Strategy | Search | None = None,
    decoder_ids: Sequence[int] | None = None,
    *,
    drafted: bool = False,
) -> Request:
    """Return a request with these parameters; `drafted` is True with a draft model."""
    _check_generates(model.spec)
    if decoding is None or isinstance(decoding, (str, Strategy)):
        chosen: Strategy | Search = build_strategy(
            params, model.spec.vocab_size, model.optional_tokenizer, model.end_ids,
            with_recommended({"decoding": params.decoding}, model.defaults),
            decoding if isinstance(decoding, Strategy) else None,
        )  # fmt: skip
    else:
        check_search(decoding, params, drafted)
        chosen = decoding
    return build_request(model, prompt, params, chosen, decoder_ids)


def build_request(
    model: ModelInfo,
    prompt: str | Sequence[int] | NDArray[Any],
    params: SamplingParams,
    strategy: Strategy | Search,
    decoder_ids: Sequence[int] | None = None,
) -> Request:
    """Return a request with a strategy that has its logits processors already."""
    spec = model.spec
    _check_generates(spec)
    ends = frozenset(end_ids(params, model.end_ids, spec.vocab_size))
    search = None if isinstance(strategy, Strategy) else strategy
    drawn = strategy if isinstance(strategy, Strategy) else Greedy()
    if spec.banned_token_ids:
        drawn = constrain(drawn, LogitsProcessors(banned_token_ids=spec.banned_token_ids))
    if params.stop_texts:
        _ = model.tokenizer  # raises without one: stop texts need it
    if isinstance(prompt, str):
        prompt = model.tokenizer.encode(prompt, add_special_tokens=True)
    encoder_ids, forced = None, None
    if spec.encoder is not None:
        found = decoder_prompt(model, params, check_ids(spec.encoder, prompt, 0), decoder_ids)
        encoder_ids = check_encoder_ids(spec, found.encoder_ids)
        prompt, forced = found.ids, found.forced_bos_id
    elif decoder_ids is not None:
        raise UsageError(
            f"{spec.name} has no encoder; give all tokens as the prompt, without decoder_ids"
        )
    else:
        refuse_decoder_options(spec, params)
    ids = check_ids(spec, prompt, room=1)
    most = min(params.max_tokens, spec.max_context - len(ids))
    forced_ends = () if params.ignore_eos else spec.forced_eos_ids
    if forced_ends and search is None and most:
        most -= 1  # the last token would be an end token
    request = Request(ids, most, drawn, params.seed % 2**64, ends, encoder_ids)
    request.forced_bos_id, request.forced_eos_ids = forced, forced_ends
    request.search = search
    request.banned_ids = frozenset(spec.banned_token_ids)
    request.n_top_logprobs = min(params.logprobs or 0, spec.vocab_size)
    if params.prompt_logprobs is not None:
        request.prompt_logprobs = min(params.prompt_logprobs, spec.vocab_size)
    request.stop_texts = params.stop_texts
    request.include_stop_text = params.include_stop_str_in_output
    return request


def _check_generates(spec: ModelSpec) -> None:
    if not spec.causal or not spec.head:
        raise UsageError(
            f"{spec.name} is an encoder and cannot continue a text; use hidden(), "
            "embed(), logits() or fill_mask()"
        )
