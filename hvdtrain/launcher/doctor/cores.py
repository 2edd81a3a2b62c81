"""The burn-in of one host, by its probe: a process on each core repeats a training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

# A command, since this package does without torch.
TRAINING = (sys.executable, "-m", "hvdtrain.lab.known_answer")
SILENT_S = 180.0  # longest time without a result: a core that hangs
END_S = 2.0  # for the last lines of a process that has ended
TRACES_SENT = 100  # per host, some KiB each


class CoreTraining:
    """The process that trains on one core, and its results so far."""

    def __init__(self, core: int, seconds: float) -> None:
        self._found: dict[str, Any] = {"number": core, "kind": "", "repetitions": 0, "answers": {}}
        self._problem: str | None = None
        self._last_words = ""
        self._heard_s = time.monotonic()
        self._process = subprocess.Popen(
            [*TRAINING, str(core), str(seconds)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    self._found = self._found | json.loads(line)
                    self._heard_s = time.monotonic()
                except (ValueError, TypeError):  # a warning, or the reason of its end
                    self._last_words = line.strip()[:300] or self._last_words

    def state(self) -> dict[str, Any]:
        """Return all results so far. A process that hangs is ended."""
        code, silent_s = self._process.poll(), time.monotonic() - self._heard_s
        if code is None and silent_s > SILENT_S:
            self._problem = f"gave no result for {silent_s:.0f} s"
            code = self.end()
        if code is not None:
            self._reader.join(END_S)
            self._problem = self._problem or self._explain(code)
        return self._found | {"running": code is None, "problem": self._problem}

    def _explain(self, code: int) -> str | None:
        """Return what is wrong with the end of the process, or None."""
        if code == 0 and self._found["repetitions"]:
            return None
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"ended by {ended}" + (f" ({self._last_words})" if self._last_words else "")

    def end(self) -> int:
        """Kill the process, if it runs; return its exit code."""
        self._process.kill()
        self._reader.join(END_S)
        return self._process.wait()


class Cores:
    """The trainings on all cores of this host."""

    def __init__(self) -> None:
        self._trainings: list[CoreTraining] = []

    def start(self, seconds: float) -> dict[str, Any]:
        """Start a process on each core that may be used; return the state. Raises OSError."""
        for core in sorted(os.sched_getaffinity(0)):
            self._trainings.append(CoreTraining(core, seconds))
        return self.state()

    def state(self) -> dict[str, Any]:
        """Return the results of each core, and the trace of each answer (alike on most cores)."""
        cores = [training.state() for training in self._trainings]
        traces: dict[str, Any] = {}
        for core in cores:
            traces |= {answer: given["trace"] for answer, given in core["answers"].items()}
            core["answers"] = {
                answer: {"count": given["count"], "at": given["at"]}
                for answer, given in core["answers"].items()
            }
        return {"cores": cores, "traces": dict(list(traces.items())[:TRACES_SENT])}

    def end(self) -> None:
        """Kill all processes."""
        for training in self._trainings:
            training.end()
