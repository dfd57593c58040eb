"""`nbflow env`: versions, processor and MPI, for bug reports."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any

from nbflow.utils import system
from nbflow_kernels.cpu.cpu_quota import available_cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    facts = environment()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    for key, value in facts.items():
        if isinstance(value, dict):
            print(f"{key}:")
            for name, text in value.items():
                print(f"  {name:<14} {text}")
        else:
            print(f"{key:<16} {value}")
    return 0


def environment() -> dict[str, Any]:
    """Return versions, hardware and environment variables that affect results."""
    from nbflow_kernels.compilation.jit_cache import cache_root
    from nbflow_kernels.cuda import detect

    found = detect()
    version = ".".join(str(n) for n in found.driver_version or ())
    cuda = f"{found.n_devices} devices, driver for CUDA {version}"
    if found.limitation:
        cuda += f"; {found.limitation}"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": system.processor_name(),
        "cores": os.cpu_count(),
        "cores_available": available_cores(),
        "memory_bytes": system.memory_bytes(),
        "kernel_cache": str(cache_root()),
        "cuda": found.reason or cuda,
        "packages": system.package_versions(),
        "variables": system.relevant_variables(),
    }
