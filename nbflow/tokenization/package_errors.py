"""Exceptions of the tokenizer packages as `UsageError` that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nbflow_kernels.errors import MissingExtraError, UsageError


@contextmanager
def package_errors(what: str) -> Iterator[None]:
    """Turn exceptions of a package into `UsageError` that begins with `what`.

    This includes a Rust panic: ``pyo3_runtime.PanicException``, which is not an `Exception`.
    """
    try:
        yield
    except (UsageError, MissingExtraError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise UsageError(f"{what}: {str(error) or type(error).__name__:.400}") from error


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a Rust panic, whose class cannot be imported."""
    kind = type(error)
    return kind.__name__ == "PanicException" and kind.__module__ == "pyo3_runtime"
