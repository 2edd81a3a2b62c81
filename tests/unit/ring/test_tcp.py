"""The TCP transport among strangers, and when a neighbour dies or falls silent."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hvdtrain.errors import TransportError
from hvdtrain.ring import all_reduce
from hvdtrain.ring.transports.tcp import HELLO, MAGIC, TcpTransport, listen
from tests.rings import TOKEN, rank_data

LIMIT_S = 20.0  # for what takes a moment


def try_to_connect(
    tokens: list[bytes], meanwhile: Callable = lambda address: None, victim: int = 0
) -> list:
    """Connect a ring whose ranks have `tokens`, while `meanwhile` does mischief to `victim`.

    Returns each rank's transport, or its TransportError.
    """
    listeners = [listen("127.0.0.1") for _ in tokens]
    addresses = [listener.getsockname() for listener in listeners]
    meanwhile(addresses[victim])

    def run(rank: int) -> TcpTransport | TransportError:
        try:
            return TcpTransport(rank, listeners[rank], addresses, tokens[rank], LIMIT_S)
        except TransportError as error:
            return error

    with ThreadPoolExecutor(len(tokens)) as pool:
        return list(pool.map(run, range(len(tokens))))


def connect(size: int, *mischief: Any) -> list:
    """Connect a ring of one token; raise the first error."""
    outcomes = try_to_connect([TOKEN] * size, *mischief)
    for error in outcomes:
        if isinstance(error, TransportError):
            raise error
    return outcomes


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
    transports = connect(3, send_and_stay(payload))
    data = [rank_data(rank, 1000, np.int64) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda t: all_reduce(data[t.rank], t), transports))
    for transport, result in zip(transports, results, strict=True):
        np.testing.assert_array_equal(result, np.sum(data, axis=0))
        transport.close()


def impostor(token: bytes) -> Callable[[tuple[str, int]], None]:
    """Someone who follows the protocol as rank 2 would, up to the end, with a token of theirs."""

    def act(address: tuple[str, int]) -> None:
        def speak() -> None:
            link = socket.create_connection(address, timeout=LIMIT_S)
            strangers.append(link)
            hello = HELLO.pack(MAGIC, 2, 0, bytes(range(32)))
            link.sendall(hello)
            nonce = link.recv(64, socket.MSG_WAITALL)[:32]
            link.sendall(hmac.digest(token, b"connect" + hello + nonce, "sha256"))
            answers.append(link.recv(1))

        impostors.append(threading.Thread(target=speak))
        impostors[-1].start()

    return act


answers: list[bytes] = []
impostors: list[threading.Thread] = []


def test_a_wrong_token_of_a_third_party_is_shut_out_and_the_ring_goes_on() -> None:
    """Fails if a fluent stranger without the token gets in, or ends the run."""
    answers.clear()
    transports = connect(3, impostor(bytes(32)))
    results = reduce_over(transports)
    for thread in impostors:
        thread.join()
    assert answers == [b""]  # the connection was closed on them
    assert results == [sum(range(1, 4))] * 3


def test_the_right_token_lets_the_same_impostor_in() -> None:
    """Fails if the impostor of the test before is shut out for another reason than its token."""
    doors = [listen("127.0.0.1") for _ in range(3)]
    addresses = [door.getsockname() for door in doors]
    impostor(TOKEN)(addresses[0])
    with ThreadPoolExecutor(2) as pool:
        victim, other = (
            pool.submit(TcpTransport, rank, doors[rank], addresses, TOKEN, LIMIT_S)
            for rank in (0, 1)
        )
        victim.result().close()  # it has taken the impostor for its left neighbour
        doors[2].close()  # the other rank waits for it
        assert isinstance(other.exception(), TransportError)
    impostors[-1].join()


def reduce_over(transports: list[TcpTransport]) -> list[int]:
    with ThreadPoolExecutor(len(transports)) as pool:
        results = pool.map(lambda t: all_reduce(np.array([t.rank + 1]), t)[0], transports)
        totals = [int(result) for result in results]
    for transport in transports:
        transport.close()
    return totals


def replay(said: list[bytes]) -> Callable[[tuple[str, int]], None]:
    """Someone who repeats, word for word, a handshake that has been overheard."""

    def act(address: tuple[str, int]) -> None:
        link = socket.create_connection(address, timeout=LIMIT_S)
        strangers.append(link)
        link.sendall(said[0] + said[1])

    return act


def relay(door: tuple[str, int], said: list[bytes]) -> tuple[str, int]:
    """An eavesdropper in front of `door`: passes all on, and records what the connector sends."""
    listener = listen("127.0.0.1")

    def pass_on() -> None:
        with listener, listener.accept()[0] as caller, socket.create_connection(door) as answerer:
            said.append(caller.recv(HELLO.size, socket.MSG_WAITALL))
            answerer.sendall(said[0])
            caller.sendall(answerer.recv(64, socket.MSG_WAITALL))
            said.append(caller.recv(32, socket.MSG_WAITALL))
            answerer.sendall(said[1])
            caller.recv(1)  # until the ring is closed

    threading.Thread(target=pass_on, daemon=True).start()
    return listener.getsockname()


@contextlib.contextmanager
def alone(rank: int) -> Iterator[socket.socket]:
    """A connection to a rank whose neighbours never come. It waits far longer than the connection
    for an answer: who reads the end was shut out, and who was let in gets a TimeoutError.
    """
    with ThreadPoolExecutor(1) as pool, listen("127.0.0.1") as silent:
        door = listen("127.0.0.1")
        addresses = [silent.getsockname()] * 3
        addresses[rank] = door.getsockname()
        waiting = pool.submit(TcpTransport, rank, door, addresses, TOKEN, 5 * LIMIT_S)
        with socket.create_connection(addresses[rank], timeout=LIMIT_S) as link:
            yield link
    assert isinstance(waiting.exception(), TransportError)  # as `silent` is closed


def test_a_recorded_handshake_is_of_no_use() -> None:
    """Fails if hello and proof of a genuine handshake open a second door (a replay)."""
    doors = [listen("127.0.0.1") for _ in range(3)]
    addresses = [door.getsockname() for door in doors]
    said: list[bytes] = []
    seen_by_rank_0 = [addresses[0], relay(addresses[1], said), addresses[2]]

    def run(rank: int) -> TcpTransport:
        seen = addresses if rank else seen_by_rank_0
        return TcpTransport(rank, doors[rank], seen, TOKEN, LIMIT_S)

    with ThreadPoolExecutor(3) as pool:
        transports = list(pool.map(run, range(3)))
    assert len(said) == 2  # a whole genuine handshake of rank 0 with rank 1
    with alone(1) as link:
        link.sendall(said[0])
        link.recv(64, socket.MSG_WAITALL)
        link.sendall(said[1])
        assert link.recv(1) == b""
    for transport in transports:
        transport.close()
    # Nor does it disturb the next ring of the same token.
    assert reduce_over(connect(3, replay(said), 1)) == [6] * 3


def test_the_acceptors_proof_is_not_the_connectors() -> None:
    """Fails if what an acceptor proves could be sent back to it (a reflection)."""
    with alone(1) as link:
        link.sendall(HELLO.pack(MAGIC, 0, 1, bytes(32)))
        link.sendall(link.recv(64, socket.MSG_WAITALL)[32:])
        assert link.recv(1) == b""


def test_a_rank_that_is_no_neighbour_is_shut_out() -> None:
    """Fails if a rank that has the token, but is another than the left one, takes its place."""
    with alone(1) as link:
        link.sendall(HELLO.pack(MAGIC, 2, 1, bytes(32)))
        assert link.recv(1) == b""  # it is not even asked for its proof


def test_a_wrong_token_is_named() -> None:
    """Fails if ranks with different tokens form a ring, or wait for ever."""
    started = time.monotonic()
    outcomes = try_to_connect([TOKEN, bytes(32)])
    assert all(isinstance(outcome, TransportError) for outcome in outcomes)
    assert any("does not have this run's token" in str(outcome) for outcome in outcomes)
    assert time.monotonic() - started < 15


def test_a_silent_neighbour_is_named_in_time() -> None:
    """Fails if a rank waits for ever for a neighbour that has stopped sending."""
    transports = connect(3)
    transports[1]._timeout_s = 1
    with pytest.raises(TransportError, match=r"rank 0 was silent for 1 s \(seen by rank 1\)"):
        transports[1].sendrecv(np.zeros(1), np.zeros(1))
    for transport in transports:
        transport.close()


def test_a_neighbour_that_takes_nothing_is_named_in_time() -> None:
    """Fails if a rank waits for ever for a neighbour that has stopped receiving."""
    transports = connect(3)
    transports[1]._timeout_s = 1
    with pytest.raises(TransportError, match=r"rank 2 was silent for 1 s \(seen by rank 1\)"):
        transports[1].sendrecv(np.zeros(4_000_000), np.zeros(0))
    for transport in transports:
        transport.close()


@pytest.mark.parametrize("backwards", [False, True])
def test_directions_and_work_meanwhile(backwards: bool) -> None:
    """Fails if a message goes the other way, or the work given is not done exactly once."""
    transports = connect(3)
    done: list[int] = []

    def exchange(transport: TcpTransport) -> int:
        incoming = np.zeros(1, np.int64)
        transport.sendrecv(
            np.array([transport.rank]),
            incoming,
            backwards=backwards,
            meanwhile=lambda: done.append(transport.rank),
        )
        return int(incoming[0])

    with ThreadPoolExecutor(3) as pool:
        received = list(pool.map(exchange, transports))
    assert received == ([1, 2, 0] if backwards else [2, 0, 1])
    assert sorted(done) == [0, 1, 2]
    for transport in transports:
        transport.close()


def test_a_vanished_neighbour_is_named() -> None:
    """Fails if the end of a neighbour's connection is taken for data."""
    transports = connect(3)
    transports[0].close()
    with pytest.raises(TransportError, match=r"rank 0 .* \(seen by rank 1\)"):
        transports[1].sendrecv(np.zeros(1), np.zeros(1))
    for transport in transports[1:]:
        transport.close()


def test_both_directions_flow_at_once() -> None:
    """Fails (by the time limit) if sending must end before receiving starts: buffers would fill."""
    transports = connect(2)
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
