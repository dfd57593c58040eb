"""What a server is told: models, limits, keys.  A TOML file of this form, checked whole.

Every field here is a line of the file and of docs/server.md.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nbflow.spec.toml_schema import read_toml
from nbflow_kernels.errors import UsageError, unknown_name

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MAX_KEYS_BYTES = 1_000_000


@dataclass(frozen=True)
class MayBeFile:
    """Mark of fields that may name files: those that lie beside the configuration are meant."""

    suffix: str = ""
    """End of such names; others are names of something else."""

    def found(self, name: str, folder: Path) -> str:
        """Return the path of a file in a folder; the name as it is if there is none."""
        if len(name) > 4096 or "\n" in name or "{" in name or not name.endswith(self.suffix):
            return name
        return str(folder / name) if (folder / name).exists() else name


FileName = Annotated[str | None, MayBeFile()]
PolicyName = Annotated[str | None, MayBeFile(".toml")]


class Section(BaseModel):
    """A table of the file: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


SectionT = TypeVar("SectionT", bound=Section)


class Auth(Section):
    """Who may use the server: whoever sends one of the keys as ``Authorization: Bearer KEY``."""

    keys: list[str] = []
    """Keys, in the file itself."""
    keys_file: FileName = None
    """A file with one key per line."""
    keys_env: str | None = None
    """An environment variable with keys, separated by commas."""

    def digests(self) -> list[bytes]:
        """Return the SHA-256 of every key; an empty list means that anyone may use the server."""
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
    """What a request and a connection may take."""

    body_bytes: int | str = 4 * 2**20
    """Longest body of a request, e.g. "4MiB"; more is refused before it is read."""
    requests: int = Field(default=256, ge=1)
    """Requests that are worked on at once; the next one gets status 429."""
    connections: int = Field(default=2048, ge=1)
    """Open connections; with more, requests get status 503."""
    choices: int = Field(default=128, ge=1)
    """Most continuations that one request may ask for: prompts times n."""
    logprobs: int = Field(default=2**20, ge=1)
    """Most log-probabilities of prompts in one answer: their tokens times the alternatives and 1,
    in each choice."""
    body_s: float = Field(default=30.0, gt=0)
    """Seconds for the body of a request to arrive."""
    slow_reader_s: float = Field(default=30.0, gt=0)
    """Seconds for a client with full buffers to read; then it is disconnected."""
    request_s: float = Field(default=0.0, ge=0)
    """Seconds until a request ends with what it has; 0: as long as it takes."""
    drain_s: float = Field(default=60.0, ge=0)
    """Seconds that accepted requests have to finish after SIGTERM."""

    @field_validator("body_bytes")
    @classmethod
    def _bytes(cls, value: int | str) -> int:
        return size_bytes(value)


class Cors(Section):
    """Which web pages of other origins may call the server."""

    origins: list[str] = []
    """Origins such as "https://example.org"; ["*"] allows any."""


class Logging(Section):
    """Where and how the server writes what it does."""

    format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object per line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is written."""
    file: str | None = None
    """A file to append to; by default standard error."""


class EngineOptions(Section):
    """Options of `nbflow.Engine`."""

    max_step_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in one step."""
    max_sequences: int | None = Field(default=None, ge=1)
    """Most sequences that are worked on together."""
    max_waiting: int = Field(default=1024, ge=1)
    """Most continuations that wait; the next one gets status 429."""
    kv_bytes: int | str | None = None
    """Most bytes of the key/value cache, e.g. "2GiB"."""
    prefix_cache: bool = True
    """Whether prompts that begin alike share what has been computed."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Of replicas: whether the others go on when one has failed."""

    @field_validator("kv_bytes")
    @classmethod
    def _bytes(cls, value: int | str | None) -> int | None:
        return None if value is None else size_bytes(value)


