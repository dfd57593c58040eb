"""Command line: table of commands, imported on use.

A command is a module with ``add_arguments(parser)`` and ``run(arguments) -> int`` (the exit code).
Exit codes: 0 done, 1 some points failed, 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import NoReturn

import nbflow
from nbflow.distributed import failure
from nbflow_kernels.errors import MissingExtraError, UsageError, unknown_name
from nbflow_kernels.plugins import load_plugins

COMMANDS = {
    "run": ("nbflow.cli.commands.run", "continue a prompt"),
    "fill-mask": ("nbflow.cli.commands.fill_mask", "fill [MASK] with an encoder"),
    "classify": ("nbflow_experiments.commands.classify", "label texts, and score a labelled file"),
    "serve": ("nbflow.cli.commands.serve", "serve models over HTTP"),
    "client": ("nbflow.cli.commands.client", "chat with a server"),
    "warm": ("nbflow.cli.commands.warm", "compile a model's kernels ahead of time"),
    "bench": ("nbflow.cli.commands.bench", "time prompt processing and generation"),
    "sweep": ("nbflow_experiments.commands.sweep", "run a sweep and record it"),
    "report": ("nbflow_experiments.commands.report", "draw the figures of a recorded sweep"),
    "export": ("nbflow_experiments.commands.export", "print a table of a recorded sweep"),
    "analyze": ("nbflow_experiments.commands.analyze", "errors of tensors, layers, matrices"),
    "perplexity": ("nbflow_experiments.commands.perplexity", "perplexity and divergence of a text"),
    "choices": ("nbflow_experiments.commands.choices", "answer multiple-choice questions"),
    "pull": ("nbflow.cli.commands.pull", "download a model from the Hugging Face Hub"),
    "compare": ("nbflow_experiments.commands.compare", "compare measured points"),
    "compare-files": (
        "nbflow_experiments.commands.compare_files",
        "compare checkpoints of a model with its float32 reference",
    ),
    "board": ("nbflow_experiments.commands.board", "rank weight formats at equal stored bits"),
    "reproduce": (
        "nbflow_experiments.commands.reproduce",
        "measure published tables of quality",
    ),
    "inspect": ("nbflow.cli.commands.inspect", "list the tensors of a weight file"),
    "quantize": ("nbflow.cli.commands.quantize", "write a checkpoint in a weight format"),
    "imatrix": ("nbflow_experiments.commands.imatrix", "collect an importance matrix"),
    "launch": ("nbflow.cli.commands.launch", "run a command on several MPI ranks"),
    "plan": ("nbflow.cli.commands.plan", "predict partitions of a model on a machine"),
    "spec": ("nbflow.cli.commands.spec", "show or check a model specification"),
    "verify": (
        "nbflow_experiments.commands.verify",
        "compare a specification with transformers or recorded values",
    ),
    "tokenize": ("nbflow.cli.commands.tokenize", "show the tokens of a text"),
    "env": ("nbflow.cli.commands.env", "show versions, processor and MPI"),
}


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit with its code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(f"nbflow {nbflow.__version__}")
        sys.exit(0)
    try:
        failure.install()
    except UsageError as error:
        print(f"nbflow: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(_guarded(arguments[0], arguments[1:]))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: nbflow COMMAND ...",
            "",
            "commands:",
            *lines,
            "",
            "nbflow COMMAND --help lists the options of a command",
        ]
    )


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are one line: the usage of some commands fills a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def make_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command of `COMMANDS`."""
    module, summary = COMMANDS[name]
    parser = _Parser(prog=f"nbflow {name}", description=summary)
    import_module(module).add_arguments(parser)
    return parser


def _guarded(name: str, arguments: list[str]) -> int:
    """Run a command; convert errors to messages and exit codes."""
    try:
        if name not in COMMANDS:
            raise unknown_name("command", name, COMMANDS)
        if name in ("run", "serve", "warm", "bench"):
            nbflow.compile_early()
        parsed = make_parser(name).parse_args(arguments)
        load_plugins(getattr(parsed, "plugins", ()))
        return int(import_module(COMMANDS[name][0]).run(parsed))
    except BrokenPipeError:  # the reader of stdout has closed it, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, MissingExtraError, OSError) as error:
        return _refused(name, error)
    except KeyboardInterrupt:
        return 130


def _refused(name: str, error: Exception) -> int:
    """Print an error once, and stop all ranks if only some of them raised it."""
    from nbflow.distributed import world
    from nbflow.distributed.mpi import MpiComm

    message = f"nbflow {name}: error: {error}"
    try:
        comm = world()
    except MissingExtraError:
        comm = None
    if comm is None or comm.rank == 0:
        print(message, file=sys.stderr)
    if isinstance(comm, MpiComm) and not comm.all_end():
        failure.stop_all(f"{message}\n" if comm.rank else "")
    return 2
