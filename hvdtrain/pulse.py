"""Status reports of a worker to the agent that started it: phase, step and final error.

`hvdtrain launch` starts each worker under its own agent, with a pipe (hvdtrain/launcher/agent.py).
Without a pipe nothing is reported. Each line is one write to the pipe; a line that finds the pipe
full is dropped, so a worker never waits for its observer.

    +PHASE STEP SECONDS     start of a phase, by the worker's monotonic clock
    ={"loss": ...}          figures to show
    !{"peer": true}         end with an error, here because another rank has failed
    ?PID                    process id of the worker; on SIGUSR2 it writes the Python stacks of all
                            threads to standard error
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import stat
import time
from collections.abc import Mapping
from contextlib import suppress

from hvdtrain.errors import PeerFailure

PULSE_FD = "HVDTRAIN_PULSE_FD"
RESTART = "HVDTRAIN_RESTART"  # how often the launcher has started this job again
RING_TOKEN = "HVDTRAIN_RING_TOKEN"  # a secret of the workers of one start, for the ring's sockets
STACKS_SIGNAL = signal.SIGUSR2


class Pulse:
    """The status reports of one process; silent without a pipe."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._phase = "start"
        self.step = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Pulse:
        """Connect to the pipe of the agent that started this process, if any.

        Also registers the signal handler that writes stacks.
        """
        text = environment.get(PULSE_FD, "")
        if not text.isdigit():
            return cls()
        try:
            if not stat.S_ISFIFO(os.fstat(int(text)).st_mode):  # the number has been reused
                return cls()
            os.set_blocking(int(text), False)
            os.set_inheritable(int(text), False)  # child processes do not report
        except OSError:  # the variable was inherited, the pipe was not
            return cls()
        pulse = cls(int(text))
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        pulse._report(f"?{os.getpid()}")
        return pulse

    @property
    def is_watched(self) -> bool:
        """Return whether an agent reads the reports."""
        return self._fd is not None

    def beat(self, phase: str | None = None) -> None:
        """Report that a phase begins, or (None) that the current one continues."""
        self._phase = phase or self._phase
        if self._fd is not None:  # called several times a step: format only if read
            self._report(f"+{self._phase} {self.step} {time.monotonic():.6f}")

    def show(self, **figures: float | int | None) -> None:
        """Report figures of the whole job."""
        self._report("=" + json.dumps(figures))

    def end(self, error: Exception) -> None:
        """Report the error that this process ends with."""
        self._report("!" + json.dumps({"peer": isinstance(error, PeerFailure)}))

    def _report(self, line: str) -> None:
        if self._fd is not None:
            with suppress(OSError):
                os.write(self._fd, f"{line}\n".encode())
