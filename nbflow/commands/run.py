"""`nbflow run`: continue a prompt, printing as it goes."""

from __future__ import annotations

import argparse
import json
import sys
import time

from nbflow.commands.chat_options import add_chat_arguments, chat_ids, is_chat
from nbflow.commands.options import add_model_arguments, load_model, speaks
from nbflow.decoding import STRATEGIES
from nbflow.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("-p", "--prompt", help="text to continue (default: none)")
    add_chat_arguments(parser)
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=128, help="new tokens at most (128)"
    )
    parser.add_argument("--decoding", default="greedy", help=", ".join(STRATEGIES))
    parser.add_argument("--temperature", type=float, help="divide the logits by this")
    parser.add_argument("--top-k", type=int, help="for --decoding top_k")
    parser.add_argument("--top-p", type=float, help="for --decoding top_p")
    parser.add_argument("--min-p", type=float, help="for --decoding min_p")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (0)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("-q", "--quiet", action="store_true", help="no line of statistics")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    chat = is_chat(arguments)
    with load_model(arguments) as model:
        if not model.participates:
            return 0
        if chat:
            prompt = chat_ids(model.tokenizer, arguments, arguments.prompt)
        else:
            prompt = _prompt_ids(model.tokenizer, arguments.prompt or "", arguments.parse_special)
        request = model.make_request(
            prompt,
            arguments.max_tokens,
            arguments.decoding,
            arguments.seed,
            arguments.ignore_eos,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
        )
        request.wants_logprobs = arguments.json
        streams = speaks(model) and not arguments.json
        decoder = model.tokenizer.decode_stream()
        started = time.perf_counter()
        first = None
        if streams:
            shown_prompt = "".join(decoder.push(i) for i in prompt)
            _show("" if chat else shown_prompt)
        shown = 0
        for _ in model.run_requests([request]):
            first = first or time.perf_counter()
            if streams:
                _show("".join(decoder.push(i) for i in request.ids[shown:]))
                shown = len(request.ids)
        ended = time.perf_counter()
        if not speaks(model):
            return 0
        if streams:
            print(decoder.finish())
        if arguments.json:
            print(
                json.dumps(
                    {
                        "prompt": arguments.prompt or "",
                        "prompt_ids": prompt,
                        "text": model.tokenizer.decode(request.ids),
                        "ids": request.ids,
                        "logprobs": request.logprobs,
                        "finish_reason": request.finish_reason,
                    }
                )
            )
        elif not arguments.quiet:
            _statistics(
                len(prompt), len(request.ids), (first or ended) - started, ended - (first or ended)
            )
    return 0


def _prompt_ids(tokenizer: Tokenizer, text: str, parse_special: bool) -> list[int]:
    """Return the prompt's ids; an empty prompt begins with the first token the model knows."""
    ids = tokenizer.encode(text, add_special_tokens=True, parse_special=parse_special)
    return ids or [0 if tokenizer.bos_id is None else tokenizer.bos_id]


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _statistics(n_prompt: int, n_new: int, to_first_s: float, rest_s: float) -> None:
    rate = f", then {(n_new - 1) / rest_s:,.0f} tokens/s" if n_new > 1 and rest_s > 0 else ""
    print(
        f"[{n_prompt} prompt tokens, {n_new} new; first after {to_first_s * 1e3:.0f} ms{rate}]",
        file=sys.stderr,
    )
