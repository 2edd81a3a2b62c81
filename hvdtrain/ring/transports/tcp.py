"""The ring over TCP sockets: full duplex, authenticated, with timeouts.

Every rank listens, and connects to its right neighbour. Both sides must prove that they have the
run's token, by HMAC-SHA-256 over new nonces and ranks of both, so a recorded or reflected handshake
is useless. Connections that fail the handshake are closed, and the ring is not affected. The
payload itself is not encrypted, as in Gloo and MPI.
"""

import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np

from hvdtrain.errors import TransportError, UsageError
from hvdtrain.network import GuardedListener, prove
from hvdtrain.pulse import RING_TOKEN
from hvdtrain.ring.operations import Array
from hvdtrain.ring.transports import DEFAULT_TIMEOUT_S, Work

Address = tuple[str, int]

NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO = struct.Struct(f"!8sII{NONCE_BYTES}s")  # magic, sender's rank, receiver's rank, nonce
MAGIC = b"hvdring1"
MOST_STRANGERS = 32
ACCEPT_RETRY_S = 0.01
PATIENCE_S = 1.0  # for an unproven connection, once there are too many of them


def listen(host: str) -> socket.socket:
    """Return a listening socket on one interface, at a free port (see `getsockname()`)."""
    return socket.create_server((host, 0), backlog=128)


