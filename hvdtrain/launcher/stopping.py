"""Signals to `hvdtrain launch`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from hvdtrain.errors import Stopped
from hvdtrain.slurm import in_job

# A batch system may signal every process of a job, while its script hands its own signal on: what
# comes with the first signal is no impatience.
TOGETHER_S = 1.0
_DEAF = """\
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.argv[1], [os.path.basename(sys.argv[1]), *sys.argv[2:]])
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequests:
    """While workers run, signals are noted and passed on to them; else they end the command."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._workers_run = False
        self._first_s = 0.0
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._handle)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within, nothing is raised."""
        self._workers_run = True
        try:
            yield
        finally:
            self._workers_run = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.numbers and now - self._first_s < TOGETHER_S:
            return
        if self.numbers and number == signal.SIGTERM and in_job():
            return
        self._first_s = self._first_s or now
        self.numbers.append(number)
        if not self._workers_run:
            raise Stopped(number)


def spared_by_slurm(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command`, deaf to SIGTERM where this is a job of Slurm.

    `scontrol requeue` and `scancel` send it to every process of the job's first host. It would end
    horovodrun, mpirun and ssh, and with them the workers, before the launcher has had them save.
    Slurm's SIGKILL comes later (KillWait). Ignored alone, mpirun would handle it all the same;
    blocked alone, a shell that starts the program would unblock it.
    """
    return [sys.executable, "-I", "-S", "-c", _DEAF, *command] if in_job() else list(command)
