"""Signals to `hvdtrain launch`."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hvdtrain.errors import Stopped

# A batch system may signal every process of a job, while its script hands its own signal on: what
# comes with the first signal is no impatience.
TOGETHER_S = 1.0
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
        self._first_s = self._first_s or now
        self.numbers.append(number)
        if not self._workers_run:
            raise Stopped(number)
