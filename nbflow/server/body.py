"""What requests are made of: fields are checked by name, and none is ignored.

A field that exists elsewhere and not here is refused with what to use instead, unless it says what
happens anyway (``tools: []``); so a client never gets something else than it asked for.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from nbflow.server.bounds import OutOfBounds, check_field
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
    "moderation": ((), "there is no moderation"),
    "safety_identifier": ((), "use user, which is written to the log"),
    "prompt_cache_key": ((), "prompts share their beginnings anyway; use cache_salt to keep apart"),
    "prompt_cache_retention": ((), "prompts share their beginnings while there is room"),
    "num_beams": ((1,), "use use_beam_search and beam_width"),
    "lora": (([],), "adapters are not offered; merge them into the checkpoint"),
    "cache_prompt": ((True,), "the prefix cache is an option of the server"),
    "n_predict": ((), "use max_tokens"),
    "n_probs": ((0,), "use logprobs"),
    "repeat_penalty": ((), "use repetition_penalty"),
    "typical": ((), "use typical_p"),
    "tfs": ((), "use tfs_z"),
    "continue_final_message": (
        (False,),
        "write the prompt with /apply-template and use /v1/completions",
    ),
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
"""Name of a field -> values that ask for nothing, and what to do instead of any other."""


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
    instead: ClassVar[dict[str, str]] = {}
    """More names that are refused, and what to use."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Refuse fields that there are not; drop those that are null."""
        if not isinstance(value, dict):
            return value
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
        """Return the names of the fields as clients write them."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def _check(cls, name: str, given: Any) -> None:
        """Raise if a field holds too much, or text that is not Unicode."""
        try:
            check_field(name, given)
        except OutOfBounds as error:
            raise _error("out_of_bounds", str(error), error.where) from None

    @classmethod
    def _refuse(cls, name: str, given: Any) -> None:
        """Raise, unless the field asks for nothing."""
        if name in cls.instead:
            message = f"{name} is not a field here: {cls.instead[name]}"
        elif name in REFUSED:
            neutral, instead = REFUSED[name]
            if any(type(given) is type(n) and given == n for n in neutral):
                return
            message = f"{name} is not supported: {instead}"
        else:
            message = str(unknown_name("field", name[:100], cls.names()))
            raise _error("unknown_field", message, name)
        raise _error("refused_field", message, name)


_Kind = Literal["unknown_field", "refused_field", "out_of_bounds"]


def _error(kind: _Kind, text: str, param: str) -> Exception:
    # pydantic wants valid Unicode, and would fill in braces in the text itself
    text, param = (t.encode("utf-8", "backslashreplace").decode() for t in (text, param[:100]))
    return PydanticCustomError(kind, "{text}", {"text": text, "param": param})


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = False
    """One more chunk at the end with the numbers of tokens."""
    continuous_usage_stats: bool = False
    """The numbers of tokens so far in every chunk."""


class JsonSchema(Body):
    """A JSON schema by the name it has with the client."""

    name: str = ""
    description: str = ""
    strict: bool = True
    """Accepted either way: the answer always follows the schema."""
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """What the answer is to be: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema, and must be there")
        return self

    def structure(self) -> dict[str, Any]:
        """Return the structure under its name in `nbflow.decoding.Parameters`, if there is one."""
        if self.type == "text":
            return {}
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return {"json_schema": schema}


class StructuredOutputs(Body):
    """One of these structures, as in vLLM."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def structure(self) -> dict[str, Any]:
        """Return the structure under its name in `nbflow.decoding.Parameters`."""
        given = {"json_schema": self.json_, "regex": self.regex, "choice": self.choice}
        given |= {"grammar": self.grammar}
        if self.json_object:
            given |= {"json_schema": given["json_schema"] or {"type": "object"}}
        return {kind: value for kind, value in given.items() if value is not None}
