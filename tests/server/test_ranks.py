"""Server on two ranks or two replicas: requests, shutdown, and failure of a rank."""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import httpx
import pytest
from mpirun import MPIRUN
from server_process import CONFIG, Server, eventually

import nbflow
from nbflow.planner import Device, Link, Machine, machine_toml

FAILING = (sys.executable, str(Path(__file__).parents[1] / "helpers" / "failing_server.py"))
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
        pass  # disconnect
    eventually(server.idle)


def partitioned(partition: str) -> str:
    return CONFIG.replace(
        'path = "tiny_python"', f'path = "tiny_python"\npartition = "{partition}"'
    )


def test_threads(offline, tmp_path):
    config = partitioned("0&1") + "\n[models.tiny.engine]\nmax_sequences = 3\n"
    with Server(config, tmp_path) as server:
        check_wrong_requests(server)
        check(server, offline)
        assert server.stop() == 0


def check_wrong_requests(server):
    """The request is refused, and the ranks continue."""
    body = {"prompt": PROMPT, "max_tokens": 4}
    for wrong, words in (
        ({"use_beam_search": True, "n": 4}, "needs 4 sequences, but at most 3"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids must hold ids in 0..2047"),
    ):
        answer = server.http.post("/v1/completions", json=body | wrong)
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]


def check_searches(server, offline):
    """Beam search and a draft model on any replica or rank."""
    found = nbflow.beam_search(offline, PROMPT, 8, num_beams=3, n=2)
    body = {"prompt": PROMPT, "max_tokens": 8, "use_beam_search": True, "beam_width": 3, "n": 2}
    for _ in range(2):
        answer = server.http.post("/v1/completions", json=body).json()
        assert [c["text"] for c in answer["choices"]] == [g.text for g in found]
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


def drafted(partition: str, **engine: str) -> str:
    options = "".join(f'\n{name} = "{value}"' for name, value in engine.items())
    config = partitioned(partition).replace("threads = 1", 'threads = 1\ndraft = "tiny_python"')
    return f"{config}\n[models.tiny.engine]{options}\n"


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
@pytest.mark.parametrize(("partition", "n"), [("0&1", 1), ("auto", 2)])
def test_mpi(offline, tmp_path, partition, n):
    """Tensor parallel; with slow links the planner chooses replicas for throughput."""
    device = Device("d", 1e9, 1e9, {"f32": 1e12})
    slow = Machine("slow", (device,) * 2, 2, {"host": Link(1.0, 1e6)})
    (tmp_path / "slow.toml").write_text(machine_toml(slow))
    program = (sys.executable, "-m", "nbflow", "launch", "-n", "2", "serve")
    config = drafted(partition)
    if partition == "auto":
        more = 'threads = 1\noptimize = "throughput"\nmachine = "slow.toml"'
        config = config.replace("threads = 1", more)
    with Server(config, tmp_path, program) as server:
        check(server, offline)
        check_searches(server, offline)
        about = server.http.get("/server_info").json()
        assert about["models"]["tiny"]["replicas"] == n
        check_sigterm(server)


def check_sigterm(server):
    """The launcher forwards the signal to rank 0, which finishes all accepted requests."""
    body, statuses = {"prompt": PROMPT, "max_tokens": 60, "n": 8}, []

    def ask():
        statuses.append(server.http.post("/v1/completions", json=body).status_code)

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    eventually(lambda: server.http.get("/server_info").json()["requests"] == 3)
    assert server.stop() == 0
    for client in clients:
        client.join(60)
    assert statuses == [200] * 3


SERVE = (sys.executable, "-m", "nbflow", "serve")


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
@pytest.mark.parametrize(("partition", "number"), [("0&1", signal.SIGTERM), ("0/1", signal.SIGINT)])
def test_mpirun_passes_a_signal_to_every_rank_and_all_streams_end_whole(
    tmp_path, partition, number
):
    """The other ranks execute rank 0's steps until it has drained."""
    with Server(partitioned(partition), tmp_path, (str(MPIRUN), "-n", "2", *SERVE)) as server:
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with contextlib.ExitStack() as stack:
            streams = [
                stack.enter_context(server.http.stream("POST", "/v1/completions", json=body))
                for _ in range(3)
            ]
            server.process.send_signal(number)
            for stream in streams:
                assert stream.read().endswith(b"data: [DONE]\n\n")
                assert b'"finish_reason":"length"' in stream.content
        assert server.ended() == 0
        assert any(event["event"] == "stopped" for event in server.events())


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
def test_a_second_signal_to_mpirun_ends_every_rank(tmp_path):
    with Server(partitioned("0&1"), tmp_path, (str(MPIRUN), "-n", "2", *SERVE)) as server:
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 64}
        pid = server.http.get("/server_info").json()["pid"]
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: any('"draining"' in line for line in list(server.log)))
            assert server.stop() != 0
            with pytest.raises(httpx.TransportError):
                stream.read()
        eventually(lambda: not Path(f"/proc/{pid}").exists())


def ranks_of(server: Server) -> list[int]:
    """Return the processes of the ranks: the children of rank 0's parent, rank 0 first."""

    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    first = server.http.get("/server_info").json()["pid"]
    launcher = parent(first)
    found = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return sorted(map(int, found), key=lambda pid: pid != first)


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
def test_a_rank_that_is_killed_ends_the_server_with_a_report(tmp_path):
    program = (sys.executable, "-m", "nbflow", "launch", "-n", "2", "serve")
    with Server(partitioned("0&1"), tmp_path, program) as server:
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 64}
        ranks = ranks_of(server)
        assert len(ranks) == 2
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200
            os.kill(ranks[1], signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                stream.read()
        assert server.ended() not in (0, 2)
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/ready")


def test_a_rank_that_fails_makes_the_server_say_so(tmp_path):
    """Tensor-parallel ranks fail together: running requests get 500, later ones 503."""
    with Server(partitioned("0&1"), tmp_path, FAILING) as server:
        assert server.http.get("/health").status_code == 200
        body = {"prompt": [20, 666, 22], "max_tokens": 5}
        assert server.http.post("/v1/completions", json=body).status_code == 500
        eventually(lambda: server.http.get("/health").status_code == 503)
        assert server.http.get("/ready").status_code == 503
        later = server.http.post("/v1/completions", json=body | {"prompt": [1, 2]})
        assert later.status_code == 503
        assert later.headers["retry-after"]
        assert server.stop() == 0


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]'")
def test_a_replica_that_fails(tmp_path):
    program = (str(MPIRUN), "-n", "2", *FAILING)
    with Server(drafted("0/1", on_failure="stop"), tmp_path, program) as server:
        pid = server.http.get("/server_info").json()["pid"]
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            fatal = server.http.post("/v1/completions", json={"prompt": [20, 667, 22]})
            assert fatal.status_code == 500
            assert "step failed" not in stream.read().decode()  # the other replica's
        eventually(lambda: server.http.get("/health").status_code == 503)
        assert server.http.post("/v1/completions", json=body).status_code == 503
        os.kill(pid, signal.SIGTERM)
        assert server.ended() == 0
