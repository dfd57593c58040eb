"""Where messages end: whatever the pieces are in which they arrive."""

from __future__ import annotations

import asyncio

import pytest

from nbflow.front.messages import (
    DONE,
    MAX_HEAD_BYTES,
    Chunked,
    EndedError,
    Incoming,
    MalformedError,
    Sized,
    ToEnd,
    read_request,
    read_response,
)

CHUNKS = b"5\r\nhello\r\n00E ;a=b\r\ndata: [DONE]\n\n\r\n0\r\nx-sum: 1\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_chunked_body_ends_where_it_ends(size):
    body, borders, taken = Chunked(), set(), 0
    data = CHUNKS + b"GET"
    while not body.complete:
        piece = data[taken : taken + size]
        taken += body.take(piece)
        if body.at_border:
            borders.add(taken)
    assert taken == len(CHUNKS)
    assert body.tail == DONE
    whole = {10, 36}  # behind each chunk with its line end; never within one
    assert borders <= whole
    assert size > 1 or borders == whole
    assert not body.at_border  # nothing may follow the end


@pytest.mark.parametrize(
    "data",
    [b"x\r\n", b"-1\r\n", b"\r\n", b"1\nab", b"1\r\nab\r\n", b"1" * 17 + b"\r\n", b"0" * 5000],
)
def test_what_is_no_chunk(data):
    with pytest.raises(MalformedError):
        Chunked().take(data)


def test_sizes_and_ends():
    body = Sized(5)
    assert (body.take(b"abc"), body.complete) == (3, False)
    assert (body.take(b"defg"), body.complete) == (2, True)
    assert Sized(0).complete
    end = ToEnd()
    for i in range(len(DONE)):
        assert end.take(DONE[i : i + 1]) == 1
    assert end.tail == DONE
    assert not end.complete


def request(*lines: str):
    return read_request("\r\n".join([*lines, "", ""]).encode())


def test_a_request_is_passed_on_as_it_is_but_for_what_is_replaced():
    head, body = request(
        "POST /v1/x?a=b HTTP/1.1", "Host: h", "X-Forwarded-For: 6.6.6.6", "Content-Length: 3",
        "x-forwarded-FOR: 7.7.7.7", "A:  b c ",
    )  # fmt: skip
    assert head.path == "/v1/x"
    assert isinstance(body, Sized)
    assert head.passed_on({b"x-forwarded-for": b"1.2.3.4"}) == (
        b"POST /v1/x?a=b HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nA:  b c \r\n"
        b"x-forwarded-for: 1.2.3.4\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("version", "connection", "keeps"),
    [
        ("1.1", "", True),
        ("1.1", "x, Close", False),
        ("1.0", "", False),
        ("1.0", "keep-alive", True),
    ],
)
def test_whether_the_connection_is_kept(version, connection, keeps):
    head, body = request(f"GET / HTTP/{version}", f"connection: {connection}")
    assert head.keeps == keeps
    assert body.complete


@pytest.mark.parametrize(
    "lines",
    [
        ["GET /"],
        ["GET / HTTP/2.0"],
        ["G T / HTTP/1.1"],
        ["GET / HTTP/1.1", " folded: x"],
        ["GET / HTTP/1.1", "name : x"],
        ["GET / HTTP/1.1", "no colon"],
        ["GET / HTTP/1.1", "a: b\rc: d"],
        ["GET / HTTP/1.1", "a: b\nc: d"],
        ["POST / HTTP/1.1", "content-length: 1", "content-length: 2"],
        ["POST / HTTP/1.1", "content-length: +1"],
        ["POST / HTTP/1.1", "content-length: 1", "transfer-encoding: chunked"],
        ["POST / HTTP/1.1", "transfer-encoding: gzip, chunked"],
        ["POST / HTTP/1.0", "transfer-encoding: chunked"],
    ],
)
def test_what_is_no_request(lines):
    with pytest.raises(MalformedError):
        request(*lines)


@pytest.mark.parametrize(
    ("head", "method", "kind", "complete"),
    [
        (b"200 OK\r\ncontent-length: 9", b"GET", Sized, False),
        (b"200 OK\r\ncontent-length: 9", b"HEAD", Sized, True),
        (b"204 No Content", b"POST", Sized, True),
        (b"304 Not Modified\r\ncontent-length: 9", b"GET", Sized, True),
        (b"100 Continue", b"POST", Sized, True),
        (b"200 OK\r\ntransfer-encoding: chunked", b"GET", Chunked, False),
        (b"200 OK", b"GET", ToEnd, False),
    ],
)
def test_the_body_of_a_response(head, method, kind, complete):
    response = read_response(b"HTTP/1.1 " + head + b"\r\n\r\n", method)
    assert isinstance(response.body, kind)
    assert response.body.complete == complete
    assert response.keeps == (kind is not ToEnd)
    assert response.interim == head.startswith(b"100")


@pytest.mark.parametrize("head", [b"101 Switching Protocols", b"99 X", b"600 X", b"2000 X"])
def test_what_is_no_response(head):
    with pytest.raises(MalformedError):
        read_response(b"HTTP/1.1 " + head + b"\r\n\r\n", b"GET")


def heads(*pieces: bytes) -> list[bytes]:
    """Return the heads that arrive in these pieces."""

    async def read() -> list[bytes]:
        reader = asyncio.StreamReader()
        incoming, found = Incoming(reader), []
        for piece in pieces:
            reader.feed_data(piece)
        reader.feed_eof()
        while data := await incoming.some():
            incoming.give_back(data)
            found.append(await incoming.head())
        return found

    return asyncio.run(read())


def test_heads_one_behind_the_other():
    assert heads(b"\r\nGET / HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\nA: b\r\n\r\n") == [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /2 HTTP/1.1\r\nA: b\r\n\r\n",
    ]


def test_heads_that_do_not_end():
    with pytest.raises(EndedError):
        heads(b"GET / HTTP/1.1\r\n")
    for ending in (b"", b"\r\n\r\n"):
        with pytest.raises(MalformedError) as refused:
            heads(b"GET / HTTP/1.1\r\nA: ", b"b" * MAX_HEAD_BYTES, ending)
        assert refused.value.status == 431
