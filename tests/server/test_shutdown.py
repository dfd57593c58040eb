"""Shutdown under load, and recovery from failing steps."""

import contextlib
import json
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from server_process import CONFIG, Server, eventually

ASKED = {"prompt": "import os", "temperature": 0, "ignore_eos": True, "max_tokens": 200}


def test_sigterm_loses_no_accepted_request(tmp_path):
    with Server(CONFIG, tmp_path) as server:
        expected = server.http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
        answers: list[httpx.Response] = []
        refused: list[int] = []

        def one(client):
            answers.append(client.post("/v1/completions", json=ASKED))

        clients = [httpx.Client(base_url=server.url, timeout=60) for _ in range(24)]
        threads = [threading.Thread(target=one, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        eventually(lambda: len(server.log) > 2 and server.metric("vllm:num_requests_running") > 4)
        server.process.send_signal(signal.SIGTERM)
        while server.process.poll() is None and any(t.is_alive() for t in threads):
            try:
                late = httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=5)
                refused.append(late.status_code)
                health = httpx.get(f"{server.url}/ready", timeout=5).status_code
                assert health == 503
            except httpx.TransportError:
                break
            time.sleep(0.01)
        for thread in threads:
            thread.join(60)
        assert server.ended() == 0
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) > 4
        # accepted requests are complete, later ones are refused
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == expected
        assert refused
        assert set(refused) == {503}
        stopped = server.events()[-1]
        assert stopped["event"] == "stopped"


STUCK = (sys.executable, str(Path(__file__).parents[1] / "helpers" / "stuck_server.py"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("text", "second"), [("stuck", signal.SIGINT), ("stuck in C", signal.SIGTERM)]
)
def test_the_second_signal_ends_the_server_whatever_its_threads_do(tmp_path, text, second):
    """Python signal handlers cannot run while a thread in C code holds the GIL."""
    with Server(CONFIG, tmp_path, STUCK) as server:
        body = json.dumps({"prompt": text}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        head += "content-type: application/json\r\n\r\n"
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            eventually(lambda: "stuck\n" in server.log)
            server.process.send_signal(signal.SIGTERM)
            if text == "stuck":
                eventually(lambda: any('"draining"' in line for line in list(server.log)))
            status = Path(f"/proc/{server.process.pid}/status")  # two pending signals are one
            eventually(lambda: "ShdPnd:\t0000000000000000" in status.read_text())
            assert server.process.poll() is None
            assert server.stop(second) == 128 + second


def test_a_stuck_thread_does_not_keep_the_server_from_ending(tmp_path):
    """One signal suffices once drain_s is over; disconnected clients do not delay it."""
    with Server(CONFIG + "[limits]\ndrain_s = 0.5\n", tmp_path, STUCK) as server:
        with contextlib.suppress(httpx.ReadTimeout):
            server.http.post("/v1/completions", json={"prompt": "stuck"}, timeout=1)
        assert "stuck\n" in server.log
        expected = server.http.post("/v1/completions", json=ASKED)
        assert expected.status_code == 200
        assert server.http.get("/server_info").json()["requests"] == 0
        assert server.stop() == 0
        assert server.events()[-1]["event"] == "stopped"


def test_a_failing_step_fails_its_requests_and_no_others(tmp_path):
    program = Path(__file__).parents[1] / "helpers" / "failing_server.py"
    with Server(CONFIG, tmp_path, (sys.executable, str(program))) as server:
        client = server.client()

        def ask(prompt, **more):
            return client.completions.create(
                model="tiny", prompt=prompt, temperature=0, max_tokens=6, **more
            )

        expected = ask([20, 21, 22]).choices[0].text
        for _ in range(3):
            with pytest.raises(openai.InternalServerError) as failed:
                ask([20, 666, 22])
            assert failed.value.code == "step_failed"
        with pytest.raises(openai.APIError, match="step failed"):
            list(ask([20, 666, 22], stream=True))
        assert ask([20, 21, 22]).choices[0].text == expected
        assert server.http.get("/health").status_code == 200
        eventually(server.idle)
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        assert server.stop() == 0
