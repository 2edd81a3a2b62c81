"""SIGTERM and SIGINT raise Stopped in the main thread; a second one ends the process at once.

A main thread that waits inside a collective does not get back to Python to raise anything. A
thread of ours then does what must be done instead: it hears of the signal through a socket that
the interpreter's own handler writes to.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from hvdtrain.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STUCK_AFTER_S = 0.4  # mpirun follows its SIGTERM with a SIGKILL after 1 s


class StopSignals:
    """Installed once, by the main thread."""

    def __init__(self) -> None:
        self.if_stuck: Callable[[Stopped], None] = lambda error: None
        self._raised = threading.Event()
        hearing, writing = socket.socketpair()
        writing.setblocking(False)
        self._sockets = (hearing, writing)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._raise)
        threading.Thread(target=self._listen, name="stop-signals", daemon=True).start()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._raised.set()
        signal.signal(number, signal.SIG_DFL)
        raise _stopped(number)

    def _listen(self) -> None:
        while received := self._sockets[0].recv(1):
            if received[0] in SIGNALS and not self._raised.wait(STUCK_AFTER_S):
                self.if_stuck(_stopped(received[0]))


def _stopped(number: int) -> Stopped:
    return Stopped(number, signal.Signals(number).name)
