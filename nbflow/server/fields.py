"""The bodies of the OpenAI endpoints, with vLLM's and llama.cpp's names for what OpenAI lacks."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, SkipValidation, model_validator

from nbflow.server.body import Body, ResponseFormat, StreamOptions, StructuredOutputs

MAX_LOGPROBS = 20
_SEED = 2**63

_TAKEN = {"tokenizer", "messages", "template", "tools", "documents", "parse_special"}
_TAKEN |= {"add_generation_prompt", "max_bytes", "self"}


def _free(variables: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(_TAKEN & set(variables))
    if taken:
        raise ValueError(f"{taken[0]} is not a variable for the template but a field of its own")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_free)]
"""Variables for a chat template."""

Text = Annotated[str | list[str] | list[int] | list[list[int]], SkipValidation]
"""One text, several, the token ids of one, or of several; `nbflow.server.bounds` has checked it."""


class Sampling(Body):
    """How continuations are drawn; what is not stated is the model's default."""

    model: str | None = None
    """Name or alias of a model; without it the first one."""
    max_tokens: int | None = Field(default=None, ge=0)
    """Most new tokens; by default as many as the context has room for (16 for completions)."""
    n: int = Field(default=1, ge=1)
    """Continuations of each prompt; the i-th draws with seed + i."""
    best_of: int | None = Field(default=None, ge=1)
    """Draw so many and return the n with the highest log-probability per token."""
    stream: bool = False
    """Send the text as it comes, as server-sent events."""
    stream_options: StreamOptions | None = None
    seed: int | None = Field(default=None, ge=-_SEED, lt=2 * _SEED)
    """Seed of the draws; by default a new one each time."""

    decoding: str | None = None
    """Name of a strategy (docs/decoding.md); by default the parameters decide."""
    use_beam_search: bool = False
    """Follow several continuations and return the most probable; they come at the end."""
    beam_width: int | None = Field(default=None, ge=1, le=256)
    """How many are followed; by default n, and 4 where that is 1."""
    length_penalty: float | None = Field(default=None, ge=-100, le=100)
    """Of beam search: the log-probability is divided by the length to this power; 1 by default."""
    early_stopping: bool | Literal["never"] | None = None
    """Of beam search: when it ends, as in transformers."""
    penalty_alpha: float | None = Field(default=None, ge=0, le=1)
    """Contrastive search with this weight of likeness, over top_k (4) tokens."""

    temperature: float | None = Field(default=None, ge=0, le=1000)
    """Divides the logits; 0 takes the most probable token; 1 by default."""
    top_k: int | None = Field(default=None, ge=-1)
    """Draw from the k most probable tokens; 0 or -1 from all."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw from the most probable tokens that together have this probability."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Draw from tokens that are at least this times as probable as the most probable one."""
    typical_p: float | None = None
    tfs_z: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    samplers: str | list[str] | None = None
    """llama.cpp's samplers in order; the ones above and below belong to them."""
    min_keep: int | None = Field(default=None, ge=0)
    repeat_last_n: int | None = Field(default=None, ge=-1)
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None

    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    logit_bias: dict[str, float] | None = None
    """Token id -> what is added to its logit."""
    allowed_token_ids: list[int] | None = None
    """Draw from these tokens alone."""
    banned_token_ids: list[int] | None = None
    """Never draw these tokens."""
    bad_words: list[str] | None = None
    """Texts that must not be generated."""

    stop: str | list[str] | None = None
    """Texts at which the continuation ends."""
    stop_token_ids: list[int] | None = None
    """Tokens at which the continuation ends, beside the model's end tokens."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on when the model's end token is drawn."""
    min_tokens: int | None = Field(default=None, ge=0)
    """End tokens are not drawn before this many."""

    response_format: ResponseFormat | None = None
    """Text, JSON, or JSON of a schema."""
    structured_outputs: StructuredOutputs | None = None
    """JSON of a schema, a regular expression, a choice, or a grammar."""
    guided_json: dict[str, Any] | str | None = None
    """The answer is JSON of this schema."""
    guided_regex: str | None = None
    """The answer matches this regular expression."""
    guided_choice: list[str] | None = None
    """The answer is one of these."""
    guided_grammar: str | None = None
    """The answer follows this grammar."""

    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Log-probabilities of the prompt's tokens, with so many of the most probable ones."""
    return_token_ids: bool = False
    """Send token ids, too."""
    return_tokens_as_token_ids: bool = False
    """Spell tokens in log-probabilities as ``token_id:123``."""

    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Smaller numbers go first."""
    cache_salt: str = Field(default="", max_length=256)
    """Beginnings of prompts are shared only with requests of the same salt."""
    user: str | None = None
    """Written to the log."""
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,128}$")
    """Name of the request, instead of a new one."""

    @model_validator(mode="after")
    def _fits(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n = {self.n}, got {self.best_of}")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError("best_of cannot be streamed: the best is known at the end")
        if len(self.stops) > 64 or any(not s for s in self.stops):
            raise ValueError("stop must be at most 64 texts, none empty")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop texts as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def n_drawn(self) -> int:
        """Continuations of each prompt that are drawn."""
        return self.best_of or self.n

    @property
    def n_top_logprobs(self) -> int | None:
        """How many alternatives are wanted with each token; None without log-probabilities."""
        return None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatBody(Sampling):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """The conversation."""
    max_completion_tokens: int | None = Field(default=None, ge=0)
    """The newer name of max_tokens."""
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    chat_template: str | None = None
    """A template instead of the model's, if the server allows that."""
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables for the template, e.g. enable_thinking."""
    add_generation_prompt: bool = True
    documents: list[dict[str, Any]] | None = None

    instead: ClassVar[dict[str, str]] = {"prompt": "use messages, or /v1/completions"}

    @model_validator(mode="after")
    def _chat(self) -> ChatBody:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed")
        return self

    @property
    def n_top_logprobs(self) -> int | None:
        """See `Sampling.n_top_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Sampling):
    """The body of ``POST /v1/completions``."""

    prompt: Text
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    """Begin the text with the prompt; with logprobs, tell those of its tokens, too."""
    add_special_tokens: bool = True
    """Whether text gets the special tokens the model was trained with, e.g. BOS."""

    instead: ClassVar[dict[str, str]] = {"messages": "use prompt, or /v1/chat/completions"}

    @property
    def n_top_logprobs(self) -> int | None:
        """See `Sampling.n_top_logprobs`."""
        return self.logprobs

    @model_validator(mode="after")
    def _completion(self) -> CompletionBody:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed; use echo and logprobs")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids."""
        return split_texts(self.prompt)


class EmbeddingBody(Body):
    """The body of ``POST /v1/embeddings``."""

    model: str | None = None
    input: Text
    encoding_format: str = Field(default="float", pattern="^(float|base64)$")
    dimensions: int | None = Field(default=None, ge=1)
    """Must be the model's, if it is stated."""
    pooling: str | None = None
    """mean, first or last; by default mean for encoders, last for decoders."""
    normalize: bool = True
    add_special_tokens: bool = True
    user: str | None = None
    """Written to the log."""

    instead: ClassVar[dict[str, str]] = {"messages": "use input", "prompt": "use input"}


class TokenizeBody(Body):
    """The body of ``POST /tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False
    """Special tokens spelt out in the text are tokens."""
    add_generation_prompt: bool = True
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    return_token_strs: bool = False
    """Send how the vocabulary spells the tokens, too."""

    instead: ClassVar[dict[str, str]] = {"content": "use prompt", "text": "use prompt"}

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self


class DetokenizeBody(Body):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


class TemplateBody(Body):
    """The body of ``POST /apply-template``."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    add_generation_prompt: bool = True
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None


def split_texts(given: Text) -> list[str | list[int]]:
    """Return one text or several, or the ids of one or several, as a list."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]
