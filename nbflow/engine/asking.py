"""From what a user asks for to a request, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from nbflow.decoding import Greedy, Parameters, Search, Strategy
from nbflow.decoding.constraints import Constraints, constrain
from nbflow.engine.interfaces import ModelInfo
from nbflow.engine.request import Request
from nbflow.engine.request_validation import check_encoder_ids, check_ids
from nbflow.engine.search import check_search
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError


def checked_request(
    model: ModelInfo,
    prompt: str | Sequence[int] | NDArray[Any],
    max_tokens: int,
    decoding: str | Strategy | Search,
    seed: int,
    ignore_eos: bool,
    decoder_ids: Sequence[int] | None,
    parameters: Mapping[str, Any],
    *,
    drafted: bool,
) -> Request:
    """Return a request; parameters as of `Model.generate`, `drafted` whether there is a draft."""
    if not model.spec.causal or not model.spec.head:
        raise UsageError(
            f"{model.spec.name} is an encoder and cannot continue a text; use hidden(), embed() "
            "or logits()"
        )
    named = decoding if isinstance(decoding, str) and decoding != "auto" else None
    searches = None if isinstance(decoding, (str, Strategy)) else decoding
    asked = Parameters.parse(
        {
            **parameters, "max_tokens": max_tokens, "decoding": named, "seed": seed,
            "ignore_eos": ignore_eos,
        }
    )  # fmt: skip
    if asked.n != 1:
        raise UsageError("n belongs to generate_batch; submit as many requests as are wanted")
    known = model.end_ids
    ends = frozenset(asked.end_ids(known, model.spec.vocab_size))
    if searches is None:
        strategy = asked.strategy(
            model.spec.vocab_size, model.found_tokenizer, known, model.defaults,
            decoding if isinstance(decoding, Strategy) else None,
        )  # fmt: skip
    else:
        check_search(searches, asked, drafted)
        strategy = Greedy()
    if model.spec.banned_token_ids:
        strategy = constrain(strategy, Constraints(banned_token_ids=model.spec.banned_token_ids))
    if asked.stop_texts:
        _ = model.tokenizer  # it is needed
    if isinstance(prompt, str):
        prompt = model.tokenizer.encode(prompt, add_special_tokens=True)
    encoder_ids = None
    if model.spec.encoder is not None:
        encoder_ids = check_encoder_ids(model.spec, prompt)
        prompt = _decoder_prompt(model.spec, decoder_ids)
    elif decoder_ids is not None:
        raise UsageError(
            f"{model.spec.name} has no encoder; give all tokens as the prompt, without decoder_ids"
        )
    ids = check_ids(model.spec, prompt, room=1)
    room = model.spec.max_context - len(ids)
    request = Request(ids, min(max_tokens, room), strategy, seed, ends, encoder_ids)
    request.search = searches
    request.banned_ids = frozenset(model.spec.banned_token_ids)
    request.n_top_logprobs = min(asked.logprobs or 0, model.spec.vocab_size)
    if asked.prompt_logprobs is not None:
        request.prompt_logprobs = min(asked.prompt_logprobs, model.spec.vocab_size)
    request.stop_texts = asked.stop_texts
    request.include_stop_text = asked.include_stop_str_in_output
    return request


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
