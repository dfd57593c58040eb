"""From sampling parameters to a request, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from nbflow.engine.interfaces import ModelInfo
from nbflow.engine.request import Request
from nbflow.engine.request_validation import check_encoder_ids, check_ids
from nbflow.engine.search import Search
from nbflow.engine.search.api import check_search
from nbflow.options import SamplingParams
from nbflow.sampling import Greedy, Strategy, build_strategy, end_ids
from nbflow.sampling.logits_processors import LogitsProcessors, constrain
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError


def sampling_params(
    max_tokens: int,
    decoding: str | Strategy | Search,
    seed: int,
    ignore_eos: bool,
    parameters: Mapping[str, Any],
) -> SamplingParams:
    """Return the parameters of `LLM.generate` as one object."""
    named = decoding if isinstance(decoding, str) and decoding != "auto" else None
    params = SamplingParams.parse(
        {
            **parameters, "max_tokens": max_tokens, "decoding": named, "seed": seed,
            "ignore_eos": ignore_eos,
        }
    )  # fmt: skip
    if params.n != 1:
        raise UsageError("n belongs to generate_batch; submit as many requests as are wanted")
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
    """Return a request with these parameters; `drafted` says that it will have draft tokens."""
    _check_generates(model.spec)
    if decoding is None or isinstance(decoding, (str, Strategy)):
        chosen: Strategy | Search = build_strategy(
            params, model.spec.vocab_size, model.found_tokenizer, model.end_ids, model.defaults,
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
    """Return a request whose strategy, with its constraints, has been made before."""
    spec = model.spec
    _check_generates(spec)
    ends = frozenset(end_ids(params, model.end_ids, spec.vocab_size))
    search = None if isinstance(strategy, Strategy) else strategy
    drawn = strategy if isinstance(strategy, Strategy) else Greedy()
    if spec.banned_token_ids:
        drawn = constrain(drawn, LogitsProcessors(banned_token_ids=spec.banned_token_ids))
    if params.stop_texts:
        _ = model.tokenizer  # raises now if stop texts cannot be found without one
    if isinstance(prompt, str):
        prompt = model.tokenizer.encode(prompt, add_special_tokens=True)
    encoder_ids = None
    if spec.encoder is not None:
        encoder_ids = check_encoder_ids(spec, prompt)
        prompt = _decoder_prompt(spec, decoder_ids)
    elif decoder_ids is not None:
        raise UsageError(
            f"{spec.name} has no encoder; give all tokens as the prompt, without decoder_ids"
        )
    ids = check_ids(spec, prompt, room=1)
    most = min(params.max_tokens, spec.max_context - len(ids))
    request = Request(ids, most, drawn, params.seed % 2**64, ends, encoder_ids)
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
            f"{spec.name} is an encoder and cannot continue a text; use hidden(), embed() "
            "or logits()"
        )


def _decoder_prompt(spec: ModelSpec, decoder_ids: Sequence[int] | None) -> Sequence[int]:
    """Return the first tokens of the decoder."""
    if decoder_ids is not None:
        return decoder_ids
    if spec.decoder_start_id is None:
        raise UsageError(
            f"the configuration of {spec.name} has no decoder_start_token_id; give the "
            "decoder's first tokens as decoder_ids"
        )
    return [spec.decoder_start_id]
