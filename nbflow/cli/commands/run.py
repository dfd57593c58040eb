"""`nbflow run`: continue a prompt and stream the text to stdout, or run a list of queries."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from typing import Any

from nbflow.cli.chat_options import add_chat_arguments, chat_ids, is_chat
from nbflow.cli.option_arguments import add_options
from nbflow.cli.options import (
    add_memory_arguments,
    add_model_arguments,
    is_printing_rank,
    load_model,
    print_plan,
)
from nbflow.cli.query_arguments import add_query_arguments, queries_of
from nbflow.cli.sampling_options import (
    add_decoding_arguments,
    add_search_arguments,
    load_draft,
    request_values,
    search_name,
    search_values,
)
from nbflow.engine import LLM, RequestOutput
from nbflow.engine.detokenizer import IncrementalDetokenizer
from nbflow.engine.request import Request
from nbflow.engine.search.api import search
from nbflow.engine.worker import Worker
from nbflow.options import SamplingParams
from nbflow_kernels.errors import UsageError

_show = partial(print, end="", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_arguments(parser)
    add_memory_arguments(parser)
    parser.add_argument("-p", "--prompt", help="prompt (empty)")
    add_chat_arguments(parser)
    add_options(parser, SamplingParams, ["max_tokens"], unset=True)
    add_decoding_arguments(parser)
    add_search_arguments(parser)
    add_query_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not print statistics")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    queries = queries_of(arguments)
    if print_plan(arguments):
        return 0
    if queries is not None:
        with load_model(arguments) as model:
            if model.participates:
                queries.run(model)
        return 0
    if arguments.logprobs is not None and not arguments.json:
        raise UsageError("--logprobs needs --json")
    if arguments.max_tokens is None:
        arguments.max_tokens = SamplingParams.max_tokens
    with load_model(arguments) as model, load_draft(arguments) as draft:
        if not model.participates:
            return 0
        if is_chat(arguments):
            prompt = chat_ids(model.tokenizer, arguments, arguments.prompt)
        else:
            text = arguments.prompt or ""
            prompt = model.tokenizer.prompt_ids(text, parse_special=arguments.parse_special)
        name = search_name(arguments)
        if name is not None:
            values = search_values(arguments, name)
            found = search(model, name, prompt, arguments.max_tokens, **values)
            _print_search(model, arguments, prompt, found)
            return 0
        _stream(model, arguments, draft, prompt)
    return 0


def _stream(
    model: LLM, arguments: argparse.Namespace, draft: LLM | str | None, prompt: list[int]
) -> None:
    """Continue a prompt; print the text as it comes and statistics, or one JSON object."""
    request = model.make_request(
        prompt, arguments.max_tokens, draft=draft, **request_values(arguments)
    )
    request.wants_logprobs = arguments.json
    started = time.perf_counter()
    first = None
    printer = _StreamPrinter(model, request, is_chat(arguments), arguments.json)
    for _ in model.run_requests([request]):
        first = first or time.perf_counter()
        printer.update()
    ended = time.perf_counter()
    printer.finish()
    if is_printing_rank(model) and arguments.json:
        _print_json(arguments, model.generation(request))
    elif is_printing_rank(model) and not arguments.quiet:
        _print_statistics(request, (first or ended) - started, ended - (first or ended))
        for engine in model.workers:
            _print_device_memory(engine)


class _StreamPrinter:
    """Streaming output of a request on stdout."""

    def __init__(self, model: LLM, request: Request, chat: bool, silent: bool) -> None:
        self._request, self._n = request, 0
        self._stream = None
        if is_printing_rank(model) and not silent:
            own = model.tokenizer
            before = own.decode_stream()
            shown = "".join([*(before.push(i) for i in own.known(request.prompt)), before.finish()])
            _show("" if chat else shown)
            self._stream = IncrementalDetokenizer(
                model.tokenizer, request.stop_texts, request.include_stop_text, request.prompt
            )

    def update(self) -> None:
        """Print new text."""
        if self._stream is not None:
            _show("".join(self._stream.push(i) for i in self._request.ids[self._n :]))
            self._n = len(self._request.ids)

    def finish(self) -> None:
        """Print the rest."""
        if self._stream is not None:
            self.update()
            print(self._stream.finish())


def _print_search(
    model: LLM, arguments: argparse.Namespace, prompt: list[int], found: RequestOutput
) -> None:
    if not is_printing_rank(model):
        return
    if arguments.json:
        _print_json(arguments, found)
    else:
        own = model.tokenizer
        print(("" if is_chat(arguments) else own.decode(own.known(prompt))) + found.text)


def _print_json(arguments: argparse.Namespace, made: RequestOutput) -> None:
    values: dict[str, Any] = {
        "prompt": arguments.prompt or "",
        "prompt_ids": made.prompt_ids,
        "text": made.text,
        "ids": made.ids,
        "logprobs": made.logprobs,
        "finish_reason": made.finish_reason,
    }
    if made.top_logprobs:
        values["top_logprobs"] = made.top_logprobs
    if made.score is not None:
        values["score"] = made.score
    if made.n_drafted:
        values |= {"n_drafted": made.n_drafted, "n_accepted": made.n_accepted}
    print(json.dumps(values))


def _print_device_memory(engine: Worker) -> None:
    """Print how a rank's steps ran and its memory, if it is on a device."""
    report, held = engine.executor.report(), engine.memory()
    if not report:
        return
    names = {
        "weight_bytes": "weights",
        "kv_bytes": "keys and values",
        "workspace_bytes": "workspace",
        "step_bytes": "steps and graphs",
    }
    parts = ", ".join(f"{name} {held[key]:,}" for key, name in names.items())
    total = sum(held[key] for key in names)
    print(f"[{report}; {total:,} bytes on the device: {parts}]", file=sys.stderr)


def _print_statistics(request: Request, to_first_s: float, rest_s: float) -> None:
    n_prompt, n_new = len(request.prompt), len(request.ids)
    rate = f", then {(n_new - 1) / rest_s:,.0f} tokens/s" if n_new > 1 and rest_s > 0 else ""
    drafted = ""
    if request.n_drafted:
        drafted = f"; {request.n_accepted} of {request.n_drafted} draft tokens accepted"
    print(
        f"[{n_prompt} prompt tokens, {n_new} new; first after {to_first_s * 1e3:.0f} ms{rate}"
        f"{drafted}]",
        file=sys.stderr,
    )
