"""Real ranks behind an address that outlives them: killed one by one, and started again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest
from launching import MPIRUN
from server_process import CONFIG, Server, eventually

from nbflow.server.addresses import FRONT_SOCKET

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc"),
]

LAUNCH = (sys.executable, "-m", "nbflow.cli", "launch", "-n", "2", "--on-rank-failure", "restart")
ASKED = {"model": "tiny", "prompt": "import os", "temperature": 0, "max_tokens": 12}
LONG = ASKED | {"max_tokens": 400, "n": 32, "temperature": 1, "extra_body": {"ignore_eos": True}}


def environment(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in lines if "=" in line)


def process_of(rank: int, server: Server) -> int:
    """Return the process that is a rank of the server: the child of the one that looks after it."""
    first = server.http.get("/server_info").json()["pid"]
    if rank == 0:
        return first
    socket = environment(first)[FRONT_SOCKET]
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    ours = {pid: environment(pid) for pid in pids}
    found = {
        pid
        for pid, its in ours.items()
        if (its.get(FRONT_SOCKET), its.get("PMI_RANK")) == (socket, str(rank))
    }
    stats = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in found}
    (child,) = (pid for pid in found if int(stats[pid].split()[1]) in found)
    return child


class Asking(threading.Thread):
    """A client that waits for an answer that will not come."""

    def __init__(self, server: Server, **more: object) -> None:
        super().__init__()
        self._client = server.client()
        self._more = more
        self.answer: Exception | list | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = list(self._client.completions.create(**LONG, **self._more))
        except Exception as error:
            self.answer = error


def kill(rank: int, server: Server) -> None:
    """Kill a rank while one request waits for its whole answer, and one reads its stream."""
    pid = process_of(rank, server)
    waiting, reading = Asking(server), Asking(server, stream=True)
    eventually(lambda: server.metric("vllm:num_requests_running") > 32)
    os.kill(pid, signal.SIGKILL)
    for client in (waiting, reading):
        client.join(60)
    assert isinstance(waiting.answer, openai.InternalServerError), waiting.answer
    assert waiting.answer.status_code == 503
    assert waiting.answer.code == "unavailable"
    assert waiting.answer.response.headers["retry-after"]
    assert waiting.answer.request_id
    if rank:  # rank 0 lives for two seconds more, but nobody waits for it
        assert f"rank {rank} of 2 of the server has failed" in waiting.answer.message
    # an event of the stream, not a broken connection
    assert type(reading.answer) is openai.APIError, reading.answer
    assert reading.answer.code == "unavailable"


def test_clients_of_ranks_that_die(tmp_path):
    config = CONFIG.replace("threads = 1", 'threads = 1\npartition = "0&1"')
    with Server(config, tmp_path, (*LAUNCH, "--restarts", "1", "serve")) as server:
        client = server.client()
        expected = client.completions.create(**ASKED).choices[0].text
        kill(1, server)
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(**ASKED)
        assert refused.value.status_code == 503
        for path in ("/health", "/ready"):
            assert server.http.get(path).status_code == 503
        eventually(lambda: server.http.get("/ready").status_code == 200)
        assert client.completions.create(**ASKED).choices[0].text == expected
        kill(0, server)  # once too often: who waited was told before the launcher has ended
        assert server.ended() == 128 + signal.SIGKILL
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/ready")
    assert "given up after 1 restarts" in "".join(server.log)
