"""What an agent knows of its worker from the pipe of hvdtrain/pulse.py."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

WAITING = "exchange"  # the phase in which a rank waits for others
OWN = ("data", "compute", "update")  # phases of a step that depend on this rank alone
STEPS_SHOWN = 10  # over which a rank's own time is averaged


class WorkerPulse:
    """Reads one worker's beats."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""
        self._figures: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._beat_s = time.monotonic()
        self._phase, self._step, self._began_s = "start", 0, 0.0
        self._busy_s = 0.0  # of this step so far, in phases of its own
        self._busy_of_steps: list[float] = []
        self.speaker = 0  # the id of the process that writes to it, as it has told it

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bool:
        """Take in what has come; False once the worker has closed its end."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fd, 1 << 16)
            if not data:
                return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):
                self._take(line.decode("utf-8", "replace"))
        return True

    def take_figures(self) -> dict[str, Any]:
        """The newest figures, once."""
        figures, self._figures = self._figures, {}
        return figures

    def report(self) -> dict[str, Any]:
        """Step, phase, and for how long nothing has come; what it ended with."""
        steps = self._busy_of_steps
        return {
            "step": self._step,
            "phase": self._phase,
            "silent_s": round(time.monotonic() - self._beat_s, 3),
            "busy_s": round(sum(steps) / len(steps), 6) if steps else None,
            "speaks": self.speaker != 0,
        } | self._last

    def _take(self, line: str) -> None:
        kind, text = line[:1], line[1:]
        if kind == "+":
            self._beat_s = time.monotonic()
            phase, step, began = text.split(" ")
            self._change(phase, int(step), float(began))
        elif kind == "=":
            self._figures = dict(json.loads(text))
        elif kind == "!":
            self._last = dict(json.loads(text))
        elif kind == "?":
            self.speaker = int(text)
            self._beat_s = time.monotonic()

    def _change(self, phase: str, step: int, began_s: float) -> None:
        if self._phase in OWN and self._began_s:
            self._busy_s += began_s - self._began_s
        if step != self._step:
            if self._step:
                self._busy_of_steps = [*self._busy_of_steps, self._busy_s][-STEPS_SHOWN:]
            self._busy_s = 0.0
        self._phase, self._step, self._began_s = phase, step, began_s
