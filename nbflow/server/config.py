"""Server configuration: the TOML file with models, limits and keys, validated by pydantic.

Options of models and engines are the fields of `nbflow.options`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from nbflow.option_fields import size_bytes, toml_names
from nbflow.options import STRUCTURES, EngineOptions, LoadOptions, SamplingParams, SpeculativeConfig
from nbflow.server.option_models import MayBeFile, toml_fields
from nbflow.utils.toml_schema import read_toml
from nbflow_kernels.errors import UsageError, unknown_name

_MAX_KEYS_BYTES = 1_000_000


FileName = Annotated[str | None, MayBeFile()]
PER_REQUEST = {
    "max_tokens", "seed", "n", "stop", "include_stop_str_in_output", "logprobs", "prompt_logprobs",
    *STRUCTURES,
}  # fmt: skip
"""Parameters that only requests state; a model has no default of them."""


class Section(BaseModel):
    """Table of the file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


SectionT = TypeVar("SectionT", bound=Section)


class Auth(Section):
    """API keys, which clients send as ``Authorization: Bearer KEY``."""

    keys: list[str] = []
    """Keys, in the file itself."""
    keys_file: FileName = None
    """File with one key per line."""
    keys_env: str | None = None
    """Environment variable with comma-separated keys."""

    def digests(self) -> list[bytes]:
        """Return the SHA-256 of every key; an empty list disables authentication."""
        keys = list(self.keys)
        if self.keys_file is not None:
            keys += _lines(Path(self.keys_file))
        if self.keys_env is not None:
            found = [k.strip() for k in os.environ.get(self.keys_env, "").split(",") if k.strip()]
            if not found:
                raise UsageError(
                    f"auth.keys_env: the environment variable {self.keys_env} holds no key"
                )
            keys += found
        if any(not key or key != key.strip() for key in keys):
            raise UsageError("auth.keys: a key must not be empty or begin or end with a space")
        if self.keys_file is not None and not keys:
            raise UsageError(f"auth.keys_file: {self.keys_file} holds no key")
        return [hashlib.sha256(key.encode()).digest() for key in keys]


class Limits(Section):
    """Limits of requests and connections."""

    body_bytes: int | str = 4 * 2**20
    """Maximum size of a request body, e.g. "4MiB"; larger ones are refused unread."""
    requests: int = Field(default=256, ge=1)
    """Requests in flight; the next one waits if `queue` allows, else gets status 429."""
    queue: int = Field(default=0, ge=0)
    """Requests that wait, before their body is read, until others have ended."""
    connections: int = Field(default=2048, ge=1)
    """Open connections; requests on further ones get status 503."""
    choices: int = Field(default=128, ge=1)
    """Maximum number of choices of one request: prompts times n."""
    logprobs: int = Field(default=2**20, ge=1)
    """Maximum number of prompt log-probabilities in one response: prompt tokens times
    (alternatives + 1), in each choice."""
    body_s: float = Field(default=30.0, gt=0)
    """Seconds for the body of a request to arrive."""
    slow_reader_s: float = Field(default=30.0, gt=0)
    """Seconds that a write may block before the client is disconnected."""
    request_s: float = Field(default=0.0, ge=0)
    """Deadline of a request in seconds, which then returns its tokens so far; 0: none."""
    drain_s: float = Field(default=60.0, ge=0)
    """Seconds for accepted requests to finish after SIGTERM."""

    @field_validator("body_bytes")
    @classmethod
    def _bytes(cls, value: int | str) -> int:
        return size_bytes(value, "body_bytes")


class Cors(Section):
    """Cross-origin requests of web pages."""

    origins: list[str] = []
    """Origins such as "https://example.org"; ["*"] allows any."""


class Logging(Section):
    """Log format, level and file."""

    format: Literal["text", "json"] = "text"
    """Text, or one JSON object per line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level."""
    file: str | None = None
    """File to append to, whose folder is created; by default standard error."""
    max_bytes: int | str = 0
    """Size from which the file is rotated, e.g. "10MB"; 0: never."""
    backups: int = Field(default=9, ge=0, le=9999)
    """Rotated files that are kept, as FILE.1, FILE.2, ..."""

    @field_validator("max_bytes")
    @classmethod
    def _bytes(cls, value: int | str) -> int:
        return 0 if value in (0, "0") else size_bytes(value, "max_bytes")


if TYPE_CHECKING:

    class _EngineFields(Section):
        def __getattr__(self, name: str) -> Any: ...

    class _LoadFields(Section):
        def __getattr__(self, name: str) -> Any: ...

else:
    _EngineFields = create_model("_EngineFields", __base__=Section, **toml_fields(EngineOptions))
    _LoadFields = create_model(
        "_LoadFields",
        __base__=Section,
        **toml_fields(LoadOptions),
        **toml_fields(SpeculativeConfig),
    )


class EngineSection(_EngineFields):
    """``[models.NAME.engine]``: the fields of `nbflow.options.EngineOptions`."""

    def options(self) -> EngineOptions:
        """Return the options of `nbflow.LLMEngine`."""
        return EngineOptions(**self.model_dump())


