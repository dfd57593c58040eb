"""A model on two ranks: rank 0 takes the requests."""

import os
import signal
import sys

import pytest
from launching import MPIRUN
from server_process import CONFIG, Server, eventually

PROMPT = [30, 40, 50]


def check(server, offline):
    expected = offline.generate(PROMPT, max_tokens=12)
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    for _ in range(2):
        answer = server.http.post("/v1/completions", json=body).json()
        # rounding differs between partitions, but not by so much that another token is the best
        assert answer["choices"][0]["text"] == expected.text
    body |= {"n": 3, "temperature": 1.0, "seed": 1}
    first, second = (server.http.post("/v1/completions", json=body).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    vector = server.http.post("/v1/embeddings", json={"input": PROMPT}).json()
    assert len(vector["data"][0]["embedding"]) == offline.spec.hidden_size
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 400, "stream": True}
    ):
        pass  # hang up
    eventually(server.idle)


def partitioned(partition: str) -> str:
    return CONFIG.replace(
        'path = "tiny_python"', f'path = "tiny_python"\npartition = "{partition}"'
    )


def test_threads(offline, tmp_path):
    with Server(partitioned("0&1"), tmp_path) as server:
        check(server, offline)
        assert server.stop() == 0


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install 'nbflow[mpi]'")
def test_mpi(offline, tmp_path):
    program = (str(MPIRUN), "-n", "2", sys.executable, "-m", "nbflow.cli", "serve")
    with Server(partitioned("0&1"), tmp_path, program) as server:
        check(server, offline)
        os.kill(server.http.get("/server_info").json()["pid"], signal.SIGTERM)
        assert server.ended() == 0
