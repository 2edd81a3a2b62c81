"""Stop requests by SIGTERM, SIGINT, SIGUSR1 and SIGHUP.

A second signal ends the process at once, unless it arrives together with the first: batch systems
signal every process, and launchers forward theirs.

Before training a signal raises Stopped. During training it is only recorded, so that all ranks stop
at the same step. A main thread that waits in a collective for a rank that has ended never reaches
that step, so another thread watches: it receives signals through a socket that the interpreter's
own handler writes to, which works while the main thread is in native code. It ends the process
before the deadline of the stop, if there is one, else after STUCK_AFTER_S without a step.
"""

from __future__ import annotations

import math
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
from hvdtrain.pulse import STOP_SIGNALS, STOP_WITHIN
from hvdtrain.slurm import in_job

TOGETHER_S = 2.0  # further signals within this time are the same request
NOTE_AFTER_S = 0.4  # mpirun sends SIGKILL 1 s after its SIGTERM
STUCK_AFTER_S = 20.0  # without a step
LEAVING_S, LEAVING_PART = 2.0, 0.25  # before the deadline, at most this part of the time until then


class StopSignals:
    """The signal handlers of a run, as a context manager of the main thread."""

    def __init__(self, within_s: float | None = None) -> None:
        """`within_s`: time from the first signal to the end of the process; None: no deadline."""
        self._within_s = within_s
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

        `note` is called in a thread NOTE_AFTER_S after a signal arrives, `give_up` once, when the
        run has not ended in time: it then has until the deadline to leave.
        """
        self.note, self.give_up, self._training = note, give_up, True

    def ignore(self) -> None:
        """Ignore signals from now on, because the run is already ending."""
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        self.saving()  # the records of its end

    def alive(self) -> None:
        """Record that the main thread makes progress; called at each step and in evaluations."""
        self._last_step_s = time.monotonic()

    def saving(self) -> None:
        """Record that no step ends while the state or the end of the run is saved, for long."""
        self._last_step_s = math.inf

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
        self._last_step_s = max(began_s, self._last_step_s)  # the state may be being saved
        while not self._over.is_set():
            again = self._receive(NOTE_AFTER_S)
            now = time.monotonic()
            late = again is not None and now - began_s > TOGETHER_S
            if again and late and (again != signal.SIGTERM or not in_job()):
                os._exit(128 + again)
            if not noted and now - began_s >= NOTE_AFTER_S and not self._over.is_set():
                noted = True
                self.note(error)
            if reason := self._why_over(now - began_s, now - self._last_step_s):
                self.give_up(Stopped(number, reason))
                return

    def _why_over(self, since_signal_s: float, since_step_s: float) -> str:
        """Return why the process must leave now; empty while there is time."""
        if self._within_s is None:
            return f"no step ended for {STUCK_AFTER_S:g} s" if since_step_s >= STUCK_AFTER_S else ""
        leaving_s = min(LEAVING_S, LEAVING_PART * self._within_s)
        late = since_signal_s >= self._within_s - leaving_s
        return f"the time to save is over ({STOP_WITHIN}={self._within_s:g})" if late else ""

    def _receive(self, limit_s: float | None) -> int | None:
        """Return the next of the signals; None if none comes in time, or on exit of the context."""
        self._reading.settimeout(limit_s)
        with suppress(TimeoutError):
            while received := self._reading.recv(1):
                if received[0] in self._handlers:
                    return received[0]
        return None
