"""Query lists of `nbflow run`: many prompts with their own parameters, and a table of results."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import nbflow
from nbflow.cli.option_arguments import read_argument
from nbflow.cli.options import is_printing_rank
from nbflow.engine import LLM
from nbflow.engine.fill_mask import fill_mask, masked_ids
from nbflow.engine.request import Request
from nbflow.option_fields import accepts, aliases, fields
from nbflow.options import EngineOptions, SamplingParams
from nbflow.tokenization import Tokenizer
from nbflow_kernels.errors import UsageError, unknown_name

FIELDS = ("id", "prompt", "messages", "system", "prefix", "template", "encoder_template")
"""Fields of a query besides sampling parameters."""
RESULTS = ("text", "finish_reason", "prompt_tokens", "new_tokens")
"""Columns of the results."""
MASK_RESULTS = ("masks",)
"""Columns of the results of a masked language model: for each mask the most probable tokens."""
_NO_COLUMN = ("logprobs", "prompt_logprobs")
"""Parameters whose results have no column."""
_PRODUCT = ("seed", "decoding")
"""Parameters that may be a list: the query is run with each value."""
_MAX_ROWS = 1_000_000


class Query(NamedTuple):
    """A prompt and its parameters."""

    where: str
    """File and number, for messages."""
    fields: dict[str, Any]
    """Values of `FIELDS`."""
    sampling: dict[str, Any]
    """Sampling parameters by their names in `SamplingParams`."""


def read_queries(name: str) -> list[Query]:
    """Read queries from a file; - is standard input.

    The suffix decides: ``.txt`` has a prompt in each line, ``.csv`` a row of column names first,
    everything else JSON objects, one in each line or all in a list.
    """
    text = read_argument(name)
    if name.endswith(".txt"):
        rows: Any = ({"prompt": line} for line in text.splitlines() if line.strip())
    elif name.endswith(".csv"):
        rows = _csv_rows(text, name)
    else:
        rows = _json_rows(text, name)
    return make_queries(rows, name)


def make_queries(rows: Any, where: str) -> list[Query]:
    """Return queries from objects; those with lists of seeds or strategies give several."""
    found: list[Query] = []
    for i, row in enumerate(rows):
        here = f"{where}: query {i + 1}"
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise UsageError(f"{here} must be a text or a JSON object, got {row!r:.80}")
        found += _expanded(row, here)
        if len(found) > _MAX_ROWS:
            raise UsageError(f"{where} may have at most {_MAX_ROWS:,} queries")
    if not found:
        raise UsageError(f"{where} has no queries")
    return found


def _expanded(row: Mapping[str, Any], where: str) -> Iterator[Query]:
    """Yield the queries of a row, after checking its fields."""
    known, others = fields(SamplingParams), aliases(SamplingParams)
    own: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in row.items():
        parameter = others.get(name, name)
        if value is None:
            continue
        if name in FIELDS:
            own[name] = value
        elif parameter in _NO_COLUMN:
            raise UsageError(f"{where}: the results of a list have no column for {parameter}")
        elif parameter in sampling:
            raise UsageError(f"{where}: {parameter} is given twice, the second time as {name!r}")
        elif parameter in known:
            sampling[parameter] = value
        else:
            raise UsageError(f"{where}: {unknown_name('field', name, [*FIELDS, *known])}")
    for name in FIELDS[1:]:
        if name != "messages" and not isinstance(own.get(name, ""), str):
            raise UsageError(f"{where}: {name} must be a text, got {own[name]!r:.80}")
    messages = own.get("messages", [])
    if not (isinstance(messages, list) and all(isinstance(m, Mapping) for m in messages)):
        raise UsageError(f"{where}: messages must be a list of objects, got {messages!r:.80}")
    if "messages" in own and {"prompt", "system", "prefix"} & own.keys():
        raise UsageError(f"{where}: give messages, or prompt, system and prefix")
    if not {"messages", "prompt", "prefix"} & own.keys():
        raise UsageError(f"{where} must have prompt, prefix or messages")
    lists = [n for n in _PRODUCT if isinstance(sampling.get(n), list)]
    if any(not sampling[name] for name in lists):
        raise UsageError(f"{where}: lists of seeds and strategies must not be empty")
    for values in itertools.product(*(sampling[name] for name in lists)):
        yield Query(where, own, {**sampling, **dict(zip(lists, values, strict=True))})


def _json_rows(text: str, where: str) -> Any:
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not valid JSON: {error}") from error
    rows = []  # of objects, or of prompts as strings
    for number, line in enumerate(text.split("\n"), 1):  # U+2028 may be in a string
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where}:{number}: not valid JSON: {error}") from error
    return rows


def _csv_rows(text: str, where: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table; parameters that are not strings are JSON."""
    known, others = fields(SamplingParams), aliases(SamplingParams)
    try:
        for row in csv.DictReader(io.StringIO(text, newline=""), strict=True):
            if None in row or None in row.values():
                raise UsageError(f"{where}: each row must have a cell for each column")
            found: dict[str, Any] = {}
            for name, cell in row.items():
                option = known.get(others.get(name, name))
                is_text = option is None or accepts(option.outside_hint, "")
                if cell != "" or name == "prompt":
                    found[name] = cell if is_text and name != "messages" else _cell(cell)
            yield found
    except csv.Error as error:
        raise UsageError(f"{where}: not a CSV table: {error}") from error


