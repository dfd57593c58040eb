"""Optional packages of the experiments, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from nbflow_kernels.errors import MissingExtraError, install_command


def require(module: str, extra: str = "experiments") -> Any:
    """Import and return `module`, or raise `MissingExtraError` naming the extra that holds it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"this needs the package {package!r}; install it: {install_command(extra)}"
        ) from error
