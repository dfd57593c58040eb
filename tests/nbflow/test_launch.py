"""Starting ranks, and starting them again: any program stands for mpirun and its ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launching import MPIRUN

from nbflow import cli
from nbflow.launch import Launch
from nbflow_kernels.errors import UsageError

# ends with the next code of its arguments at each start, and counts the starts in a file
PROGRAM = (
    "import sys, pathlib; path = pathlib.Path(sys.argv[1]); n = len(path.read_text()); "
    "path.write_text('x' * (n + 1)); codes = sys.argv[2:]; "
    "sys.exit(int(codes[min(n, len(codes) - 1)]))"
)


def launch(path: Path, codes: list[int], **options) -> tuple[int, int, list[str]]:
    """Return the exit code, the number of starts, and what was told."""
    path.write_text("")
    told: list[str] = []
    command = [sys.executable, "-S", "-c", PROGRAM, str(path), *map(str, codes)]
    code = Launch(command, first_pause_s=0.001, tell=told.append, **options).run()
    return code, len(path.read_text()), told


@pytest.mark.parametrize(
    ("codes", "policy", "code", "starts"),
    [
        ([137, 0], "exit", 137, 1),
        ([137, 1, 0], "restart", 0, 3),
        ([137, 2, 0], "restart", 2, 2),  # wrong usage stays wrong
        ([0], "restart", 0, 1),
    ],
)
def test_what_is_started_again(tmp_path, codes, policy, code, starts):
    found = launch(tmp_path / "starts", codes, on_rank_failure=policy)
    assert found[:2] == (code, starts)
    assert len(found[2]) == starts - 1
    if len(found[2]) == 2:
        assert found[2][1] == (
            "nbflow launch: the ranks have ended with code 1; restart 2 of 10 in 0.002 s"
        )


def test_it_is_given_up_in_the_end(tmp_path):
    code, starts, told = launch(tmp_path / "s", [9], on_rank_failure="restart", most_restarts=2)
    assert (code, starts) == (9, 3)
    assert told[-1] == "nbflow launch: given up after 2 restarts"


def test_a_signal_ends_the_ranks_and_is_no_failure():
    begun = time.monotonic()
    ranks = Launch([sys.executable, "-S", "-c", "import time; time.sleep(60)"], "restart")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert ranks.run() == 128 + signal.SIGTERM
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "env"], "--ranks must be at least 1"),
        (["-n", "2", "--on-rank-failure", "retry", "env"], "unknown policy"),
        (["-n", "2", "launch"], "unknown command 'launch'"),
        (["-n", "2", "serv"], "did you mean 'serve'"),
        (["-n", "2", "--restarts", "0", "env"], "--restarts must be at least 1"),
    ],
)
def test_wrong_usage(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_command_starts_mpirun(capfd):
    """The launcher is any program: here one that prints what it was told to start."""
    script = f"{sys.executable} -S -c 'import sys; print(sys.argv[1:])'"
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", "-n", "3", "--mpirun", script, "run", "M", "-n", "5"])
    assert ended.value.code == 0
    wanted = ["-n", "3", sys.executable, "-P", "-m", "nbflow.cli", "run", "M", "-n", "5"]
    assert capfd.readouterr().out.strip() == str(wanted)


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install 'nbflow[mpi]'")
def test_ranks_do_not_run_modules_of_the_current_folder(tmp_path):
    for name in ("json", "http"):
        (tmp_path / f"{name}.py").write_text(f"open('executed', 'a').write({name!r})\n")
    code = "import sys; sys.path.remove(''); from nbflow.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "launch", "-n", "2", "--no-front", "serve", "--check"]
    done = subprocess.run(
        [*command, "tiny_python"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert not (tmp_path / "executed").exists()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "more", "has_front"),
    [
        ([], [], True),
        (["--no-front"], [], False),
        ([], ["--check"], False),
        ([], ["--plan"], False),
    ],
)
def test_ranks_of_a_server_are_told_of_its_front(capfd, options, more, has_front):
    script = f"{sys.executable} -S -c 'import os; print(os.environ.get(\"NBFLOW_FRONT_URL\"))'"
    served = ["serve", "tiny_python", "--port", "0", *more]
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", "-n", "2", "--mpirun", script, *options, *served])
    assert ended.value.code == 0
    assert capfd.readouterr().out.startswith("http://127.0.0.1:" if has_front else "None")


def test_a_server_whose_address_is_not_free(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = ["launch", "-n", "2", "--mpirun", "false", "serve", "tiny_python", "--port", port]
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
    assert ended.value.code == 2
    assert f"127.0.0.1:{port} is not free" in capfd.readouterr().err


def test_a_policy_that_is_none():
    with pytest.raises(UsageError, match="unknown policy"):
        Launch(["true"], "never")
