"""What clients see of a server's address while rank 0 behind it answers, dies, and is not there.

Rank 0 is a socket here on which each test says what it sends, byte by byte, and where it breaks
off; `tests/mpi/test_front.py` has real ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbflow.front.front import Front
from nbflow.server import addresses
from nbflow.server.addresses import FRONT_SOCKET, listen_behind_front
from nbflow.supervise import FAILURES, _tell_front

ASK = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\ncontent-length: 2\r\n\r\n{}"
)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
SSE = STREAM % b"text/event-stream; charset=utf-8"
WAIT_S = 20.0


class Rank:
    """Rank 0, as far as the front sees it."""

    def __init__(self, front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in front.environment().items():
            monkeypatch.setenv(name, value)
        self.listener, self.url = listen_behind_front()
        self.listener.settimeout(WAIT_S)
        self.listener.listen()

    def accept(self, *ends: bytes) -> tuple[socket.socket, bytes]:
        """Return the next link, and what has come on it, up to one of these ends."""
        link = self.listener.accept()[0]
        link.settimeout(WAIT_S)
        return link, read_to(link, *(ends or (b"\r\n\r\n",)))

    def die(self, *links: socket.socket) -> None:
        """Take the links along, as the end of a process does."""
        for link in (self.listener, *links):
            link.close()


def read_to(link: socket.socket, *ends: bytes) -> bytes:
    data = b""
    while not data.endswith(ends):
        more = link.recv(65536)
        assert more, data
        data += more
    return data


def read_all(client: socket.socket) -> bytes:
    data = b""
    while more := client.recv(65536):
        data += more
    return data


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


@pytest.fixture
def front() -> Iterator[Front]:
    with Front("127.0.0.1", 0, 8, 0.5, 1.0) as running:
        yield running


@pytest.fixture
def rank(front: Front, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    found = Rank(front, monkeypatch)
    yield found
    found.die()


def connect(front: Front, sent: bytes = b"") -> socket.socket:
    host, port = front.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=WAIT_S)
    client.sendall(sent)
    return client


def error_of(answer: bytes) -> dict:
    """Check that an answer is OpenAI's error for a server that is not there, and return it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nretry-after: 5" in head
    assert b"\r\nconnection: close" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("service_unavailable", "unavailable")
    return error


# ---- nobody behind --------------------------------------------------------------------------


def test_who_asks_while_there_are_no_ranks(front):
    answer = read_all(connect(front, ASK))
    assert error_of(answer)["message"] == "the server is starting"
    assert b"\r\nx-request-id: mine\r\n" in answer
    front.say("restarting", "again")
    for path in ("/health", "/ready?x"):
        answer = read_all(connect(front, f"GET {path} HTTP/1.1\r\n\r\n".encode()))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert answer.endswith(b'\r\n\r\n{"status": "restarting"}')
    bare = read_all(connect(front, b"HEAD /v1/models HTTP/1.1\r\n\r\n"))
    assert bare.startswith(b"HTTP/1.1 503 ")
    assert bare.endswith(b"\r\n\r\n")


def test_whose_body_is_still_on_its_way(front):
    """It is read, or the connection would be reset and the answer lost."""
    client = connect(front, ASK.replace(b": 2\r", b": 200000\r"))
    assert read_to(client, b"}}").startswith(b"HTTP/1.1 503 ")
    client.sendall(b"x" * 200_000)
    assert client.recv(1) == b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 70_000, 431),
    ],
)
def test_what_is_no_request(front, sent, status):
    answer = read_all(connect(front, sent))
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_heads_that_do_not_come_and_too_many_connections(front):
    begun = time.monotonic()
    clients = [connect(front, b"GET" * (i % 2)) for i in range(8)]
    assert error_of(read_all(connect(front)))["message"] == "too many connections"
    for client in clients:
        assert client.recv(1) == b""  # after header_s
    assert 0.3 < time.monotonic() - begun < WAIT_S


# ---- passing on -----------------------------------------------------------------------------


