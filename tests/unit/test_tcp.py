"""The TCP transport among strangers, and when a neighbour dies or falls silent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvdtrain.errors import TransportError
from hvdtrain.ring import all_reduce
from hvdtrain.ring.transports.tcp import HELLO, MAGIC, TcpTransport, listen
from tests.rings import TOKEN, rank_data


def connect(size: int, tokens: list[bytes], timeout_s: float, meanwhile: Callable) -> list:
    """Connect a ring whose ranks know `tokens`, while `meanwhile` does mischief to rank 0."""
    listeners = [listen("127.0.0.1") for _ in range(size)]
    addresses = [listener.getsockname() for listener in listeners]
    meanwhile(addresses[0])

    def run(rank: int) -> TcpTransport | TransportError:
        try:
            return TcpTransport(rank, listeners[rank], addresses, tokens[rank], timeout_s)
        except TransportError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def send_and_stay(payload: bytes) -> Callable[[tuple[str, int]], None]:
    """A stranger that connects first, sends `payload`, and keeps its connection open."""

    def act(address: tuple[str, int]) -> None:
        link = socket.create_connection(address)
        link.sendall(payload)
        strangers.append(link)

    return act


strangers: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _hang_up():
    yield
    while strangers:
        strangers.pop().close()


MISCHIEF = {
    "silence": b"",
    "garbage": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    "right hello, then nothing": HELLO.pack(MAGIC, 2, 0, bytes(32)),
    "right hello, wrong proof": HELLO.pack(MAGIC, 2, 0, bytes(32)) + bytes(32),
    "hello of a rank that is no neighbour": HELLO.pack(MAGIC, 1, 0, bytes(32)) + bytes(32),
}


@pytest.mark.parametrize("payload", MISCHIEF.values(), ids=MISCHIEF)
def test_a_stranger_is_shut_out_and_the_ring_goes_on(payload: bytes) -> None:
    """Fails if a stranger that comes first takes the neighbour's place, or blocks it."""
    transports = connect(3, [TOKEN] * 3, 20, send_and_stay(payload))
    data = [rank_data(rank, 1000, np.int64) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda t: all_reduce(data[t.rank], t), transports))
    for transport, result in zip(transports, results, strict=True):
        np.testing.assert_array_equal(result, np.sum(data, axis=0))
        transport.close()


def test_a_recorded_handshake_is_of_no_use() -> None:
    """Fails if the proof of one handshake opens the door of another (a replay)."""
    listener = listen("127.0.0.1")
    recorded: list[bytes] = []

    def eavesdrop() -> None:  # stands in for rank 1's door and records what rank 0 says
        link, _ = listener.accept()
        recorded.append(link.recv(HELLO.size, socket.MSG_WAITALL))
        link.close()

    thread = threading.Thread(target=eavesdrop)
    thread.start()
    own = listen("127.0.0.1")
    with pytest.raises(TransportError, match="rank 1 broke off the handshake"):
        TcpTransport(0, own, [own.getsockname(), listener.getsockname()], TOKEN, timeout_s=5)
    thread.join()
    listener.close()
    hello = recorded[0]
    # Rank 1's real door hears the recorded hello, answers it, and must not accept a made-up proof.
    transports = connect(2, [TOKEN] * 2, 20, lambda address: None)
    for transport in transports:
        transport.close()
    door = listen("127.0.0.1")
    address = door.getsockname()
    outcome: list[TransportError] = []

    def wait_for_neighbour() -> None:
        try:
            TcpTransport(1, door, [dead, address], TOKEN, timeout_s=2)
        except TransportError as error:
            outcome.append(error)

    silent = listen("127.0.0.1")
    dead = silent.getsockname()
    waiting = threading.Thread(target=wait_for_neighbour)
    waiting.start()
    with socket.create_connection(address, timeout=5) as link:
        link.sendall(hello)
        nonce_and_proof = link.recv(64, socket.MSG_WAITALL)
        assert len(nonce_and_proof) == 64
        link.sendall(nonce_and_proof[32:])  # the acceptor's own proof, reflected
        assert link.recv(1) == b""
    waiting.join()
    silent.close()
    assert len(outcome) == 1


def test_a_wrong_token_is_named() -> None:
    """Fails if ranks with different tokens form a ring, or wait for ever."""
    started = time.monotonic()
    outcomes = connect(2, [TOKEN, bytes(32)], 3, lambda address: None)
    assert all(isinstance(outcome, TransportError) for outcome in outcomes)
    assert any("does not know this run's token" in str(outcome) for outcome in outcomes)
    assert time.monotonic() - started < 15


def test_a_silent_neighbour_is_named_in_time() -> None:
    """Fails if a rank waits for ever for a neighbour that has stopped sending."""
    transports = connect(3, [TOKEN] * 3, 1, lambda address: None)
    with pytest.raises(TransportError, match=r"rank 0 was silent for 1 s \(seen by rank 1\)"):
        transports[1].sendrecv(np.zeros(1), np.zeros(1))
    for transport in transports:
        transport.close()


def test_a_vanished_neighbour_is_named() -> None:
    """Fails if the end of a neighbour's connection is taken for data."""
    transports = connect(3, [TOKEN] * 3, 20, lambda address: None)
    transports[0].close()
    with pytest.raises(TransportError, match=r"rank 0 .* \(seen by rank 1\)"):
        transports[1].sendrecv(np.zeros(1), np.zeros(1))
    for transport in transports[1:]:
        transport.close()


def test_both_directions_flow_at_once() -> None:
    """Fails (by the time limit) if sending must end before receiving starts: buffers would fill."""
    transports = connect(2, [TOKEN] * 2, 20, lambda address: None)
    length = 4_000_000  # 32 MB, far more than socket buffers hold
    with ThreadPoolExecutor(2) as pool:
        results = list(
            pool.map(lambda t: all_reduce(np.full(length, float(t.rank + 1)), t), transports)
        )
    assert all((result == 3).all() for result in results)
    for transport in transports:
        transport.close()


def test_it_listens_on_the_given_interface_only() -> None:
    """Fails if the door is open to other interfaces than the one in use."""
    with listen("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
