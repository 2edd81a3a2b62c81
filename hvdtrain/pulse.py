"""What a worker tells the agent that has started it: phase and step, and how it ends.

`hvdtrain launch` starts each worker under an agent of its own, and gives it a pipe
(hvdtrain/launcher/agent.py). Without one nothing is told. Each line of the pipe is one write, and
what the pipe has no room for is left out: a worker never waits for whoever watches it.

    +PHASE STEP SECONDS     this phase begins, by the worker's monotonic clock
    ={"loss": ...}          figures to show
    !{"peer": true}         it ends with an error, here because another rank has failed
    ?PID                    who speaks: SIGUSR2 makes it write the Python stacks of all threads to
                            standard error
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
    """One process's; silent without a pipe."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._phase = "start"
        self.step = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Pulse:
        """The pipe of the agent, if one has started this process; offers it stacks."""
        text = environment.get(PULSE_FD, "")
        if not text.isdigit():
            return cls()
        try:
            if not stat.S_ISFIFO(os.fstat(int(text)).st_mode):  # something else has its number now
                return cls()
            os.set_blocking(int(text), False)
            os.set_inheritable(int(text), False)  # it is not for the processes that we start
        except OSError:  # inherited the variable, but not the pipe
            return cls()
        pulse = cls(int(text))
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        pulse._tell(f"?{os.getpid()}")
        return pulse

    @property
    def is_watched(self) -> bool:
        """Whether there is an agent at the other end."""
        return self._fd is not None

    def beat(self, phase: str | None = None) -> None:
        """A phase begins, or (None) is still going on."""
        self._phase = phase or self._phase
        if self._fd is not None:  # several times a step: no text for nobody
            self._tell(f"+{self._phase} {self.step} {time.monotonic():.6f}")

    def show(self, **figures: float | int | None) -> None:
        """Figures of the whole job, for whoever looks on."""
        self._tell("=" + json.dumps(figures))

    def end(self, error: Exception) -> None:
        """The error that this process ends with."""
        self._tell("!" + json.dumps({"peer": isinstance(error, PeerFailure)}))

    def _tell(self, line: str) -> None:
        if self._fd is not None:
            with suppress(OSError):
                os.write(self._fd, f"{line}\n".encode())
