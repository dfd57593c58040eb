"""`nbflow client`: chat with a server over OpenAI's API, or send one Inferflow request."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from nbflow.cli.http_client import HttpClient
from nbflow.cli.option_arguments import add_options, read_argument
from nbflow.option_fields import fields
from nbflow.options import SamplingParams
from nbflow_kernels.errors import UsageError

_NUMBERS = {
    name: fields(SamplingParams)[name].outside_hint
    for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")
}
"""Sampling parameter -> type."""
_HELP = """\
/system TEXT   set the system message     /new         begin a new conversation
/set NAME X    temperature, top_p, ...    /model NAME  use another model
/undo          remove the last turn       /quit        end (or Ctrl+D)
Ctrl+C stops a response.  A trailing \\ continues the line."""

_URL = "http://127.0.0.1:8000/v1"
_show = partial(print, end="", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = "Chat with a server; interactive without -p and --request."
    parser.add_argument(
        "ini",
        nargs="?",
        metavar="INI",
        help="inferflow_client.ini: send its request to its service",
    )
    parser.add_argument("--url", help=f"base URL ({_URL})")
    parser.add_argument("-m", "--model", help="name of the model (the server's first)")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="send one message and end")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_options(parser, SamplingParams, _NUMBERS, unset=True, http=True)
    parser.add_argument(
        "--request", metavar="FILE",
        help="send a JSON body (- is stdin); with a field text, by Inferflow's protocol",
    )  # fmt: skip
    parser.add_argument("--key-env", metavar="VAR", default="NBFLOW_API_KEY",
                        help="environment variable with the API key (NBFLOW_API_KEY)")  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S",
        help="seconds to wait for further bytes (600)",
    )  # fmt: skip
    parser.add_argument("-q", "--quiet", action="store_true", help="do not print statistics")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.ini is not None:
        return _send_ini(arguments)
    arguments.url = arguments.url or _URL
    client = _client(arguments, arguments.url)
    if arguments.request is not None:
        return _send_file(client, arguments)
    chat = Chat(client, arguments)
    if arguments.prompt is not None:
        chat.say(arguments.prompt)
        return 0
    return _converse(chat)


def _client(arguments: argparse.Namespace, url: str) -> HttpClient:
    return HttpClient(url, os.environ.get(arguments.key_env), arguments.timeout)


class Chat:
    """Conversation with a server."""

    def __init__(self, client: HttpClient, arguments: argparse.Namespace) -> None:
        self._client = client
        self._quiet = arguments.quiet
        self.model: str = arguments.model or self.models()[0]
        self.system: str | None = arguments.system
        self.parameters = {
            name: getattr(arguments, name)
            for name in _NUMBERS
            if getattr(arguments, name) is not None
        }
        self.messages: list[dict[str, str]] = []

    def models(self) -> list[str]:
        """Return the names of the server's models."""
        try:
            return [str(card["id"]) for card in self._client.get("/models")["data"]]
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"{self._client.url}/models did not return a list of models; check --url"
            ) from error

    def say(self, text: str) -> None:
        """Send a message and print the response as it streams."""
        messages = [*self.messages, {"role": "user", "content": text}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = {
            "model": self.model,
            "messages": [*system, *messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.parameters,
        }
        started, first, usage, parts = time.perf_counter(), 0.0, None, list[str]()
        try:
            for event in self._client.events("/chat/completions", body):
                for choice in event.get("choices", []):
                    new = (choice.get("delta") or {}).get("content")
                    if new:
                        first = first or time.perf_counter()
                        parts.append(new)
                        _show(new)
                usage = event.get("usage") or usage
        except KeyboardInterrupt:
            _show(" [stopped]")
        _show("\n")
        answer = {"role": "assistant", "content": "".join(parts)}
        self.messages = [*messages, answer]
        if usage is not None and not self._quiet:
            _statistics(usage, started, first)


def _converse(chat: Chat) -> int:
    """Read and answer lines until /quit or the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and editing
    print(f"{chat.model} at {chat._client.url}; /help lists the commands")
    while True:
        try:
            line = _line()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if line.strip() in ("/quit", "/exit"):
            return 0
        try:
            if line.startswith("/"):
                _command(chat, line)
            elif line.strip():
                chat.say(line)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)


def _line() -> str:
    """Read a line with its continuations."""
    line = input("> ")
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input('. ')}"
    return line


def _command(chat: Chat, line: str) -> None:
    """Execute a slash command."""
    name, _, rest = line[1:].partition(" ")
    rest = rest.strip()
    if name == "new":
        chat.messages = []
    elif name == "undo":
        chat.messages = chat.messages[:-2]
    elif name == "system":
        chat.system = rest or None
    elif name == "model":
        known = chat.models()
        if rest not in known:
            raise UsageError(f"models: {', '.join(known)}")
        chat.model = rest
    elif name == "set":
        key, _, value = rest.partition(" ")
        if key not in _NUMBERS:
            raise UsageError(f"/set takes {', '.join(_NUMBERS)}")
        try:
            chat.parameters |= {key: _NUMBERS[key](value)}
        except ValueError:
            raise UsageError(f"{key} must be a number, got {value!r:.80}") from None
    else:
        print(_HELP)


def _send_file(client: HttpClient, arguments: argparse.Namespace) -> int:
    """Send a request from a file and print the response."""
    name = arguments.request
    text = read_argument(name)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise UsageError(f"{name}: must be a JSON object with text, messages or prompt")
    if "text" in body:
        root = arguments.url.removesuffix("/").removesuffix("/v1")
        return _send_native(_client(arguments, root), body)
    path = "/chat/completions" if "messages" in body else "/completions"
    if body.get("stream"):
        for event in client.events(path, body):
            print(json.dumps(event, ensure_ascii=False), flush=True)
    else:
        print(json.dumps(client.post(path, body), ensure_ascii=False, indent=2))
    return 0


def _send_ini(arguments: argparse.Namespace) -> int:
    """Send the request of Inferflow's client file and print the response."""
    from nbflow.compat.inferflow.tool_ini import read_client_ini

    for name in ("prompt", "request"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} does not go with {arguments.ini}, which has a request")
    file = read_client_ini(Path(arguments.ini))
    return _send_native(_client(arguments, arguments.url or file.service), file.request)


def _send_native(client: HttpClient, body: dict[str, Any]) -> int:
    """Send an Inferflow request and print its text as it streams; return the exit code."""
    last: dict[str, Any] = {}
    for last in client.lines("", body):
        _show(str(last.get("text", "")))
    _show("\n[end_of_response_text]\n")
    if last.get("error_text"):
        print(f"error: {last['error_text']}", file=sys.stderr)
        return 1
    return 0


def _statistics(usage: dict[str, Any], started: float, first: float) -> None:
    now = time.perf_counter()
    n = int(usage.get("completion_tokens", 0))
    rate = f", then {(n - 1) / (now - first):,.0f} tokens/s" if first and n > 1 else ""
    to_first = f"; first after {(first - started) * 1e3:.0f} ms" if first else ""
    print(f"[{usage.get('prompt_tokens')} prompt tokens, {n} new{to_first}{rate}]", file=sys.stderr)
