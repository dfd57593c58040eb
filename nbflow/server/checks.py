"""Checks of a model's default parameters and chat template before the first request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbflow.options import SamplingParams
from nbflow.quantization.policy import weight_formats
from nbflow.sampling import build_strategy, with_recommended
from nbflow.server.config import ModelOptions, ServerConfig
from nbflow.server.served_model import ServedModel, template_text
from nbflow.spec import ModelSpec, load_tokenizer, resolve
from nbflow.spec.kv_formats import parse_kv
from nbflow.tokenization import Tokenizer, load_tokenizer_file
from nbflow.tokenization.chat import check_template
from nbflow_kernels.errors import MissingExtraError, UsageError
from nbflow_kernels.plugins import load_plugins


def check_served(served: ServedModel) -> None:
    """Raise `UsageError` if requests without parameters could not be answered."""
    if served.generates:
        spec = served.model.spec
        _check_defaults(
            served.name, served.defaults, spec.vocab_size, served.tokenizer, served.end_ids
        )
    if served.tokenizer is not None:
        _check_templates(served.name, served.options, served.tokenizer, served.model.spec)


def check_config(config: ServerConfig) -> None:
    """Raise `UsageError` if the models of a configuration cannot be served, or keys are missing.

    Reads headers, configurations and tokenizers, but no weights.
    """
    config.auth.digests()
    load_plugins(config.plugins)
    for name, options in config.models.items():
        resolved = resolve(options.path, spec=options.spec)
        spec = resolved.spec
        formats = weight_formats(options.weights)
        if formats is not None:
            formats.check_used(spec.tensor_shapes(), f"models.{name}.weights")
        parse_kv(options.kv).check(spec.n_layers)
        tokenizer = _tokenizer(options, resolved.tokenizer)
        if tokenizer is not None and resolved.prompt_template is not None:
            tokenizer.prompt_template = resolved.prompt_template
        if spec.causal and spec.head:
            defaults = with_recommended(options.defaults, resolved.defaults)
            ends = (*spec.eos_token_ids, *(() if tokenizer is None else tokenizer.eos_ids))
            _check_defaults(name, defaults, spec.vocab_size, tokenizer, ends)
        if tokenizer is not None:
            _check_templates(name, options, tokenizer, spec)


def _tokenizer(options: ModelOptions, found: Path | None) -> Tokenizer | None:
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    try:
        return None if found is None else load_tokenizer_file(found)
    except MissingExtraError:
        return None


def _check_defaults(
    name: str,
    defaults: Mapping[str, Any],
    n_vocab: int,
    tokenizer: Tokenizer | None,
    end_ids: Sequence[int],
) -> None:
    """Build the strategy of a request without parameters."""
    try:
        given = dict(defaults) if "decoding" in defaults else {"temperature": 1.0, **defaults}
        params = SamplingParams.parse(given)
        build_strategy(params, n_vocab, tokenizer, end_ids)
    except UsageError as error:
        raise UsageError(f"model {name}: default parameters: {error}") from error


def _check_templates(
    name: str, options: ModelOptions, tokenizer: Tokenizer, spec: ModelSpec
) -> None:
    """Check the templates of a model's section."""
    if options.encoder_template is not None and spec.causal and spec.encoder is None:
        raise UsageError(f"model {name}: encoder_template: {spec.name} has no encoder; remove it")
    if options.decoder_template is not None and spec.encoder is None:
        raise UsageError(
            f"model {name}: decoder_template: {spec.name} has no encoder; use chat_template"
        )
    for key in ("chat_template", "encoder_template", "decoder_template"):
        stated = getattr(options, key)
        if stated is None:
            continue
        if key == "decoder_template" and "query}" not in stated:  # the encoder reads the query
            stated += "{query}"
        try:
            check_template(tokenizer, template_text(stated))
        except UsageError as error:
            raise UsageError(f"model {name}: {key}: {error}") from error
