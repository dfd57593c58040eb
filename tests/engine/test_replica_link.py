"""Connections between replica processes: handshake, addresses, timeouts."""

from __future__ import annotations

import socket
import threading
from dataclasses import fields
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from nbflow.engine.outputs import TokenOutput
from nbflow.engine.replicas import address as replica_address
from nbflow.engine.replicas import rpc
from nbflow.engine.replicas.address import (
    ADDRESS_ENV,
    addresses_towards,
    connect,
    own_addresses,
)
from nbflow.engine.replicas.rpc import Listener, RemoteEngine
from nbflow.engine.request import Request
from nbflow.engine.stats import EngineStats
from nbflow.sampling import Greedy
from nbflow_kernels.errors import UsageError

HERE = {"host": "a", "addresses": []}
WAIT_S = 60.0


def in_thread(function):
    """Run a function; fail on a timeout."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert found, f"{function} waits"
    return found[0]


def greet(address, index):
    connection = connect(*address)
    connection.send(index)
    return connection


@pytest.fixture
def remote():
    """Return a remote engine and the other end of its connection."""
    here, there = (Connection(s.detach()) for s in socket.socketpair())
    limits = SimpleNamespace(max_sequences=100, max_waiting=100)
    yield RemoteEngine(1, here, None, limits), there
    there.close()


def test_a_peer_that_says_nothing_delays_no_other(monkeypatch):
    monkeypatch.setattr(rpc, "START_S", WAIT_S)
    listener = Listener([HERE, HERE])
    ((host, port),), key = listener.address
    assert host == "127.0.0.1"  # all are on one machine: no other one can connect
    found = []
    accepting = threading.Thread(target=lambda: found.extend(listener.accept(1)), daemon=True)
    accepting.start()
    with socket.create_connection((host, port)), socket.create_connection((host, port)) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        # HMAC pads keys with zeros: a key cut by its last byte may be the same key
        for wrong in (b"x" * 32, key[:-1] + bytes([key[-1] ^ 1])):
            with pytest.raises(
                UsageError, match=f"does not reach the leading process.*{ADDRESS_ENV}"
            ):
                connect([(host, port)], wrong)
        mine = greet(listener.address, 1)
        accepting.join(WAIT_S)
    ((index, connection),) = found
    mine.close()
    assert index == 1
    connection.close()
    with pytest.raises(OSError, match="refused"):  # no more are taken
        socket.create_connection((host, port))


def test_replicas_that_do_not_come(monkeypatch):
    monkeypatch.setattr(rpc, "START_S", 0.1)
    with pytest.raises(UsageError, match=r"2 of 2 other replicas did not connect within 0\.1 s"):
        Listener([HERE, HERE, HERE]).accept(2)


def test_addresses_are_tried_in_order(monkeypatch):
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        socket.create_server(("127.0.0.1", 0)) as s,
    ):
        closed = s.getsockname()
        s.close()
        monkeypatch.setattr(replica_address, "HANDSHAKE_S", 1.0)
        listener = Listener([HERE])
        places, key = listener.address
        client = threading.Thread(
            target=greet, args=(([closed, mute.getsockname(), *places], key), 3)
        )
        client.start()
        ((index, connection),) = in_thread(lambda: listener.accept(1))
        client.join()
        assert index == 3
        connection.close()


def test_the_address_of_the_interface_that_leads_to_the_others(monkeypatch):
    own = own_addresses()
    assert not [address for address in own if address.startswith("127.")]
    assert set(addresses_towards([["192.0.2.1"], ["192.0.2.1", "127.0.1.1"]])) <= set(own)
    assert addresses_towards([own]) == []  # a bridge that every host has
    with pytest.raises(UsageError, match=f"a has no address that leads to b; set {ADDRESS_ENV}"):
        Listener([HERE, {"host": "b", "addresses": own}])
    monkeypatch.setenv(ADDRESS_ENV, "127.0.0.1")
    listener = Listener([HERE, {"host": "b", "addresses": own}])
    assert listener.address[0][0][0] == "127.0.0.1"
    listener.close()
    monkeypatch.setenv(ADDRESS_ENV, "192.0.2.77")
    with pytest.raises(UsageError, match=r"cannot listen for the other replicas at 192\.0\.2\.77"):
        Listener([HERE])


def test_who_submits_does_not_wait_for_a_process_that_does_not_read(remote):
    engine, there = remote
    # 20 MB, which no buffer of a socket holds
    requests = [Request(list(range(100_000)), 1, Greedy()) for _ in range(60)]
    handles = in_thread(lambda: [engine.submit(request) for request in requests])
    in_thread(lambda: handles[-1].cancel() or True)
    assert in_thread(lambda: engine.stats() is None)  # none have been told yet
    assert engine.load == 60
    read = [there.recv() for _ in range(61)]
    assert [message[:2] for message in read[:60]] == [("submit", i) for i in range(60)]
    assert read[60] == ("cancel", 59, "abort")
    assert read[3][2].prompt == requests[3].prompt


def test_numbers_are_told_without_being_asked_for(remote):
    engine, there = remote
    numbers = EngineStats(
        **{f.name: {} if f.name == "finished" else 7 for f in fields(EngineStats)}
    )
    there.send([("stats", 0, numbers)])
    arrived = threading.Event()
    handle = engine.submit(Request([1], 1, Greedy()), lambda *_: arrived.set())
    _, number, _ = there.recv()
    there.send(
        [("events", number, [TokenOutput(None, finish_reason="stop")], {"finish_reason": "stop"})]
    )
    assert arrived.wait(WAIT_S)  # behind the numbers
    assert handle.finish_reason == "stop"
    assert engine.stats() == numbers
    assert not there.poll(0)


def test_a_request_that_cannot_be_sent_is_refused(remote):
    engine, there = remote
    request = Request([1], 1, Greedy(), proposer=lambda ids, n: [])
    with pytest.raises(UsageError, match=r"cannot send this to replica 1: .*local object"):
        engine.submit(request)
    assert engine.load == 0
    assert not there.poll(0)
