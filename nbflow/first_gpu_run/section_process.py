"""The process of a section: ``python -m nbflow.first_gpu_run.section_process NAME DIR ...``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbflow.first_gpu_run.sections import EMULATED_ARRAYS, Context, Section, Skipped, section
from nbflow_kernels.errors import MissingExtraError


def run(chosen: Section, context: Context) -> dict[str, str]:
    """Run a section; return its status and the reason if it did not end well."""
    module, name = chosen.function.split(".")
    try:
        function: Callable[..., None] = getattr(
            importlib.import_module(f"nbflow.first_gpu_run.{module}"), name
        )
        function(context, *chosen.arguments)
    except Skipped as skipped:
        return {"status": "skipped", "reason": str(skipped)}
    except MissingExtraError as missing:
        return {"status": "skipped", "reason": str(missing)}
    except Exception as error:
        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:2000]}
    return {"status": "ok"}


def main() -> None:
    """Run the section that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--emulator", action="store_true")
    arguments = parser.parse_args()
    if arguments.emulator:  # the device with the most kinds of kernels
        importlib.import_module(EMULATED_ARRAYS).reset(arch="sm_90")
    with os.fdopen(arguments.channel, "w", encoding="utf-8") as channel:

        def send(said: dict[str, Any]) -> None:
            channel.write(json.dumps(said, default=str) + "\n")
            channel.flush()

        context = Context(arguments.emulator, arguments.limit, arguments.folder, send)
        send({"end": run(section(arguments.name), context)})


if __name__ == "__main__":
    main()