class ModelOptions(_LoadFields):
    """Model ``[models.NAME]``, where NAME is its name for clients.

    Its keys are the fields of `nbflow.options.LoadOptions` and `SpeculativeConfig`, and these.
    """

    path: Annotated[str, MayBeFile()]
    """MODEL as for `nbflow run`: a folder, a file, or the name of a spec."""
    aliases: list[str] = Field(default=[])
    """Further names, e.g. "gpt-4o-mini" for clients with a fixed model name."""
    chat_template: FileName = None
    """Name, file or text of a chat template that replaces the model's own."""
    encoder_template: str | None = None
    """Query template of a model with an encoder for what that reads: {__zh__}{ }{query}{</s>}."""
    decoder_template: str | None = None
    """Query template of the decoder's first tokens: {#2}{__en__}{res_prefix}."""
    defaults: dict[str, Any] = Field(default={})
    """Default sampling parameters of requests, e.g. temperature = 0.7."""
    engine: EngineSection = EngineSection()
    """``[models.NAME.engine]``."""

    @model_validator(mode="after")
    def _draft(self) -> ModelOptions:
        SpeculativeConfig(**{name: getattr(self, name) for name in toml_names(SpeculativeConfig)})
        return self

    @field_validator("defaults")
    @classmethod
    def _defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        SamplingParams.parse(values)  # raises for an unknown name and a value out of bounds
        for name in values:
            if name in PER_REQUEST:
                raise ValueError(f"{name} is of each request and has no default; leave it out")
        return values

    def load_options(self) -> LoadOptions:
        """Return the options of `nbflow.load`."""
        return LoadOptions(**{name: getattr(self, name) for name in toml_names(LoadOptions)})


class ServerConfig(Section):
    """Whole configuration file."""

    host: str = "127.0.0.1"
    """Address to listen on; "0.0.0.0" for all: then set keys and terminate TLS in a proxy."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 chooses a free one."""
    models: dict[str, ModelOptions]
    """The models."""
    plugins: Annotated[list[str], MayBeFile()] = []
    """Python files, or names of installed plugins, that register parts of your own; they are
    imported."""
    warmup: bool = True
    """Generate a few tokens with each model before accepting requests, to compile its kernels."""
    page: bool = True
    """Serve the chat page at ``/``."""
    strict_model_names: bool = False
    """Refuse unknown model names (404) also where one model is served, which otherwise answers to
    every name."""
    request_templates: bool = False
    """Allow requests to bring their own chat template (run in a sandbox)."""
    auth: Auth = Auth()
    """``[auth]``."""
    limits: Limits = Limits()
    """``[limits]``."""
    cors: Cors = Cors()
    """``[cors]``."""
    log: Logging = Logging()
    """``[log]``."""

    @field_validator("models")
    @classmethod
    def _names(cls, models: dict[str, ModelOptions]) -> dict[str, ModelOptions]:
        names = [name for key, m in models.items() for name in (key, *m.aliases)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the name {twice[0]!r} is used by two models")
        if not models:
            raise ValueError("there must be at least one [models.NAME]")
        return models


def read_config(path: Path) -> ServerConfig:
    """Read a server's TOML file; file names in it are relative to its folder."""
    table = read_toml(path)
    if "models" not in table:
        raise UsageError(
            f"{path}: has no [models.NAME]; a server's file states its models (docs/server.md). "
            "To serve the model of a spec file, use nbflow serve MODEL --spec FILE"
        )
    return resolve_files(make_config(table, str(path)), path.parent)


def make_config(table: dict[str, Any], where: str) -> ServerConfig:
    """Return a validated configuration, or raise `UsageError` that names the key."""
    try:
        return ServerConfig.model_validate(table)
    except ValidationError as error:
        raise UsageError(f"{where}: {_first(error)}") from None


def resolve_files(section: SectionT, folder: Path) -> SectionT:
    """Return a configuration with file names resolved against `folder`, where they exist."""
    found: dict[str, Any] = {}
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        mark = next((m for m in field.metadata if isinstance(m, MayBeFile)), None)
        if isinstance(value, Section):
            found[key] = resolve_files(value, folder)
        elif isinstance(value, dict):
            found[key] = {
                name: resolve_files(v, folder) if isinstance(v, Section) else v
                for name, v in value.items()
            }
        elif mark is not None and isinstance(value, list):
            found[key] = [mark.found(name, folder) for name in value]
        elif mark is not None and value is not None:
            found[key] = mark.found(value, folder)
    return section.model_copy(update=found)


def _lines(path: Path) -> list[str]:
    """Return the lines of a key file without empty lines and comments."""
    try:
        if path.stat().st_size > _MAX_KEYS_BYTES:
            raise UsageError(f"{path}: a file of keys may have at most {_MAX_KEYS_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"auth.keys_file: {path} cannot be read: {error}") from error
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _first(error: ValidationError) -> str:
    """Return the message of the first validation error."""
    found = error.errors()[0]
    *parents, last = found["loc"] or ("",)
    where = ".".join(map(str, (*parents, last)))
    if found["type"] == "extra_forbidden":
        section = _section(parents)
        return f"{where}: {unknown_name('key', last, section.model_fields)}"
    message = found["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(found["input"], dict) else f", got {found['input']!r:.80}"
    return f"{where}: {message}{'' if 'got' in message else shown}"


def _section(parents: list[int | str]) -> type[BaseModel]:
    """Return the section at a path of keys."""
    if parents[:1] == ["models"]:
        return EngineSection if parents[2:] == ["engine"] else ModelOptions
    kinds: dict[str, type[BaseModel]] = {
        "auth": Auth,
        "limits": Limits,
        "cors": Cors,
        "log": Logging,
    }
    return kinds.get(str(parents[0]), ServerConfig) if parents else ServerConfig
