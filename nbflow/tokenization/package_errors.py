"""Errors of the packages that tokenizers are made with, as errors that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nbflow_kernels.errors import MissingExtraError, UsageError


@contextmanager
def package_errors(what: str) -> Iterator[None]:
    """Raise `UsageError` for what a package raises inside, a panic of compiled Rust included.

    A panic arrives as ``pyo3_runtime.PanicException``, which is not an `Exception`.  Interrupts and
    exits pass.

    Parameters
    ----------
    what : str
        File and what is wrong with it; begins the message.
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
    """Return whether compiled Rust has panicked; the class cannot be imported."""
    kind = type(error)
    return kind.__name__ == "PanicException" and kind.__module__ == "pyo3_runtime"
