"""`nbflow launch`: the mpirun command and refused arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from mpirun import MPIRUN, PYTHONPATH

from nbflow import cli

NBFLOW = (sys.executable, "-m", "nbflow")


def launch(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [*NBFLOW, "launch", *arguments]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, **options
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "env"], "--ranks must be at least 1"),
        (["-n", "2", "launch"], "unknown command 'launch'"),
        (["-n", "2", "serv"], "did you mean 'serve'"),
        (["-n", "2", "--mpirun", "no-such-mpirun", "env"], "'no-such-mpirun' was not found"),
    ],
)
def test_wrong_usage(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_command_becomes_the_launcher():
    """Stand-in launcher that prints its arguments and exits with a code."""
    script = f"{sys.executable} -S -c 'import sys; print(sys.argv[1:]); sys.exit(7)'"
    done = launch("-n", "3", "--mpirun", script, "run", "M", "-n", "5")
    assert done.returncode == 7
    wanted = ["-n", "3", sys.executable, "-P", "-m", "nbflow", "run", "M", "-n", "5"]
    assert done.stdout.strip() == str(wanted)


def test_signals_reach_the_launcher():
    script = f"{sys.executable} -S -u -c 'import time; print(1); time.sleep(60)'"
    command = [*NBFLOW, "launch", "-n", "2", "--mpirun", script, "env"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
def test_ranks_do_not_run_modules_of_the_current_folder(tmp_path):
    for name in ("json", "http"):
        (tmp_path / f"{name}.py").write_text(f"open('executed', 'a').write({name!r})\n")
    code = "import sys; sys.path.remove(''); from nbflow.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "launch", "-n", "2", "serve", "--check", "tiny_python"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert not (tmp_path / "executed").exists()
    assert done.returncode == 0, done.stderr
