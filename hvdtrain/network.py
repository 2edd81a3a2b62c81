"""The network of this machine: its interfaces, a listener that a flood does not stop, and how both
ends of a connection prove that they have the same secret.

Horovod takes one name of an interface for all hosts, but it may be eth0 on one host and eth1 on
another; so each worker finds its own, by its route to the first host.

A connection is pending until its peer has authenticated itself. At the limit, the oldest pending
connection is dropped once its time is over; until then new ones stay in the kernel's backlog. So a
flood of connections costs little, and peers that authenticate themselves are still accepted.
"""

import array
import errno
import hmac
import math
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

_SIOCGIFCONF = 0x8912  # Linux: all interfaces that have an IPv4 address
_RECORD = struct.Struct("16s4x4s16x")  # struct ifreq: the name, then a sockaddr in a union
_MOST_BYTES = 1024 * _RECORD.size
_END_OF_NAME = re.compile(b"[\0:]")  # "eth0:1" is an alias of eth0

# Set by the launcher, unless the user has chosen an interface: an address that all hosts reach.
TOWARDS = "HVDTRAIN_INTERFACE_TOWARDS"
OF_GLOO, OF_NCCL = "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"
OF_OPEN_MPI = "OMPI_MCA_btl_tcp_if_include"
OF_TORCH = "GLOO_SOCKET_IFNAME"  # of torch.distributed

# Accepting fails for lack of descriptors or memory; an immediate retry would fail again.
EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
REST_S = 0.1

Peer = TypeVar("Peer", bound=Hashable)


def interfaces() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address) pairs in the system's order; raise OSError on failure."""
    import fcntl  # not on Windows, where `--help` imports this module

    buffer = array.array("B", bytes(_MOST_BYTES))
    request = struct.pack("iL", _MOST_BYTES, buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request)
    length = struct.unpack("iL", answer)[0]
    records = _RECORD.iter_unpack(buffer.tobytes()[:length])
    return [
        (_END_OF_NAME.split(name)[0].decode(errors="replace"), socket.inet_ntoa(address))
        for name, address in records
    ]


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address; None if there is none."""
    return next((name for name, ipv4 in interfaces() if ipv4 == address), None)


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none, or is not there."""
    return next((ipv4 for name, ipv4 in interfaces() if name == interface), None)


def route_to(host: str) -> str:
    """Return the address from which this host reaches `host`. Raises OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends no packet, only selects a route
        return str(probe.getsockname()[0])


def own_interfaces(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name this host's interface, by what reads them.

    Those that horovodrun or mpirun has set are replaced by the one towards TOWARDS, if this is set;
    torch.distributed gets the same. Empty if no interface is known.
    """
    chosen = environment.get(OF_GLOO) or environment.get(OF_OPEN_MPI)
    if towards := environment.get(TOWARDS):
        with suppress(OSError):  # without a route nothing better is known than what is set
            chosen = interface_of(route_to(towards)) or chosen
    named = [name for name in (OF_GLOO, OF_NCCL, OF_OPEN_MPI) if name in environment]
    return dict.fromkeys([*named, OF_TORCH], chosen) if chosen else {}


def take_own_interface() -> None:
    """Let Horovod and its libraries use this host's own interface, in this process."""
    if TOWARDS in os.environ:
        os.environ.update(own_interfaces(os.environ))


def prove(token: bytes, side: bytes, challenge: bytes) -> bytes:
    """Return the proof of one side of a connection that it has the token.

    It is an HMAC over `challenge`, which the other side has chosen at random, and over `side`, so
    that neither can return the proof of the other.
    """
    return hmac.digest(token, side + challenge, "sha256")


class GuardedListener(Generic[Peer]):
    """A listener with a limit on connections whose peers have not authenticated themselves yet."""

    def __init__(
        self, listener: socket.socket, drop: Callable[[Peer], None], patience_s: float
    ) -> None:
        """`drop` closes a connection, after `patience_s` or later; `listener` has a timeout."""
        self._listener, self._drop, self._patience_s = listener, drop, patience_s
        self._pending: dict[Peer, float] = {}  # time of entry, oldest first
        self._limit = math.inf  # lower once descriptors have run out
        self._open_at_s = 0.0
        self._lock = threading.Lock()

    @property
    def rest_s(self) -> float:
        """Return for how many seconds not to call `accept`, though the socket may be readable."""
        return max(0.0, self._open_at_s - time.monotonic())

    def accept(self, room: int) -> socket.socket | None:
        """Return the next connection; None if there is none, or `room` peers are pending."""
        if self.rest_s or not self._make_room(room):
            return None
        try:
            return self._listener.accept()[0]
        except OSError as error:  # includes a peer that has disconnected, and a timeout
            if error.errno in EXHAUSTED:
                self._limit = max(1, len(self._pending) // 2)
                self._open_at_s = time.monotonic() + REST_S
            return None

    def enter(self, peer: Peer) -> None:
        """Add a pending peer; from now on it may be dropped."""
        with self._lock:
            self._pending[peer] = time.monotonic()

    def leave(self, peer: Peer) -> None:
        """Remove a peer that has authenticated itself or disconnected."""
        with self._lock:
            self._pending.pop(peer, None)

    def _make_room(self, room: int) -> bool:
        """Return whether one more peer may be pending; drop those whose time is over."""
        while len(self._pending) >= min(room, self._limit):
            with self._lock:
                oldest, since_s = next(iter(self._pending.items()), (None, 0.0))
                if oldest is None:
                    break
                if time.monotonic() < since_s + self._patience_s:
                    self._open_at_s = since_s + self._patience_s
                    return False
                del self._pending[oldest]
            self._drop(oldest)
        return True
