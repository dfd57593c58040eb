"""Authentication, body limits, timeouts and concurrency limits."""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator

import httpx
import openai
import pytest
from server_process import CONFIG, Server, eventually

KEYS = ["alpha-key", "beta-key"]
LIMITED = (
    CONFIG.replace("threads = 1", 'threads = 1\ndraft = "ngram"')
    + f"""
[auth]
keys = {KEYS}
[limits]
body_bytes = "2KiB"
requests = 2
connections = 40
body_s = 0.5
slow_reader_s = 0.5
[cors]
origins = ["https://example.org"]
[models.tiny.engine]
max_sequences = 16
max_waiting = 30
"""
)
HEAD = {"authorization": f"Bearer {KEYS[1]}"}
LONG = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def limited(tmp_path_factory) -> Iterator[Server]:
    with Server(LIMITED, tmp_path_factory.mktemp("limited")) as running:
        running.http.headers.update(HEAD)
        yield running


def raw(server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_keys(limited):
    for key in KEYS:
        assert limited.client(api_key=key).models.list().data
    for key in ("gamma", KEYS[0][:-1], KEYS[0] + "x", "ü"):
        answer = httpx.get(
            f"{limited.url}/v1/models", headers={"authorization": f"Bearer {key}".encode()}
        )
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError):
        limited.client(api_key="wrong").completions.create(model="tiny", prompt="x")
    for path in ("/health", "/ready", "/"):
        assert httpx.get(limited.url + path).status_code == 200
    for path in ("/metrics", "/server_info", "/openapi.json", "/v1/models"):
        assert httpx.get(limited.url + path).status_code == 401
    assert httpx.post(f"{limited.url}/", json={"text": "x"}).status_code == 401


def test_long_bodies_are_refused_before_they_are_read(limited):
    stated = raw(limited)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\n"
    stated.sendall(f"{head}content-length: 99999999999\r\n\r\n".encode())
    assert b" 413 " in stated.recv(4096)
    unstated = raw(limited)
    unstated.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
    unstated.sendall(b"800\r\n" + b" " * 0x800 + b"\r\n" + b"800\r\n" + b" " * 0x800 + b"\r\n")
    assert b" 413 " in unstated.recv(4096)


def test_clients_that_send_all_of_the_body_first_see_the_refusal(server):
    """Python's http.client sends the whole body first; an early close would reset it."""
    host, port = server.url.removeprefix("http://").split(":")
    for head in ({}, {"transfer-encoding": "chunked"}):
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        body = (b" " * 2**20 for _ in range(16)) if head else b" " * 2**24
        connection.request("POST", "/v1/completions", body, head, encode_chunked=bool(head))
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["code"] == "body_too_large"
        connection.close()


def test_slow_senders_are_not_waited_for(limited):
    body = raw(limited)
    text = f"POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\n"
    body.sendall(f'{text}content-length: 50\r\n\r\n{{"prompt"'.encode())
    assert b" 408 " in body.recv(4096)


def test_a_long_head_is_refused_while_it_arrives(limited):
    long = raw(limited)
    with contextlib.suppress(ConnectionError):  # reset: the server leaves the rest unread
        long.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * 200_000)  # and never its end
        while answer := long.recv(4096):  # until the connection ends
            assert b" 200 " not in answer


def test_too_many_requests(limited):
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stream = stack.enter_context(limited.http.stream("POST", "/v1/completions", json=LONG))
            assert stream.status_code == 200
        refused = limited.http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert limited.http.get("/health").status_code == 200
    eventually(limited.idle)  # both clients are gone, and what they asked for with them
    queue = limited.http.post("/v1/completions", json={"prompt": "x", "n": 100, "max_tokens": 50})
    assert queue.status_code == 429
    assert "wait" in queue.json()["error"]["message"]
    eventually(limited.idle)


def send(server, body) -> socket.socket:
    """Send a request without reading the response."""
    connection = raw(server)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def aborted(server) -> float:
    """Return the number of aborted sequences."""
    lines = server.http.get("/metrics").text.splitlines()
    name = 'vllm:request_success_total{finished_reason="abort"'
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("streams", [False, True])
def test_hanging_up_ends_the_work(limited, streams):
    before = aborted(limited)
    connection = send(limited, LONG | {"n": 16, "stream": streams})
    eventually(lambda: not limited.idle())
    connection.close()
    eventually(lambda: n_requests(limited) == 0 and limited.idle())
    assert aborted(limited) > before


def test_a_slow_reader_is_disconnected(limited):
    # 16 x 511 chunks of more than a kilobyte: more than the buffers of the kernel hold
    connection = send(limited, LONG | {"n": 16, "logprobs": 20})
    eventually(lambda: n_requests(limited) == 1)
    eventually(lambda: n_requests(limited) == 0)
    eventually(limited.idle)
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(2**20):
            assert b"[DONE]" not in data


def n_requests(server) -> int:
    return server.http.get("/server_info").json()["requests"]


def test_too_many_connections(limited):
    with contextlib.ExitStack() as stack:
        for _ in range(45):
            stack.enter_context(raw(limited))
        eventually(lambda: limited.http.get("/health").status_code == 503)
    eventually(lambda: limited.http.get("/health").status_code == 200)


def test_cors(limited):
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    asked |= {"access-control-request-headers": "authorization,content-type"}
    allowed = httpx.options(f"{limited.url}/v1/completions", headers=asked)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    other = httpx.options(
        f"{limited.url}/v1/completions", headers=asked | {"origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in other.headers
    refused = httpx.get(f"{limited.url}/v1/models", headers={"origin": "https://example.org"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://example.org"


def test_proposed_tokens_change_no_answer(limited, client):
    body = {"model": "tiny", "prompt": "x = 1\nx = 1\nx = 1\n", "max_tokens": 40, "seed": 2}
    for temperature in (0, 0.9):
        plain = client.completions.create(**body, temperature=temperature)
        answer = limited.http.post("/v1/completions", json=body | {"temperature": temperature})
        assert answer.json()["choices"][0]["text"] == plain.choices[0].text
