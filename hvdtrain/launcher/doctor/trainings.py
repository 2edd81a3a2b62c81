"""The burn-in of one host, by its probe: a process on each core and each GPU repeats a training."""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from hvdtrain.interpreter import module_argv

# Commands, since this package does without torch.
ON_CORE = module_argv("hvdtrain.evidence.known_answer")
ON_DEVICE = module_argv("hvdtrain.evidence.burn_in_device")
CORE, GPU = "core", "GPU"
LISTING_S = 90.0  # longest time for torch to be imported, and to find the GPUs
SILENT_S = 180.0  # longest time without a result: a core or GPU that hangs
END_S = 2.0  # for the last lines of a process that has ended
TRACES_SENT = 100  # per host, some KiB each


class BurnInTraining:
    """The process that trains on one core or GPU, and its results so far."""

    def __init__(self, what: str, number: int, command: Sequence[str], uuid: str = "") -> None:
        self._results: dict[str, Any] = {
            "what": what,
            "number": number,
            "uuid": uuid,
            "kind": "",
            "repetitions": 0,
            "answers": {},
            "sums": None,
        }
        self._problem: str | None = None
        self._last_words = ""
        self._heard_s = time.monotonic()
        self._process = subprocess.Popen(
            command,
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
                    self._results = self._results | json.loads(line)
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
            if not self._problem and not (code == 0 and self._results["repetitions"]):
                ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                words = f" ({self._last_words})" if self._last_words else ""
                self._problem = f"ended by {ended}{words}"
        return self._results | {"running": code is None, "problem": self._problem}

    def end(self) -> int:
        """Kill the process, if it runs; return its exit code."""
        self._process.kill()
        self._reader.join(END_S)
        return self._process.wait()


class Trainings:
    """The trainings on all cores of this host, and on the GPUs that torch finds."""

    def __init__(self) -> None:
        self._trainings: list[BurnInTraining] = []
        self._listing: subprocess.Popen[str] | None = None
        self._listing_since_s = self._seconds = 0.0
        self._problem: str | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self, seconds: float) -> dict[str, Any]:
        """Start a process on each core that may be used; return the state. Raises OSError.

        Those on GPUs start once torch, in another process, has found these.
        """
        self._seconds, self._listing_since_s = seconds, time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="hvdtrain-burn-in-")
        for core in sorted(os.sched_getaffinity(0)):
            self._trainings.append(BurnInTraining(CORE, core, [*ON_CORE, str(core), str(seconds)]))
        self._listing = subprocess.Popen(
            [*ON_DEVICE, "list"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        return self.state()

    def state(self) -> dict[str, Any]:
        """Return the results of each core and GPU, and the trace of each answer."""
        self._start_devices()
        units = [training.state() for training in self._trainings]
        traces = {
            answer: occurrences["trace"]
            for unit in units
            for answer, occurrences in unit["answers"].items()
        }
        for unit in units:
            unit["answers"] = {
                answer: {"count": occurrences["count"], "at": occurrences["at"]}
                for answer, occurrences in unit["answers"].items()
            }
        return {
            "units": units,
            "traces": dict(list(traces.items())[:TRACES_SENT]),
            "listing": self._listing is not None,
            "problem": self._problem,
        }

    def _start_devices(self) -> None:
        """Start a process on each GPU, once they are listed. Raises OSError."""
        if self._listing is None or self._folder is None:
            return
        if self._listing.poll() is None:
            if time.monotonic() - self._listing_since_s > LISTING_S:
                self._problem = f"torch has not found the GPUs within {LISTING_S:.0f} s"
                self._end_listing()
            return
        output, errors = self._listing.communicate()
        code, self._listing = self._listing.returncode, None
        try:
            devices = json.loads(output.strip().rpartition("\n")[2])
        except ValueError:
            words = errors.strip().rpartition("\n")[2][:300]
            self._problem = f"torch cannot list the GPUs: {words or f'exit code {code}'}"
            return
        for number, (device, uuid) in enumerate(devices):
            numbers = map(str, (self._seconds, number, len(devices)))
            command = [*ON_DEVICE, device, *numbers, f"{self._folder.name}/store"]
            self._trainings.append(BurnInTraining(GPU, number, command, uuid))

    def _end_listing(self) -> None:
        if self._listing is not None:
            self._listing.kill()
            self._listing.communicate()
            self._listing = None

    def end(self) -> None:
        """Kill all processes."""
        self._end_listing()
        for training in self._trainings:
            training.end()
        if self._folder is not None:
            self._folder.cleanup()
