"""Command-line reference page, generated from the argument parsers."""

from __future__ import annotations

import argparse

from nbflow.cli import COMMANDS, make_parser

INTRODUCTION = """\
# Command line

`nbflow COMMAND --help` prints what stands here: this page is made from the same parsers.  Exit
codes: 0 done, 1 some points of a sweep failed, 2 wrong usage or input, 130 interrupted.  Every
command that takes a model may be started by `mpirun -n N`; its ranks are those of `--partition`.

| command | what it does |
|---|---|
"""


def command_line_page() -> str:
    """Return the page, in Markdown."""
    rows = [
        f"| [`nbflow {name}`](#nbflow-{name}) | {text} |" for name, (_, text) in COMMANDS.items()
    ]
    sections = [command_section(name) for name in COMMANDS]
    return INTRODUCTION + "\n".join([*rows, "", *sections])


def command_section(name: str) -> str:
    """Return the section of one command."""
    parser = make_parser(name)
    formatter = argparse.HelpFormatter(parser.prog, width=100)
    exclusive = parser._mutually_exclusive_groups
    formatter.add_usage(parser.usage, parser._actions, exclusive, prefix="")
    usage = formatter.format_help().strip()
    lines = [f"## nbflow {name}", "", _sentence(parser.description or COMMANDS[name][1]), ""]
    lines += ["```text", usage, "```", ""]
    positional, options, *groups = [_actions(group) for group in parser._action_groups]
    titles = [group.title for group in parser._action_groups[2:]]
    for title, actions in zip(["", *titles], [positional + options, *groups], strict=True):
        if actions:
            lines += [f"**{title}**", ""] if title else []
            lines += ["| argument | meaning |", "|---|---|"]
            lines += [_row(formatter, action) for action in actions] + [""]
    if parser.epilog:
        lines += ["```text", parser.epilog.strip(), "```", ""]
    return "\n".join(lines)


def _actions(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    """Return a group's arguments without --help."""
    return [
        action
        for action in group._group_actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _row(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    """Return the table row of an argument."""
    invocation = formatter._format_action_invocation(action)
    text = formatter._expand_help(action) if action.help else ""
    cells = (f"`{invocation}`", " ".join(text.split()).replace("<", "&lt;"))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
