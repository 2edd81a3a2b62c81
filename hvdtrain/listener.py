"""A listening socket that strangers cannot wear out.

Whoever connects is a stranger until it has proven who it is. Only so many wait for that at a time.
Where there is no room, the one that has waited longest is turned away, once it has had its time;
until then newcomers stay in the system's queue. So a flood costs little, and those who do answer
get in all the same.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

# Accepting fails, and would go on failing at once, for want of descriptors or memory.
EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
REST_S = 0.1

Guest = TypeVar("Guest", bound=Hashable)


class Door(Generic[Guest]):
    """Accepts connections, and keeps count of those that have yet to prove themselves."""

    def __init__(
        self, listener: socket.socket, turn_away: Callable[[Guest], None], patience_s: float
    ) -> None:
        """`listener` blocks for a limited time, or not at all. `turn_away` ends a connection;
        `patience_s` is what each has at least to prove itself.
        """
        self._listener, self._turn_away, self._patience_s = listener, turn_away, patience_s
        self._waiting: dict[Guest, float] = {}  # since when, the oldest first
        self._room_left: int | None = None  # less than asked for, once descriptors have run out
        self._open_at_s = 0.0
        self._lock = threading.Lock()

    @property
    def rest_s(self) -> float:
        """For so long nobody is let in: not to be asked before, though somebody knocks."""
        return max(0.0, self._open_at_s - time.monotonic())

    def accept(self, room: int) -> socket.socket | None:
        """Take the next connection; None where there is none, or no room.

        `room`: how many strangers may wait at a time. Never raises for what a stranger can cause.
        """
        if self.rest_s or not self._make_room(room):
            return None
        try:
            return self._listener.accept()[0]
        except OSError as error:  # also: hung up already, or nobody came
            if error.errno in EXHAUSTED:
                self._room_left = max(1, len(self._waiting) // 2)
                self._open_at_s = time.monotonic() + REST_S
            return None

    def enter(self, guest: Guest) -> None:
        """From here on it waits, and may be turned away."""
        with self._lock:
            self._waiting[guest] = time.monotonic()

    def leave(self, guest: Guest) -> None:
        """It has proven itself, or is gone."""
        with self._lock:
            self._waiting.pop(guest, None)

    def _make_room(self, room: int) -> bool:
        """Whether there is room for one more; those who had their time are turned away for it."""
        room = room if self._room_left is None else min(room, self._room_left)
        while len(self._waiting) >= room:
            with self._lock:
                oldest, since_s = next(iter(self._waiting.items()), (None, 0.0))
                if oldest is None:
                    break
                if time.monotonic() < since_s + self._patience_s:
                    self._open_at_s = since_s + self._patience_s
                    return False
                del self._waiting[oldest]
            self._turn_away(oldest)
        return True