def test_requests_one_behind_the_other(front, rank):
    """Kept alive, pipelined, HEAD, and a chunked body: each gets its own answer."""
    assert rank.url == front.url
    client = connect(front, ASK + b"HEAD /a HTTP/1.1\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n")
    link, first = rank.accept(b"{}")
    assert first.startswith(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
    link.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none")
    second = read_to(link, b"\r\n\r\n")
    assert second.startswith(b"HEAD /a HTTP/1.1\r\n")
    assert second.count(b"x-forwarded-for: 127.0.0.1\r\n") == 1
    assert b"6.6.6.6" not in second
    link.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n")
    assert read_to(client, b"\r\n\r\n", b"one").endswith((b"one", b"3\r\n\r\n"))
    client.sendall(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
    link_to = read_to(link, b"ab\r\n")
    assert b"x-request-id: " in link_to  # the front gives one, which its own answers have, too
    client.sendall(b"0\r\n\r\nGET /last HTTP/1.0\r\n\r\n")
    assert read_to(link, b"0\r\n\r\n") == b"0\r\n\r\n"
    link.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nthree")
    read_to(link, b"HTTP/1.0\r\n", b"\r\n\r\n")
    link.sendall(b"HTTP/1.1 200 OK\r\n\r\nto the end")
    link.close()
    assert read_all(client).endswith(b"\r\n\r\nthreeHTTP/1.1 200 OK\r\n\r\nto the end")


def test_who_waits_to_be_asked_for_the_body(front, rank):
    client = connect(front, ASK[:-4] + b"expect: 100-continue\r\n\r\n")
    link, _ = rank.accept()
    link.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert read_to(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(b"{}")
    assert read_to(link, b"{}") == b"{}"
    link.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert read_to(client, b"\r\n\r\n") == b"HTTP/1.1 204 No Content\r\n\r\n"


def test_who_is_answered_before_the_end_of_the_body(front, rank):
    client = connect(front, ASK.replace(b": 2\r", b": 99999999\r"))
    link, _ = rank.accept(b"{}")
    link.sendall(b"HTTP/1.1 413 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    client.sendall(b"x" * 100_000)
    assert read_all(client).startswith(b"HTTP/1.1 413 No")


def test_who_is_answered_before_the_end_of_the_body_and_goes_on(front, rank):
    client = connect(front, ASK[:-1])
    link, _ = rank.accept(b"{")
    link.sendall(b"HTTP/1.1 401 No\r\ncontent-length: 2\r\n\r\nno")
    assert read_to(client, b"no")
    client.sendall(b"}" + ASK)
    assert read_to(link, b"{}").startswith(b"}POST ")  # rank 0 gets all of both


def test_a_body_that_is_still_on_its_way_when_the_ranks_end(front, rank):
    client = connect(front, ASK[:-1])
    link, _ = rank.accept(b"{")
    rank.die(link)
    error_of(read_to(client, b"}}"))
    client.sendall(b"}")


def test_a_chunked_body_that_is_none(front, rank):
    head = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    client = connect(front, head)
    link, _ = rank.accept()
    client.sendall(b"no size\r\n")
    assert read_all(client).startswith(b"HTTP/1.1 400 ")
    assert link.recv(1) == b""


def test_hanging_up_reaches_rank_0(front, rank):
    client = connect(front, ASK)
    link, _ = rank.accept(b"{}")
    client.close()
    assert link.recv(1) == b""


def test_a_slow_reader_slows_rank_0_down_and_is_disconnected(front, rank):
    client = connect(front, ASK)
    link, _ = rank.accept(b"{}")
    link.sendall(SSE)
    link.settimeout(0.3)
    sent = 0
    with contextlib.suppress(TimeoutError, ConnectionError):
        while sent < 100e6:
            sent += link.send(chunk(b"x" * 60_000))
    assert sent < 32e6  # what the buffers of the kernel and of the front hold
    link.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionResetError):
        assert link.recv(1) == b""  # after slow_reader_s
    client.close()


# ---- ranks that end -------------------------------------------------------------------------


def test_a_request_whose_answer_has_not_begun(front, rank):
    client = connect(front, ASK)
    link, _ = rank.accept(b"{}")
    link.sendall(b"HTTP/1.1 200 OK\r\ncontent-le")  # not all of its head
    rank.die(link)
    answer = read_all(client)
    assert error_of(answer)["message"] == "the server's ranks have ended"
    assert b"\r\nx-request-id: mine\r\n" in answer


EVENT = b'data: {"a": 1}\n\n'


@pytest.mark.parametrize(
    ("kind", "begun", "ends_well"),
    [
        (b"text/event-stream", b"", True),
        (b"text/event-stream", chunk(EVENT), True),
        (b"text/event-stream", chunk(EVENT) + chunk(EVENT)[:-1], False),  # within a chunk
        (b"text/event-stream", chunk(EVENT) + chunk(EVENT)[:9], False),
        (b"text/event-stream", chunk(EVENT) + b"1", False),
        (b"text/event-stream", chunk(EVENT[:-1]), False),  # within an event
        (b"application/json", chunk(b'{"text": "a"}\n\n'), True),
        (b"text/plain", chunk(EVENT), False),
    ],
)
def test_a_stream_that_has_begun(front, rank, kind, begun, ends_well):
    client = connect(front, ASK)
    link, _ = rank.accept(b"{}")
    link.sendall(STREAM % kind + begun)
    assert read_to(client, begun or b"\r\n\r\n")
    rank.die(link)
    if not ends_well:
        assert read_all(client) == b""  # without the last chunk: clients see that it is not whole
        return
    last = read_to(client, b"\r\n0\r\n\r\n")
    size, _, rest = last.partition(b"\r\n")
    content = rest[: int(size, 16)]
    assert rest == content + b"\r\n0\r\n\r\n"
    first, *others = content.split(b"\n\n")
    assert others == ([b"data: [DONE]", b""] if kind != b"application/json" else [b""])
    told = json.loads(first.removeprefix(b"data: "))
    assert told.get("is_end") == 1 or told["error"]["code"] == "unavailable"
    client.sendall(ASK)  # the connection is as good as new
    error_of(read_all(client))


@pytest.mark.parametrize("done", [False, True])
def test_a_stream_that_ends_with_the_connection(front, rank, done):
    client = connect(front, ASK.replace(b"HTTP/1.1", b"HTTP/1.0"))
    link, _ = rank.accept(b"{}")
    link.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + EVENT)
    link.sendall(b"data: [DONE]\n\n" * done)
    link.close()
    assert read_all(client).count(b"error") == (not done)


def test_a_body_whose_length_was_stated(front, rank):
    client = connect(front, ASK)
    link, _ = rank.accept(b"{}")
    link.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
    rank.die(link)
    assert read_all(client).endswith(b"\r\n\r\nhalf")


def test_new_ranks_take_over(front, rank, monkeypatch):
    client = connect(front, ASK)
    link, _ = rank.accept(b"{}")
    link.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    read_to(client, b"\r\n\r\n")
    rank.die(link)
    front.ended("restarting", "they start again")
    assert error_of(read_all(connect(front, ASK)))["message"] == "they start again"
    new = Rank(front, monkeypatch)
    client.sendall(ASK)  # the client's connection has outlived the old ones
    link, _ = new.accept(b"{}")
    link.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nnew")
    assert read_to(client, b"new")
    new.die(link)


def test_the_keeper_of_a_rank_tells_of_its_failure(front, rank):
    """Rank 0 lives, but waits for the one that has failed; nobody waits with it."""
    client = connect(front, ASK)
    link, _ = rank.accept(b"{}")
    _tell_front("rank 1 of 2")
    message = "rank 1 of 2 of the server has failed"
    assert error_of(read_all(client))["message"] == message
    assert link.recv(1) == b""
    assert error_of(read_all(connect(front, ASK)))["message"] == message


def test_the_end_answers_who_waits_and_leaves_nothing(monkeypatch):
    with Front("127.0.0.1", 0, 8, 5.0, 1.0) as front:
        rank = Rank(front, monkeypatch)
        pending, idle, large = connect(front, ASK), connect(front), connect(front, ASK)
        links = [rank.accept(b"{}")[0] for _ in range(2)]
        links[1].sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 3000000\r\n\r\n" + b"x" * 3_000_000)
        late = threading.Timer(0.2, read_into, (large, received := []))
        late.start()
        threading.Timer(0.1, rank.die, links).start()
    assert sorted([read_all(pending)[:13], read_all(idle)[:13]]) == [b"", b"HTTP/1.1 503 "]
    late.join()
    assert received == [3_000_000]
    folder = Path(os.environ[FRONT_SOCKET]).parent
    assert not folder.exists()
    assert Path(os.environ[FAILURES]).parent == folder
    with pytest.raises(ConnectionRefusedError):
        connect(front)


def test_the_server_knows_when_its_front_is_gone(front, monkeypatch, tmp_path):
    monkeypatch.setattr(addresses, "LOOK_S", 0.01)

    async def is_gone() -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await addresses.front_is_gone()
                return True
        return False

    monkeypatch.setenv(FAILURES, front.environment()[FAILURES])
    assert not asyncio.run(is_gone())
    left = tmp_path / "failures"  # of one that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as killed:
        killed.bind(str(left))
    monkeypatch.setenv(FAILURES, str(left))
    assert asyncio.run(is_gone())


def read_into(client: socket.socket, found: list[int]) -> None:
    found.append(len(read_all(client).partition(b"\r\n\r\n")[2]))


def test_the_process_that_takes_requests_is_found(front, rank, monkeypatch):
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: told.append(arguments))
    assert front.tell_rank_0(15)
    assert told == [(os.getpid(), 15)]
    rank.die()
    assert not front.tell_rank_0(15)
