"""``python -m nbflow_ptx FILE``: what a PTX file or a cubin holds."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nbflow_ptx.errors import PtxError
from nbflow_ptx.execution.program import bind
from nbflow_ptx.lint import lint
from nbflow_ptx.parsing.linker import link
from nbflow_ptx.parsing.parser import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if all is well, 1 if a kernel is not supported, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m nbflow_ptx", description=__doc__)
    parser.add_argument("file", type=Path, help="a .ptx text or a cubin")
    parser.add_argument("--lint", action="store_true", help="print static facts of every kernel")
    parser.add_argument("--arch", help="what ptxas compiles for (default: the target in the file)")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    options = parser.parse_args(arguments)
    try:
        data = options.file.read_bytes()
        if options.lint or options.json or data[:4] == b"\x7fELF":
            report = lint(data, options.arch)
            if options.json:
                print(json.dumps(dataclasses.asdict(report), indent=1))
            else:
                print(report)
            return 0
        return _check(data)
    except (OSError, PtxError) as e:
        print(f"{options.file}: {e}", file=sys.stderr)
        return 2


def _check(data: bytes) -> int:
    """Say of every kernel whether the emulator can run it."""
    module = parse(data)
    bad = 0
    for name in module.entries:
        try:
            program = bind(link(module, name))
            print(f"{name}: {len(program.kernel.code)} instructions, all supported")
        except PtxError as e:
            bad += 1
            print(f"{name}: {e}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
