"""Request bodies: OpenAI's fields, with extensions of vLLM and llama.cpp.

Sampling parameters are the fields of `nbflow.options`.  Unknown fields are refused, never ignored.
An unsupported field of another API is refused with an alternative, unless its value is neutral
(``tools: []``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    create_model,
    model_validator,
)

from nbflow.option_fields import aliases, fields
from nbflow.options import SamplingParams, SearchParams
from nbflow.server.bounds import OutOfBounds, check_field
from nbflow.server.option_models import http_fields, http_option, out_of_bounds
from nbflow_kernels.errors import unknown_name

_NO_TOOLS = (
    "tools are not offered; describe them in a message, and use response_format with a schema"
)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((False, True), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "suffix": (("",), "text between two others is not offered; use prompt"),
    "modalities": ((["text"],), "only text is offered"),
    "audio": ((), "only text is offered"),
    "prediction": ((), "predicted output is not offered"),
    "web_search_options": ((), "the server searches nothing"),
    "reasoning_effort": (
        (),
        "write it into chat_template_kwargs, if the model's template takes it",
    ),
    "verbosity": ((), "write it into a message"),
    "service_tier": (("auto", "default"), "there is one tier; use priority"),
    "store": ((False,), "nothing is stored"),
    "metadata": (({},), "nothing is stored"),
    "moderation": ((), "moderation is not offered"),
    "safety_identifier": ((), "use user, which is written to the log"),
    "prompt_cache_key": ((), "prompts share their beginnings anyway; use cache_salt to keep apart"),
    "prompt_cache_retention": ((), "prompts share their beginnings while there is room"),
    "num_beams": ((1,), "use use_beam_search and beam_width"),
    "lora": (([],), "adapters are not offered; merge them into the checkpoint"),
    "cache_prompt": ((True,), "the prefix cache is an option of the server"),
    "n_probs": ((0,), "use logprobs"),
    "tfs": ((), "use tfs_z"),
    "echo_prompt": ((False,), "use echo"),
    "mm_processor_kwargs": ((), "only text is offered"),
    "kv_transfer_params": ((), "the cache is not moved between servers"),
    "logits_processors": (([],), "code is not taken from requests"),
    "truncate_prompt_tokens": ((), "shorten the prompt; /tokenize counts its tokens"),
    "spaces_between_special_tokens": ((True, False), "special tokens are not part of the text"),
    "skip_special_tokens": (
        (True,),
        "special tokens are not part of the text; use return_token_ids",
    ),
    "return_tensors": ((), "use logprobs or prompt_logprobs"),
}
"""Unsupported field -> its neutral values, and the alternative to any other."""
_OF_FIELDS = {f.name: f.http_name or f.name for f in fields(SamplingParams).values()}
_ALIASES = {other: _OF_FIELDS[name] for other, name in aliases(SamplingParams).items()}
REFUSED |= {
    other: ((), f"use {name}")
    for other, name in _ALIASES.items()
    if other != name and other not in REFUSED
}


class Body(BaseModel):
    """Body of a request."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
    instead: ClassVar[dict[str, str]] = {}
    """Further unsupported fields -> the alternative."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Reject unknown fields; drop nulls."""
        return cls._known_fields(value) if isinstance(value, dict) else value

    @classmethod
    def _known_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that are not null; raise for an unknown one."""
        known, result = cls.names(), {}
        for name, given in value.items():
            if name in known:
                if given is not None:
                    cls._check(name, given)
                    result[name] = given
            elif given is None and name in REFUSED:
                continue
            else:
                cls._refuse(name, given)
        return result

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the fields in JSON."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def _check(cls, name: str, given: Any) -> None:
        """Raise if a field exceeds its limits or is not valid Unicode."""
        try:
            check_field(name, given)
        except OutOfBounds as error:
            raise out_of_bounds(str(error), error.where) from None

    @classmethod
    def _refuse(cls, name: str, given: Any) -> None:
        """Raise for an unsupported field unless its value is neutral."""
        if name in cls.instead:
            message = f"{name} is not a field here: {cls.instead[name]}"
        elif name in REFUSED:
            neutral, instead = REFUSED[name]
            if any(type(given) is type(n) and given == n for n in neutral):
                return
            message = f"{name} is not supported: {instead}"
        else:
            message = str(unknown_name("field", name[:100], cls.names()))
            raise out_of_bounds(message, name, "unknown_field")
        raise out_of_bounds(message, name, "refused_field")


class StreamOptions(Body):
    """Usage statistics in a stream."""

    include_usage: bool = False
    """Send a final chunk with token counts."""
    continuous_usage_stats: bool = False
    """Send token counts so far in every chunk."""


class JsonSchema(Body):
    """JSON schema with a name."""

    name: str = ""
    description: str = ""
    strict: bool = True
    """Ignored: the output always follows the schema."""
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """Output format: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "type json_schema requires json_schema, and other types exclude it"
            raise out_of_bounds(message, "json_schema")
        return self

    def structure(self) -> dict[str, Any]:
        """Return the constraint under its name in `SamplingParams`, or an empty mapping."""
        if self.type == "text":
            return {}
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return {"json_schema": schema}