class TcpTransport:
    """A rank of a ring over sockets."""

    def __init__(
        self,
        rank: int,
        listener: socket.socket,
        addresses: Sequence[Address],
        token: bytes,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Collective: connect the ring; the ranks of all `addresses` construct it together.

        `listener`: that of this rank, from `listen`; it is closed here. `addresses`: (host, port)
        of the listener of every rank, in rank order. `token`: the run's secret, the same on every
        rank. Raises TransportError, naming the neighbour, if it is incomplete after `timeout_s`.
        """
        self.rank = rank
        self.size = len(addresses)
        self._timeout_s = timeout_s
        self._right_rank = (rank + 1) % self.size
        self._left_rank = (rank - 1) % self.size
        deadline = time.monotonic() + timeout_s
        with closing(_Acceptor(listener, self._left_rank, rank, token, deadline)) as acceptor:
            self._right = self._connect(addresses[self._right_rank], token, deadline)
            try:
                self._left = acceptor.wait()
            except TransportError:
                self._right.close()
                raise
        for link in (self._right, self._left):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setblocking(False)

    def sendrecv(
        self, outgoing: Array, incoming: Array, *, backwards: bool = False, meanwhile: Work = None
    ) -> None:
        ends = [(self._left, self._left_rank), (self._right, self._right_rank)]
        (source, sender), (target, receiver) = reversed(ends) if backwards else ends
        to_send, to_fill = outgoing.view(np.uint8).data, incoming.view(np.uint8).data
        if meanwhile:
            if to_send:  # the part in the system's buffers travels during the computation
                to_send = self._send(target, receiver, to_send)
            meanwhile()
        while to_send or to_fill:
            poll = select.poll()
            if to_fill:
                poll.register(source, select.POLLIN)
            if to_send:
                poll.register(target, select.POLLOUT)
            ready = dict(poll.poll(self._timeout_s * 1000))
            if not ready:
                silent = sender if to_fill else receiver
                raise self._failure(silent, f"was silent for {self._timeout_s:g} s")
            if source.fileno() in ready:
                to_fill = self._fill(source, sender, to_fill)
            if target.fileno() in ready:
                to_send = self._send(target, receiver, to_send)

    def _send(self, link: socket.socket, neighbour: int, to_send: memoryview) -> memoryview:
        """Send without blocking, and return the unsent rest."""
        sent = 0
        with self._losing(neighbour):
            sent = link.send(to_send)
        return to_send[sent:]

    def _fill(self, link: socket.socket, neighbour: int, to_fill: memoryview) -> memoryview:
        """Receive without blocking, and return the unfilled rest."""
        received = 0
        with self._losing(neighbour):
            received = link.recv_into(to_fill)
            if received == 0:
                raise self._failure(neighbour, "closed its connection")
        return to_fill[received:]

    def close(self) -> None:
        for link in (self._right, self._left):
            link.close()

    @contextmanager
    def _losing(self, neighbour: int) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            return  # spurious readiness: the caller polls again
        except OSError as error:
            raise self._failure(neighbour, f"cannot be reached any more ({error})") from error

    def _failure(self, neighbour: int, what: str) -> TransportError:
        return TransportError(f"ring: rank {neighbour} {what} (seen by rank {self.rank})")

    def _connect(self, address: Address, token: bytes, deadline: float) -> socket.socket:
        """Connect to the right neighbour and authenticate both sides by the token."""
        try:
            link = socket.create_connection(address, timeout=_left_of(deadline))
        except OSError as error:
            raise self._failure(
                self._right_rank, f"cannot be reached at {address[0]}:{address[1]} ({error})"
            ) from error
        try:
            hello = HELLO.pack(MAGIC, self.rank, self._right_rank, os.urandom(NONCE_BYTES))
            link.sendall(hello)
            nonce = _receive(link, NONCE_BYTES, deadline)
            proof = _receive(link, PROOF_BYTES, deadline)
            if not hmac.compare_digest(proof, prove(token, b"accept", hello + nonce)):
                raise self._failure(self._right_rank, "does not have this run's token")
            link.sendall(prove(token, b"connect", hello + nonce))
        except (OSError, EOFError) as error:
            link.close()
            raise self._failure(self._right_rank, f"broke off the handshake ({error})") from error
        except TransportError:
            link.close()
            raise
        return link


class _Acceptor:
    """The acceptor of connections, until one of them is the left neighbour.

    Each connection is authenticated in its own thread. One that sends nothing, invalid data or a
    replay therefore costs one waiting thread, and there are at most MOST_STRANGERS of them.
    """

    def __init__(
        self, listener: socket.socket, expected: int, rank: int, token: bytes, deadline: float
    ) -> None:
        self._listener = listener
        self._guard = GuardedListener[socket.socket](listener, _hang_up, PATIENCE_S)
        self._expected = expected
        self._rank = rank
        self._token = token
        self._deadline = deadline
        self._arrived = threading.Event()
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        listener.settimeout(0.1)
        threading.Thread(target=self._accept, name="ring-accept", daemon=True).start()

    def wait(self) -> socket.socket:
        """Return the link to the neighbour; the caller must close it. Raises TransportError."""
        if not self._arrived.wait(_left_of(self._deadline)) or self._link is None:
            raise TransportError(
                f"ring: rank {self._expected} did not connect in time (seen by rank {self._rank})"
            )
        link, self._link = self._link, None
        return link

    def close(self) -> None:
        """Stop accepting, and close the link of a neighbour that nobody has waited for."""
        with self._lock:
            self._arrived.set()
            if self._link:
                self._link.close()

    def _accept(self) -> None:
        with self._listener:
            while not self._arrived.is_set():
                link = self._guard.accept(MOST_STRANGERS)
                if link is None:
                    self._arrived.wait(self._guard.rest_s or ACCEPT_RETRY_S)
                    continue
                self._guard.enter(link)
                try:
                    threading.Thread(target=self._authenticate, args=(link,), daemon=True).start()
                except RuntimeError:  # the system's limit of threads
                    self._guard.leave(link)
                    link.close()

    def _authenticate(self, link: socket.socket) -> None:
        try:
            genuine = self._is_left_neighbour(link)
        except (OSError, EOFError):
            genuine = False
        self._guard.leave(link)
        with self._lock:
            if genuine and not self._arrived.is_set():
                self._link = link
                self._arrived.set()
                return
        link.close()

    def _is_left_neighbour(self, link: socket.socket) -> bool:
        hello = _receive(link, HELLO.size, self._deadline)
        magic, sender, receiver, _ = HELLO.unpack(hello)
        if (magic, sender, receiver) != (MAGIC, self._expected, self._rank):
            return False
        nonce = os.urandom(NONCE_BYTES)
        link.sendall(nonce + prove(self._token, b"accept", hello + nonce))
        proof = _receive(link, PROOF_BYTES, self._deadline)
        return hmac.compare_digest(proof, prove(self._token, b"connect", hello + nonce))


def _hang_up(link: socket.socket) -> None:
    """Shut the link down: its thread then reads the end of the stream, and closes it."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def join_ring(rank: int, address: str, gather: Callable[[Any], Sequence[Any]]) -> TcpTransport:
    """Collective: return the place of `rank` in a ring of sockets, which listens on `address`.

    `gather`: a collective that returns every rank's value, in rank order. Without a secret from
    `hvdtrain launch`, that of rank 0 is used, as `gather` has carried it.
    """
    listener = listen(address)
    offer = (listener.getsockname()[:2], RING_TOKEN in os.environ, secrets.token_bytes(32))
    addresses, have_token, secret = zip(*gather(offer), strict=True)
    return TcpTransport(rank, listener, addresses, token_of_launcher(have_token) or secret[0])


def token_of_launcher(have_token: Sequence[bool]) -> bytes | None:
    """Return the secret that `hvdtrain launch` gave to all workers; None if it did not start them.

    `have_token`: whether each rank has one. Raises UsageError if only some have.
    """
    if len({*have_token}) > 1:
        without = [rank for rank, has in enumerate(have_token) if not has]
        raise UsageError(
            f"environment variable {RING_TOKEN}: ranks {without} do not have it, others do: start "
            "all workers by one `hvdtrain launch`, or unset it"
        )
    return os.environ[RING_TOKEN].encode() if all(have_token) else None


def _receive(link: socket.socket, count: int, deadline: float) -> bytes:
    """Return exactly `count` bytes. Raises EOFError or TimeoutError (an OSError)."""
    received = b""
    while len(received) < count:
        link.settimeout(_left_of(deadline))
        part = link.recv(count - len(received))
        if not part:
            raise EOFError("the connection was closed")
        received += part
    return received


def _left_of(deadline: float) -> float:
    """Return the seconds until the deadline, at least 0.001, as zero means non-blocking."""
    return max(deadline - time.monotonic(), 0.001)
