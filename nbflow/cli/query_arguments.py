"""Options of `nbflow run` for query lists and Inferflow's files."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbflow.cli.chat_options import is_chat, read_chat_template
from nbflow.cli.option_arguments import add_options, given_options
from nbflow.cli.query_list import Prompts, Query, make_queries, read_queries, run_queries
from nbflow.cli.sampling_options import decoding_values, search_name, with_decoding
from nbflow.engine import LLM
from nbflow.option_fields import fields
from nbflow.options import EngineOptions, LoadOptions, SamplingParams
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command

if TYPE_CHECKING:
    from nbflow.server.config import ModelOptions  # needs pydantic

_ENGINE = ("max_sequences", "kv_bytes")
_NOT_WITH_QUERIES = (
    "prompt", "messages", "continue_final_message", "draft", "draft_weights", "logprobs", "json",
)  # fmt: skip


@dataclass
class QueryRun:
    """Queries of a command line, with what they have in common."""

    queries: list[Query]
    prompts: Prompts
    output: str | None
    options: EngineOptions

    def run(self, model: LLM) -> None:
        """Run the queries and write the table; collective over the model's ranks."""
        run_queries(model, self.queries, self.prompts, self.output, self.options)


def add_query_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of query lists."""
    group = parser.add_argument_group("query lists", "see docs/queries.md")
    group.add_argument(
        "--queries",
        metavar="FILE",
        help="run all prompts of a file (JSON lines, .csv, .txt, Inferflow's .ini; - is stdin)",
    )
    group.add_argument(
        "--output", metavar="FILE",
        help="write the results to a file, .csv or JSON lines, instead of stdout",
    )  # fmt: skip
    add_options(group, EngineOptions, _ENGINE)


def queries_of(arguments: argparse.Namespace) -> QueryRun | None:
    """Return the queries of the arguments; None for a single prompt.

    With an Inferflow file as MODEL, the arguments get its model and options.
    """
    template = read_chat_template(arguments.template)
    sampling = decoding_values(arguments)
    max_tokens, rows, encoder_template = None, None, None
    chat: bool | None = is_chat(arguments) or None
    name = arguments.model  # an Inferflow file's model takes its place
    if Path(arguments.model).suffix == ".ini":
        rows, max_tokens, service = _read_service(arguments)
        template = template or service.decoder_template or service.chat_template
        encoder_template = service.encoder_template
        of_file = {"decoding": "inferflow.auto", **service.defaults}
        if "decoding" not in sampling:
            sampling = {**of_file, **sampling}
    elif arguments.queries is None:
        _refuse_without_queries(arguments)
        return None
    else:
        chat = bool(chat)
    queries = make_queries(rows, name) if rows is not None else None
    if arguments.queries is not None:
        queries, max_tokens = _read_queries(arguments.queries)
    if queries is None and arguments.prompt is not None:
        queries = make_queries([{"prompt": arguments.prompt}], "--prompt")
        arguments.prompt = None
    if queries is None:
        raise UsageError(f"{name} lists no queries; add --queries FILE or --prompt TEXT")
    _refuse_with_queries(arguments)
    stated = (arguments.max_tokens, max_tokens, SamplingParams.max_tokens)
    most = next(n for n in stated if n is not None)
    shared = {"seed": SamplingParams.seed, "max_tokens": most, **sampling}
    return QueryRun(
        [query._replace(sampling=with_decoding({**shared, **query.sampling})) for query in queries],
        Prompts(chat, arguments.system, template, arguments.parse_special, encoder_template),
        arguments.output,
        EngineOptions(**given_options(EngineOptions, arguments)),
    )


def _read_queries(name: str) -> tuple[list[Query], int | None]:
    """Return the queries of a file, and their number of new tokens if it states one."""
    if not name.endswith(".ini"):
        return read_queries(name), None
    from nbflow.compat.inferflow.tool_ini import read_query_ini

    file = read_query_ini(Path(name))
    return make_queries(file.queries, name), file.max_tokens


def _read_service(
    arguments: argparse.Namespace,
) -> tuple[list[dict[str, Any]] | None, int | None, ModelOptions]:
    """Put the model of an Inferflow file into the arguments.

    Return the file's queries, their new tokens and the options of the model.
    """
    _need_pydantic()
    from nbflow.compat.inferflow.ini_config import read_ini
    from nbflow.compat.inferflow.tool_ini import is_query_ini, read_query_ini

    path = Path(arguments.model)
    file = read_query_ini(path) if is_query_ini(path) else None
    engine = path if file is None or file.engine is None else file.engine
    options = next(iter(read_ini(engine, serves=False).models.values()))
    arguments.model = options.path
    stated = options.load_options()
    for name in fields(LoadOptions):
        if getattr(arguments, name, None) == getattr(LoadOptions, name):
            setattr(arguments, name, getattr(stated, name))
    for name in _ENGINE:
        if getattr(arguments, name) is None:
            setattr(arguments, name, getattr(options.engine, name))
    rows = None if file is None else file.queries
    most = None if file is None else file.max_tokens
    return rows, most, options


def _refuse_without_queries(arguments: argparse.Namespace) -> None:
    for name in ("output", *_ENGINE):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} needs --queries")


def _refuse_with_queries(arguments: argparse.Namespace) -> None:
    for name in _NOT_WITH_QUERIES:
        if getattr(arguments, name) not in (None, False):
            option = name.replace("_", "-")
            raise UsageError(f"--{option} does not go with a list of queries")
    if search_name(arguments) is not None:
        raise UsageError("a list of queries takes no searches; run them one by one")


def _need_pydantic() -> None:
    if find_spec("pydantic") is None:
        raise MissingExtraError(f"Inferflow's .ini needs pydantic: {install_command('serve')}")