class StructuredOutputs(Body):
    """Constraint of the output, as in vLLM: exactly one field is set."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def structure(self) -> dict[str, Any]:
        """Return the constraint under its name in `SamplingParams`."""
        given = {"json_schema": self.json_, "regex": self.regex, "choice": self.choice}
        given |= {"grammar": self.grammar}
        if self.json_object:
            given |= {"json_schema": given["json_schema"] or {"type": "object"}}
        return {kind: value for kind, value in given.items() if value is not None}


_TAKEN = {"tokenizer", "messages", "template", "tools", "documents", "parse_special"}
_TAKEN |= {"add_generation_prompt", "continue_final_message", "max_bytes", "self"}


def _free(variables: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(_TAKEN & set(variables))
    if taken:
        raise ValueError(f"{taken[0]} is not a variable for the template but a field of its own")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_free)]
"""Variables for a chat template."""

Text = Annotated[str | list[str] | list[int] | list[list[int]], SkipValidation]
"""Text, texts, token ids, or lists of token ids; `nbflow.server.bounds` checks the types."""


if TYPE_CHECKING:

    class _OptionFields(Body):
        def __getattr__(self, name: str) -> Any: ...

else:
    _OptionFields = create_model(
        "_OptionFields", __base__=Body, **http_fields(SamplingParams), **http_fields(SearchParams)
    )


class GenerationBody(_OptionFields):
    """Fields of all generation requests; absent ones take the model's defaults."""

    prompt_field: ClassVar[str] = "prompt"
    """Field of what is continued."""
    model: str | None = None
    """Name or alias of a model; by default the first one."""
    best_of: int | None = Field(default=None, ge=1)
    """Number of samples, of which the n with the highest mean log-probability are returned."""
    stream: bool = False
    """Send tokens as server-sent events as they are generated."""
    stream_options: StreamOptions | None = None
    use_beam_search: bool = False
    """Beam search with `beam_width` beams; results come at the end."""
    response_format: ResponseFormat | None = None
    """Text, JSON, or JSON of a schema."""
    structured_outputs: StructuredOutputs | None = None
    """JSON of a schema, a regular expression, a choice, or a grammar."""
    return_token_ids: bool = False
    """Send token ids besides the text."""
    return_tokens_as_token_ids: bool = False
    """Show tokens in log-probabilities as ``token_id:123``."""

    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Scheduling priority; smaller numbers go first."""
    cache_salt: str = Field(default="", max_length=256)
    """Salt of the prefix cache: only requests with the same salt share pages."""
    user: str | None = None
    """User name for the log."""
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,128}$")
    """Id of the request; by default a new one."""

    @model_validator(mode="after")
    def _fits(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise out_of_bounds("stream_options needs stream: true", "stream_options")
        if self.best_of is not None and self.best_of < self.n:
            message = f"best_of must be at least n = {self.n}, got {self.best_of}"
            raise out_of_bounds(message, "best_of")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            message = "best_of cannot be streamed: the best is known at the end"
            raise out_of_bounds(message, "best_of")
        return self

    def sampling_values(self) -> dict[str, Any]:
        """Return the given sampling parameters under their names in `SamplingParams`."""
        values = {
            known.name: getattr(self, known.http_name)
            for known in fields(SamplingParams).values()
            if known.http_name
        }
        if (n_top := self.n_top_logprobs) is not None:
            values["logprobs"] = n_top
        return {name: value for name, value in values.items() if value is not None}

    @property
    def n_drawn(self) -> int:
        """Number of samples for each prompt."""
        n: int = self.best_of or self.n
        return n

    @property
    def n_top_logprobs(self) -> int | None:
        """Number of alternatives with each token; None without log-probabilities."""
        return None

    @property
    def includes_usage(self) -> bool:
        """True for a stream that ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """True for a stream with token counts in every chunk."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class Conversation(Body):
    """Messages and the variables of their template."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """Conversation."""
    chat_template: str | None = None
    """Chat template instead of the model's, if the server allows it."""
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables for the template, e.g. enable_thinking."""
    add_generation_prompt: bool | None = None
    """Begin the assistant's answer; by default unless continue_final_message is true."""
    continue_final_message: bool = False
    """Continue the last message instead of answering it."""
    documents: list[dict[str, Any]] | None = None

    def variables(self) -> dict[str, Any]:
        """Return the arguments of `nbflow.tokenization.chat.format_chat`."""
        names = ("add_generation_prompt", "continue_final_message", "documents")
        return {**{name: getattr(self, name) for name in names}, **self.chat_template_kwargs}


