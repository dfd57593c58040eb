"""Served model: engine, names, and tokenization of prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbflow
from nbflow.engine.detokenizer import IncrementalDetokenizer
from nbflow.sampling import of_other_strategies, with_recommended
from nbflow.server.bounds import MIN_PROMPT_BYTES
from nbflow.server.config import ModelOptions
from nbflow.server.errors import ApiError
from nbflow.server.token_text import NoText, TokenTexts
from nbflow.tokenization import Tokenizer
from nbflow.tokenization.chat import (
    encode_chat,
    encode_pair,
    format_chat,
    uses_query_template,
)
from nbflow.tokenization.token_bytes import vocabulary_bytes
from nbflow.tokenization.tokenizer_config import read_template
from nbflow_kernels.errors import UsageError, unknown_name


class ServedModel:
    """A model with its engine under the name that clients use.

    `options` are those of its section ``[models.NAME]``; `engine` has been started; `draft` is a
    model or "ngram".
    """

    def __init__(
        self,
        name: str,
        options: ModelOptions,
        model: nbflow.LLM,
        engine: nbflow.LLMEngine,
        draft: nbflow.LLM | str | None = None,
    ) -> None:
        self.name = name
        self.options = options
        self.model = model
        self.engine = engine
        self.draft = draft
        self.created = int(time.time())
        self.defaults = with_recommended(options.defaults, model.defaults)
        """Sampling parameters of requests that do not state them."""
        try:
            self.tokenizer: Tokenizer | None = model.tokenizer
        except UsageError:
            self.tokenizer = None
        self.end_ids = model.end_ids
        """Tokens that end a continuation."""
        self.spell = TokenTexts(self.tokenizer)
        self.max_prompt_bytes = self._max_prompt_bytes()
        """Longest text to tokenize: more bytes cannot fit the context."""
        stated = options.chat_template
        self._template = None if stated is None else template_text(stated)

    def defaults_with(self, decoding: str | None) -> dict[str, Any]:
        """Return the defaults of a request with another strategy than `defaults` have.

        With None, its parameters choose the strategy, and the defaults have none for it.
        """
        stated: dict[str, Any] = {**self.options.defaults, "decoding": decoding}
        if decoding is None:
            chosen = of_other_strategies(stated, "greedy") | {"decoding"}
            stated = {name: value for name, value in stated.items() if name not in chosen}
        return with_recommended(stated, self.model.defaults)

    @property
    def generates(self) -> bool:
        """True for a decoder with an output head; False for an encoder."""
        return self.model.spec.causal and self.model.spec.head

    def _max_prompt_bytes(self) -> int:
        """Return max_context times the longest token in bytes, at least `MIN_PROMPT_BYTES`."""
        if self.tokenizer is None:
            return MIN_PROMPT_BYTES
        longest = max((len(text) for text in vocabulary_bytes(self.tokenizer) if text), default=1)
        return max(MIN_PROMPT_BYTES, self.model.spec.max_context * longest)

    def check_size(self, text: str, param: str) -> str:
        """Return the text; raise `ApiError` if it exceeds `max_prompt_bytes`."""
        size = len(text) if text.isascii() else len(text.encode())
        if size > self.max_prompt_bytes:
            raise ApiError(
                400,
                f"{param} has {size:,} bytes, and at most {self.max_prompt_bytes:,} can fit the "
                f"context of {self.model.spec.max_context:,} tokens; shorten it",
                param=param,
            )
        return text

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], template: str | None, **more: Any
    ) -> list[int]:
        """Return the token ids of a conversation."""
        chosen = self._chosen(template)
        return encode_chat(
            self.model.tokenizer, flat(messages), chosen, max_bytes=self.max_prompt_bytes, **more
        )

    def continues(self, messages: Sequence[Mapping[str, Any]], template: str | None) -> bool:
        """Return True if a ``{query}`` template makes the last message the start of the answer."""
        if not messages or messages[-1].get("role") != "assistant":
            return False
        if self.model.spec.encoder is not None:  # the decoder's own text
            return True
        return uses_query_template(self.model.tokenizer, self._chosen(template))

    @property
    def has_template(self) -> bool:
        """True if there is a chat template, the configuration's or the model's."""
        own = self.tokenizer
        return self._template is not None or (
            own is not None and bool(own.chat_templates or own.prompt_template is not None)
        )

    def turn_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str | None,
        encoder_template: str | None = None,
        **more: Any,
    ) -> tuple[list[int], list[int] | None]:
        """Return the token ids of a conversation, and the decoder's of a model with an encoder.

        `template` is then the decoder's; None stands for the model's own templates.
        """
        spec, of_encoder = self.model.spec, encoder_template or self.options.encoder_template
        own = self.model.tokenizer
        if of_encoder is not None and spec.encoder is None:
            raise UsageError(f"{self.name} has no encoder; leave the encoder's template out")
        has_one = own.chat_templates or own.prompt_template or self._template
        if spec.encoder is None or (of_encoder is None and has_one):
            return self.chat_ids(messages, template, **more), None
        return encode_pair(
            own, flat(messages), of_encoder, template or self.options.decoder_template,
            start=spec.decoder_start_id, max_bytes=self.max_prompt_bytes,
        )  # fmt: skip

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], template: str | None, **more: Any
    ) -> str:
        """Return a conversation as prompt text."""
        chosen = self._chosen(template)
        return format_chat(self.model.tokenizer, flat(messages), chosen, **more)

    def _chosen(self, template: str | None) -> str | None:
        """Return the chat template to use; None for the model's own."""
        chosen = template or self._template
        if chosen is None and not self.has_template:
            raise UsageError(
                f"{self.name} comes with no chat template; use /v1/completions, or start the "
                "server with one (--chat-template, chat_template)"
            )
        return chosen

    def text_stream(self, before: Sequence[int] = ()) -> IncrementalDetokenizer | NoText:
        """Return the detokenizer of new tokens after those `before`."""
        return (
            NoText()
            if self.tokenizer is None
            else IncrementalDetokenizer(self.tokenizer, prompt_ids=before)
        )

    def card(self, name: str) -> dict[str, Any]:
        """Return the entry in /v1/models."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "nbflow",
            "root": self.name,
            "max_model_len": self.model.spec.max_context,
        }


class Models:
    """Models of a server by name and alias.

    Unless `strict`, a single model answers to every name.
    """

    def __init__(self, served: Sequence[ServedModel], strict: bool = False) -> None:
        self.all = list(served)
        self._any_name = len(self.all) == 1 and not strict
        self.by_name = {name: s for s in served for name in (s.name, *s.options.aliases)}

    def find(self, name: str | None) -> ServedModel:
        """Return the model for a name, or the first one; raise `ApiError` 404."""
        if name is None or self._any_name:
            return self.all[0]
        return self.named(name)

    def named(self, name: str) -> ServedModel:
        """Return the model of exactly that name; raise `ApiError` 404."""
        if name not in self.by_name:
            message = str(unknown_name("model", name[:200], self.by_name))
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.by_name[name]

    def shown(self, name: str | None, served: ServedModel) -> str:
        """Return the name in a response: the request's, if it is one of the model's."""
        return served.name if name is None or name not in self.by_name else name

    def generating(self, name: str | None) -> ServedModel:
        """Return the model of that name; raise `ApiError` 400 for an encoder."""
        served = self.find(name)
        if not served.generates:
            raise ApiError(
                400,
                f"{served.name} is an encoder and continues no text; use /v1/embeddings, "
                "/fill-mask or /classify",
                param="model",
            )
        return served


def template_text(stated: str) -> str:
    """Return the content of a template file; a name or text unchanged."""
    is_file = "\n" not in stated and "{" not in stated and Path(stated).is_file()
    return read_template(Path(stated)) if is_file else stated


def flat(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with content lists joined into text, one line for each part."""
    return [
        {**m, "content": _joined(m["content"], f"messages[{i}].content")}
        if isinstance(m.get("content"), list)
        else dict(m)
        for i, m in enumerate(messages)
    ]


def _joined(parts: Sequence[Any], where: str) -> str:
    texts = []
    for j, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text") or not isinstance(text, str):
            raise UsageError(
                f'{where}[{j}] must be {{"type": "text", "text": ...}}, got {kind or part!r:.80}; '
                "only text is offered"
            )
        texts.append(text)
    return "\n".join(texts)
