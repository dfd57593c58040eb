"""Inputs of encoder-decoder models: languages, the decoder's prompt and forced tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbflow.engine.interfaces import ModelInfo
from nbflow.options import DECODER_START, SamplingParams
from nbflow.spec.model_spec import ModelSpec
from nbflow.tokenization.languages import language_id, language_tokens, token_in_front
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class DecoderPrompt:
    """Token ids of both sides, and the forced first token of the answer."""

    encoder_ids: list[int]
    ids: list[int]
    forced_bos_id: int | None


def refuse_decoder_options(spec: ModelSpec, params: SamplingParams) -> None:
    """Raise `UsageError` for options of encoder-decoder models."""
    for name in DECODER_START:
        if getattr(params, name) is not None:
            raise UsageError(
                f"{spec.name} has no encoder and takes no {name}; write it into the prompt", name
            )


def decoder_prompt(
    model: ModelInfo,
    params: SamplingParams,
    encoder_ids: Sequence[int],
    decoder_ids: Sequence[int] | None = None,
) -> DecoderPrompt:
    """Return the inputs of an encoder-decoder model.

    The decoder begins with the start token, as in transformers' ``generate``; `decoder_prefix` or
    `decoder_ids` follow or replace it.  The forced first token (a target language) is generated, or
    part of the prompt where a prefix or a structure of the output follows.
    """
    spec = model.spec
    encoder_ids, start, forced = _with_languages(model, params, list(encoder_ids))
    if decoder_ids is not None:
        if params.target_lang is not None or params.decoder_prefix is not None:
            raise UsageError(
                "decoder_ids are the decoder's whole prompt; leave out target_lang and "
                "decoder_prefix, or decoder_ids"
            )
        return DecoderPrompt(
            encoder_ids, list(decoder_ids), forced if len(decoder_ids) == 1 else None
        )
    if start is None:
        raise UsageError(
            f"the configuration of {spec.name} has no decoder_start_token_id; give the "
            "decoder's first tokens as decoder_ids"
        )
    prefix = _prefix(model, params, start)
    if not prefix and params.structure is None:
        return DecoderPrompt(encoder_ids, [start], forced)
    is_stated = bool(prefix) and prefix[0] in model.tokenizer.special_tokens.values()
    between = [] if forced is None or is_stated else [forced]
    return DecoderPrompt(encoder_ids, [start, *between, *prefix], None)


def _with_languages(
    model: ModelInfo, params: SamplingParams, encoder_ids: list[int]
) -> tuple[list[int], int | None, int | None]:
    """Return the encoder's ids, the decoder's start token and its forced first token.

    Each model states the languages in its own place among them.
    """
    spec = model.spec
    start, forced = spec.decoder_start_id, spec.forced_bos_id
    if params.forced_bos_token_id is not None:
        forced = params.forced_bos_token_id
        if forced >= spec.vocab_size:
            raise UsageError(
                f"forced_bos_token_id must be 0..{spec.vocab_size - 1} for {spec.name}, got "
                f"{forced}",
                "forced_bos_token_id",
            )
    if params.source_lang is not None:
        source = language_id(model.tokenizer, params.source_lang, "source_lang")
        encoder_ids = _with_source(model, encoder_ids, source)
    if params.target_lang is None:
        return encoder_ids, start, forced
    if params.forced_bos_token_id is not None:
        raise UsageError("give one of target_lang and forced_bos_token_id", "target_lang")
    front = token_in_front(model.tokenizer, params.target_lang)
    if front is not None:
        return [front, *encoder_ids], start, forced
    target = language_id(model.tokenizer, params.target_lang, "target_lang")
    if start is not None and start in language_tokens(model.tokenizer).values():
        return encoder_ids, target, forced  # the first mBART: the language is the start token
    return encoder_ids, start, target


def _prefix(model: ModelInfo, params: SamplingParams, start: int) -> list[int]:
    """Return the ids of `decoder_prefix` without the start token."""
    if not params.decoder_prefix:
        return []
    ids = model.tokenizer.encode(params.decoder_prefix, parse_special=True)
    return ids[1:] if ids[:1] == [start] else ids


def _with_source(model: ModelInfo, ids: list[int], source: int) -> list[int]:
    """Return the encoder's ids with another source language, which is their first or last token."""
    known = set(language_tokens(model.tokenizer).values())
    if ids and ids[0] in known:
        return [source, *ids[1:]]
    if ids and ids[-1] in known:
        return [*ids[:-1], source]
    return [source, *ids]