def _cell(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # refused later, with the parameter's name


# ---- prompts ----------------------------------------------------------------------------------


class Prompts(NamedTuple):
    """Defaults of the queries' prompts."""

    chat: bool | None
    """Apply a chat template also to queries that are plain prompts; None: if there is one."""
    system: str | None = None
    template: str | None = None
    """Chat template; with an encoder that of the decoder."""
    parse_special: bool = False
    encoder_template: str | None = None

    def of_both(self, query: Query, model: LLM) -> tuple[list[int], list[int] | None]:
        """Return the token ids of a query, and the decoder's in a model with an encoder."""
        own, spec = query.fields, model.spec
        template = own.get("template", self.template)
        of_encoder = own.get("encoder_template", self.encoder_template)
        if spec.encoder is None and of_encoder is not None:
            raise UsageError(f"{spec.name} has no encoder; leave encoder_template out")
        known = model.tokenizer
        has_one = known.chat_templates or known.prompt_template is not None or self.template
        is_plain = not (template or of_encoder or "prefix" in own)
        if spec.encoder is None or is_plain or (of_encoder is None and has_one):
            return self.ids(query, known), None
        from nbflow.tokenization.chat import encode_pair

        messages = self._messages(query)
        return encode_pair(known, messages, of_encoder, template, start=spec.decoder_start_id)

    def masked_ids(self, query: Query, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids of a text with masks."""
        of_encoder = query.fields.get("encoder_template", self.encoder_template)
        return masked_ids(tokenizer, query.fields.get("prompt", ""), of_encoder)

    def _messages(self, query: Query) -> list[Any]:
        """Return a query as a conversation."""
        own = query.fields
        if "messages" in own:
            return list(own["messages"])
        messages = [{"role": "user", "content": own.get("prompt", "")}]
        if system := own.get("system", self.system):
            messages.insert(0, {"role": "system", "content": system})
        if prefix := own.get("prefix", ""):
            messages.append({"role": "assistant", "content": prefix})
        return messages

    def ids(self, query: Query, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids of a query."""
        own = query.fields
        text, prefix = own.get("prompt", ""), own.get("prefix", "")
        chat = self.chat
        if chat is None:
            chat = bool(
                self.template or tokenizer.chat_templates or tokenizer.prompt_template is not None
            )
        if not (chat or {"messages", "system", "template"} & own.keys()):
            return tokenizer.prompt_ids(text + prefix, parse_special=self.parse_special)
        from nbflow.tokenization.chat import encode_chat

        return encode_chat(
            tokenizer,
            self._messages(query),
            own.get("template", self.template),
            parse_special=self.parse_special,
            continue_final_message=bool(prefix),
        )


# ---- results ----------------------------------------------------------------------------------


def make_requests(model: LLM, queries: Sequence[Query], prompts: Prompts) -> list[Request]:
    """Return the requests of queries; raise `UsageError` that names the query."""
    requests = []
    for query in queries:
        try:
            ids, decoder_ids = prompts.of_both(query, model)
            requests.append(model.make_request(ids, **query.sampling, decoder_ids=decoder_ids))
        except UsageError as error:
            raise UsageError(f"{query.where}: {error}") from error
        requests[-1].wants_logprobs = False
    return requests


def run_queries(
    model: LLM,
    queries: Sequence[Query],
    prompts: Prompts,
    output: str | None,
    options: EngineOptions,
) -> None:
    """Run queries in shared steps, and write a row for each in the list's order.

    Collective over the model's ranks; the first one writes.  A masked language model fills the
    masks of each query.
    """
    if not model.spec.causal and model.spec.encoder is None and model.spec.head:
        _fill_masks(model, queries, prompts, output)
        return
    requests = make_requests(model, queries, prompts)
    options = options.replaced({"max_waiting": len(requests) + 1})
    with nbflow.LLMEngine(model, options) as running:
        if not running.leads:
            running.follow()
            return
        started = time.perf_counter()
        handles = [running.submit(request) for request in requests]
        n_prompt = n_new = 0
        with _rows(output, queries) as write:
            for i, (query, handle) in enumerate(zip(queries, handles, strict=True)):
                made = handle.result()
                n_prompt += len(made.prompt_ids)
                n_new += len(made.ids)
                values = made.text, made.finish_reason, len(made.prompt_ids), len(made.ids)
                results = dict(zip(RESULTS, values, strict=True))
                write({"index": i, **query.fields, **query.sampling, **results})
        seconds = time.perf_counter() - started
    print(
        f"[{len(queries)} queries: {n_prompt:,} prompt tokens, {n_new:,} new; {seconds:.1f} s, "
        f"{n_new / seconds:,.0f} new tokens/s]",
        file=sys.stderr,
    )


def _fill_masks(model: LLM, queries: Sequence[Query], prompts: Prompts, output: str | None) -> None:
    """Write the most probable tokens for the masks of each query."""
    wrong = {name for query in queries for name in query.fields} & {"messages", "prefix", "system"}
    if wrong:
        raise UsageError(f"{model.spec.name} fills masks and takes no {sorted(wrong)[0]}")
    found = []
    for query in queries:
        try:
            found.append(fill_mask(model, prompts.masked_ids(query, model.tokenizer)))
        except UsageError as error:
            raise UsageError(f"{query.where}: {error}") from error
    if not is_printing_rank(model):
        return
    with _rows(output, queries, MASK_RESULTS) as write:
        for i, (query, masks) in enumerate(zip(queries, found, strict=True)):
            listed = [[dataclasses.asdict(one) for one in mask] for mask in masks]
            write({"index": i, **query.fields, "masks": listed})


@contextmanager
def _rows(
    output: str | None, queries: Sequence[Query], results: Sequence[str] = RESULTS
) -> Iterator[Any]:
    """Yield a function that writes a row to a file or stdout at once."""
    if output is None:
        yield lambda row: print(json.dumps(row, ensure_ascii=False), flush=True)
        return
    with Path(output).open("w", encoding="utf-8", newline="") as file:
        if output.endswith(".csv"):
            yield _csv_writer(file, queries, results)
        else:
            yield lambda row: _write_line(file, row)


def _write_line(file: TextIO, row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def _csv_writer(file: TextIO, queries: Sequence[Query], results: Sequence[str]) -> Any:
    """Return a function that writes a row of a CSV table with the columns of all queries."""
    used = {name for query in queries for name in (*query.fields, *query.sampling)}
    if results == MASK_RESULTS:
        used &= {*FIELDS}
    given = [name for name in (*FIELDS, *fields(SamplingParams)) if name in used]
    writer = csv.DictWriter(file, ["index", *given, *results], lineterminator="\n")
    writer.writeheader()

    def write(row: Mapping[str, Any]) -> None:
        writer.writerow(
            {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()}
        )
        file.flush()

    return write