class ModelOptions(Section):
    """A model: ``[models.NAME]``, where NAME is what clients call it."""

    path: Annotated[str, MayBeFile()]
    """MODEL as for `nbflow run`: a folder, a file, or the name of a spec."""
    aliases: list[str] = []
    """Other names it answers to, e.g. "gpt-4o-mini" for clients that insist."""
    spec: FileName = None
    """Spec file, or name of a model, to use instead of the checkpoint's own."""
    tokenizer: FileName = None
    """Tokenizer file, if it does not lie beside the weights."""
    weights: PolicyName = None
    """Weight format, e.g. "q4", or a policy file (.toml); by default as stored."""
    outliers: float = 0.0
    """Share of weights kept exactly beside the format."""
    encoder: str = "best"
    """How weights are put into the format, as --encoder of `nbflow run`."""
    importance: FileName = None
    """File of `nbflow imatrix` for the encoder."""
    act_order: bool = False
    """Whether GPTQ takes the columns with the largest inputs first."""
    damping: float = Field(default=0.01, ge=0, le=1)
    """What GPTQ adds to the diagonal of second moments, in units of its mean."""
    activations: str = "f32"
    """Arithmetic of the products: f32, bf16, int8."""
    kv: str = "f16"
    """Format of the key/value cache; "q8/q4" for keys and values of formats of their own."""
    partition: str = "0"
    """Which ranks hold what; the numbers are MPI ranks under mpirun, else threads."""
    optimize: str = "latency"
    """What partition "auto" is best at: latency or throughput."""
    machine: FileName = None
    """Name or file of a machine's description for partition "auto"."""
    exchange: str = "f32"
    """How partial sums are sent between ranks: f32 or q8."""
    device: str = "auto"
    """Where to run, as --device of `nbflow run`."""
    graphs: bool = True
    """Whether steps of generation run as CUDA graphs on devices."""
    kv_host_percent: float = Field(default=0.0, ge=0, le=100)
    """Share of a device's layers whose keys and values lie in the host's memory."""
    embeddings_on_host: bool = False
    """Whether a device's embedding does."""
    cpu_layers: int = Field(default=0, ge=0)
    """First layers that the host computes, beside a device."""
    max_context: int | None = Field(default=None, ge=1)
    """Shorten the context."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of each rank."""
    chat_template: FileName = None
    """Name, file or text of the template for conversations, instead of the model's own."""
    draft: FileName = None
    """Who proposes tokens that the model then verifies several at a time: "ngram", the text, or a
    smaller MODEL with the same vocabulary."""
    n_draft: int = Field(default=5, ge=1, le=64)
    """How many at a time."""
    draft_weights: PolicyName = None
    """Weight format of the smaller model; by default as stored."""
    draft_verify: Literal["same", "chain"] = "same"
    """Keep the very tokens (same), or their distribution and more proposals (chain)."""
    defaults: dict[str, float | int | str | bool] = {}
    """Decoding parameters for requests that do not state them, e.g. temperature = 0.7."""
    engine: EngineOptions = EngineOptions()
    """``[models.NAME.engine]``."""

    @model_validator(mode="after")
    def _draft(self) -> ModelOptions:
        alone = self.draft in (None, "ngram")
        if alone and (self.draft_weights is not None or self.draft_verify == "chain"):
            name = "draft_weights" if self.draft_weights is not None else "draft_verify"
            raise ValueError(f"{name} needs a smaller model as draft, got draft {self.draft!r}")
        return self

    def load_options(self) -> dict[str, Any]:
        """Return the arguments of `nbflow.load` after the model."""
        names = (
            "spec",
            "tokenizer",
            "weights",
            "outliers",
            "encoder",
            "importance",
            "act_order",
            "damping",
            "activations",
            "kv",
            "partition",
            "optimize",
            "machine",
            "exchange",
            "device",
            "graphs",
            "kv_host_percent",
            "embeddings_on_host",
            "cpu_layers",
            "max_context",
            "threads",
        )
        return {name: getattr(self, name) for name in names}


class ServerConfig(Section):
    """The whole file."""

    host: str = "127.0.0.1"
    """Address to listen on; "0.0.0.0" for all: think of keys, and of TLS in front."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    models: dict[str, ModelOptions]
    """The models."""
    formats: Annotated[list[str], MayBeFile()] = []
    """Python files that register weight formats; they are executed."""
    warmup: bool = True
    """Whether each model generates two tokens before requests are taken, so that its kernels are
    compiled."""
    page: bool = True
    """Whether the chat page is at ``/``."""
    request_templates: bool = False
    """Whether a request may bring its own chat template (run in a sandbox)."""
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
            raise ValueError(f"the name {twice[0]!r} is given to two models")
        if not models:
            raise ValueError("there must be at least one [models.NAME]")
        return models


def size_bytes(value: int | str) -> int:
    """Return a number of bytes, given as one or as text such as "2GiB"; at least 1."""
    match = _SIZE.fullmatch(str(value).strip())
    if isinstance(value, bool) or match is None:
        raise ValueError(f"must be a number of bytes such as 1000000 or '2GiB', got {value!r}")
    n = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    if not 1 <= n <= 2**60:
        raise ValueError(f"must be 1 byte or more, got {value!r}")
    return n


def read_config(path: Path) -> ServerConfig:
    """Read a server's TOML file; the files it names are relative to it.

    Raises
    ------
    UsageError
        If it is not valid TOML, or a key or value is not one of `ServerConfig`.
    """
    table = read_toml(path)
    if "models" not in table:
        raise UsageError(
            f"{path}: has no [models.NAME]; a server's file states its models (docs/server.md). "
            "To serve the model of a spec file, use nbflow serve MODEL --spec FILE"
        )
    return beside(make_config(table, str(path)), path.parent)


def make_config(table: dict[str, Any], where: str) -> ServerConfig:
    """Return a checked configuration, or raise `UsageError` that names the key."""
    try:
        return ServerConfig.model_validate(table)
    except ValidationError as error:
        raise UsageError(f"{where}: {_first(error)}") from None


def beside(section: SectionT, folder: Path) -> SectionT:
    """Return a configuration with the files that lie in `folder` as paths that lead there."""
    found: dict[str, Any] = {}
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        mark = next((m for m in field.metadata if isinstance(m, MayBeFile)), None)
        if isinstance(value, Section):
            found[key] = beside(value, folder)
        elif isinstance(value, dict):
            found[key] = {
                name: beside(v, folder) if isinstance(v, Section) else v
                for name, v in value.items()
            }
        elif mark is not None and isinstance(value, list):
            found[key] = [mark.found(name, folder) for name in value]
        elif mark is not None and value is not None:
            found[key] = mark.found(value, folder)
    return section.model_copy(update=found)


def _lines(path: Path) -> list[str]:
    """Return the lines of a small file that are neither empty nor comments."""
    try:
        if path.stat().st_size > _MAX_KEYS_BYTES:
            raise UsageError(f"{path}: a file of keys may have at most {_MAX_KEYS_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"auth.keys_file: {path} cannot be read: {error}") from error
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _first(error: ValidationError) -> str:
    """Return the first finding in words."""
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
    """Return the section that a path of keys leads to."""
    if parents[:1] == ["models"]:
        return EngineOptions if parents[2:] == ["engine"] else ModelOptions
    kinds: dict[str, type[BaseModel]] = {
        "auth": Auth,
        "limits": Limits,
        "cors": Cors,
        "log": Logging,
    }
    return kinds.get(str(parents[0]), ServerConfig) if parents else ServerConfig
