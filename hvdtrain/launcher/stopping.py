"""Handling of signals to `hvdtrain launch`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from hvdtrain.errors import Stopped
from hvdtrain.slurm import in_job

# A batch system may signal every process of a job, and the batch script pass its signal on too:
# signals this close to the first one count as one.
TOGETHER_S = 1.0
_IGNORE_SIGTERM = """\
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.argv[1], [os.path.basename(sys.argv[1]), *sys.argv[2:]])
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequests:
    """The signals received: recorded while workers run, else raised as Stopped."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._workers_run = False
        self._first_s = 0.0
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._handle)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record signals within the context instead of raising Stopped."""
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
    """Return the command that runs `command`, in a Slurm job with SIGTERM ignored and blocked.

    `scontrol requeue` and `scancel` send SIGTERM to every process of the job's first host. It would
    end horovodrun, mpirun and ssh, and so the workers, before they can save; Slurm's SIGKILL comes
    later (KillWait). Ignoring alone does not suffice, since mpirun installs a handler; blocking
    alone does not either, since a shell that starts the program unblocks it.
    """
    return (
        [sys.executable, "-I", "-S", "-c", _IGNORE_SIGTERM, *command] if in_job() else list(command)
    )
