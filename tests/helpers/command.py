"""Run a command of nbflow in the process of the tests."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from nbflow import cli


def run_command(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``nbflow WORDS`` with `text` as its input, as `subprocess.run` would."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(text))
        with (
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):  # fmt: skip
            cli.main(list(words))
    code = ended.value.code
    return subprocess.CompletedProcess(words, int(code or 0), out.getvalue(), err.getvalue())