class TemplateBody(Conversation):
    """Body of ``POST /apply-template``."""

    model: str | None = None


class ChatBody(GenerationBody, Conversation):
    """Body of ``POST /v1/chat/completions``."""

    max_completion_tokens: Annotated[
        int | None, http_option(SamplingParams, "max_tokens", "max_completion_tokens")
    ] = None
    """Newer name of max_tokens."""
    logprobs: bool = False
    top_logprobs: Annotated[int | None, http_option(SamplingParams, "logprobs", "top_logprobs")] = (
        None
    )
    prompt_field: ClassVar[str] = "messages"
    instead: ClassVar[dict[str, str]] = {"prompt": "use messages, or /v1/completions"}

    @model_validator(mode="after")
    def _chat(self) -> ChatBody:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            message = "max_tokens and max_completion_tokens differ; give one"
            raise out_of_bounds(message, "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise out_of_bounds("top_logprobs needs logprobs: true", "top_logprobs")
        if self.stream and self.prompt_logprobs is not None:
            raise out_of_bounds("prompt_logprobs cannot be streamed", "prompt_logprobs")
        return self

    @property
    def n_top_logprobs(self) -> int | None:
        """See `GenerationBody.n_top_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: Text
    logprobs: Annotated[int | None, http_option(SamplingParams, "logprobs", "logprobs")] = None
    echo: bool = False
    """Begin the text with the prompt, and logprobs with those of the prompt."""
    add_special_tokens: bool = True
    """Add the special tokens that the model was trained with, e.g. BOS."""

    instead: ClassVar[dict[str, str]] = {"messages": "use prompt, or /v1/chat/completions"}

    @property
    def n_top_logprobs(self) -> int | None:
        """See `GenerationBody.n_top_logprobs`."""
        return self.logprobs

    @model_validator(mode="after")
    def _completion(self) -> CompletionBody:
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs cannot be streamed; use echo and logprobs"
            raise out_of_bounds(message, "prompt_logprobs")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or token ids."""
        return split_texts(self.prompt)


class EmbeddingBody(Body):
    """Body of ``POST /v1/embeddings``."""

    model: str | None = None
    input: Text
    encoding_format: str = Field(default="float", pattern="^(float|base64)$")
    dimensions: int | None = Field(default=None, ge=1)
    """Size of the vectors; must be the model's."""
    pooling: str | None = None
    """mean, first or last; by default mean for encoders, last for decoders."""
    normalize: bool = True
    add_special_tokens: bool = True
    user: str | None = None
    """User name for the log."""

    instead: ClassVar[dict[str, str]] = {"messages": "use input", "prompt": "use input"}


class TokenizeBody(Body):
    """Body of ``POST /tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False
    """Encode the spelling of a special token in the text as that token."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    return_token_strs: bool = False
    """Send the tokens' spelling in the vocabulary besides their ids."""

    instead: ClassVar[dict[str, str]] = {"content": "use prompt", "text": "use prompt"}

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise out_of_bounds("give prompt or messages", "prompt")
        return self


class DetokenizeBody(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


def split_texts(given: Text) -> list[str | list[int]]:
    """Return a list of prompts, each as text or token ids."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]
