"""A listening socket with a limit on unauthenticated connections.

A connection is pending until its peer has authenticated itself. At the limit, the oldest pending
connection is dropped once its time is over; until then new ones stay in the kernel's backlog. So a
flood of connections costs little, and peers that authenticate themselves are still accepted.
"""

from __future__ import annotations

import errno
import math
import socket
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

# Accepting fails for lack of descriptors or memory; an immediate retry would fail again.
EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
REST_S = 0.1

Peer = TypeVar("Peer", bound=Hashable)


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
