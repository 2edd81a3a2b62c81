"""Stop requests by SIGTERM, SIGINT, SIGUSR1 and SIGHUP.

A second signal ends the process at once, unless it arrives together with the first: batch systems
signal every process, and launchers forward theirs.

Before training a signal raises Stopped. During training it is only recorded, so that all ranks stop
at the same step. A main thread that waits in a collective for a rank that has ended never reaches
that step, so another thread watches: it receives signals through a socket that the interpreter's
own handler writes to, which works while the main thread is in native code.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from hvdtrain.errors import HvdtrainError, Stopped
from hvdtrain.pulse import STOP_SIGNALS
from hvdtrain.slurm import in_job

TOGETHER_S = 2.0  # further signals within this time are the same request
NOTE_AFTER_S = 0.4  # mpirun sends SIGKILL 1 s after its SIGTERM
STUCK_AFTER_S = 20.0  # without a step


class StopSignals:
    """The signal handlers of a run, as a context manager of the main thread."""

    def __init__(self) -> None:
        self.requested: int | None = None
        self.note: Callable[[HvdtrainError], None] = lambda error: None
        self.give_up: Callable[[Stopped], None] = lambda error: None
        self._handlers: dict[int, Any] = {}
        self._training, self._last_step_s = False, 0.0
        self._over = threading.Event()
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)

    def __enter__(self) -> StopSignals:
        self._fd = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        # Under nohup SIGHUP is ignored; so is SIGINT in the background of a script, but it counts.
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._handlers = {
            number: signal.signal(number, self._handle)
            for number in STOP_SIGNALS
            if not (ignored and number == signal.SIGHUP)
        }
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd)
        self._over.set()
        self._writing.close()
        self._thread.join()
        self._reading.close()

    def training_starts(
        self, note: Callable[[HvdtrainError], None], give_up: Callable[[Stopped], None]
    ) -> None:
        """Record signals from now on, instead of raising Stopped.

        `note` is called in a thread NOTE_AFTER_S after a signal arrives, `give_up` once, when no
        step has ended for STUCK_AFTER_S after it.
        """
        self.note, self.give_up, self._training = note, give_up, True

    def ignore(self) -> None:
        """Ignore signals from now on, because the run is already ending."""
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)

    def alive(self) -> None:
        """Record that the main thread makes progress; called at each step and in evaluations."""
        self._last_step_s = time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            return  # the watching thread decides
        self.requested = number
        if not self._training:
            for other in self._handlers:
                signal.signal(other, signal.SIG_DFL)
            raise Stopped(number)

    def _watch(self) -> None:
        number = self._receive(None)
        if number is None:
            return
        error, began_s, noted = Stopped(number), time.monotonic(), False
        self._last_step_s = began_s
        while not self._over.is_set():
            again = self._receive(NOTE_AFTER_S)
            now = time.monotonic()
            late = again is not None and now - began_s > TOGETHER_S
            if again and late and (again != signal.SIGTERM or not in_job()):
                os._exit(128 + again)
            if not noted and now - began_s >= NOTE_AFTER_S and not self._over.is_set():
                noted = True
                self.note(error)
            if now - self._last_step_s >= STUCK_AFTER_S:
                self.give_up(error)
                return

    def _receive(self, limit_s: float | None) -> int | None:
        """Return the next of the signals; None if none comes in time, or on exit of the context."""
        self._reading.settimeout(limit_s)
        with suppress(TimeoutError):
            while received := self._reading.recv(1):
                if received[0] in self._handlers:
                    return received[0]
        return None
