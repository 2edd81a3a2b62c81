"""`hvdtrain verify-resume -- train ...`: verification that a configuration resumes exactly.

It trains once without interruption, and again while workers are stopped (SIGTERM) and killed
(SIGKILL) at random moments and the run is resumed each time. The final parameters must have the
same hash. Everything is started as a command.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from hvdtrain.errors import EXIT_MISMATCH, EXIT_OK, TrainingError, UsageError
from hvdtrain.lab.children import Commanded
from hvdtrain.launcher.processes import command_of, marked
from hvdtrain.log import counted, say

MARK = "HVDTRAIN_VERIFY_RESUME"
POLL_S = 0.02
LARGEST_DELAY_S = 1.5
VANISH_S = 30.0


def verify_resume(
    train_flags: list[str], *, workers: int, controller: str, cuts: int, seed: int
) -> int:
    """Run the verification; return the exit code (17: the parameters differ).

    `controller`: gloo or mpi. `cuts`: number of interruptions. `seed`: that of their moments.
    """
    for flag in ("--output", "--experiment", "--resume"):
        if any(part == flag or part.startswith(flag + "=") for part in train_flags):
            raise UsageError(f"{flag} is chosen by verify-resume: leave it out")
    command = [sys.executable, "-m", "hvdtrain.cli", "train", *train_flags, "--resume", "auto"]
    if workers > 1:
        horovodrun = str(Path(sys.executable).parent / "horovodrun")
        command = [horovodrun, "-np", str(workers), f"--{controller}", *command]
    with tempfile.TemporaryDirectory(prefix="hvdtrain-verify-resume-") as scratch:
        reference = TrialRun(command, Path(scratch), "reference")
        reference.wait_for_success()
        expected = reference.summary()["params_sha256"]
        say(f"uninterrupted: {expected}")
        hashes = _interrupted_hashes(command, Path(scratch), cuts, random.Random(seed))
    different = sum(found != expected for found in hashes)
    say(
        f"{counted(cuts, 'cut')} in {counted(len(hashes), 'run')} on {counted(workers, 'worker')} "
        f"({controller if workers > 1 else 'without Horovod'}): "
        + ("every run ended with the same parameters" if not different else f"{different} DIFFER")
    )
    return EXIT_MISMATCH if different else EXIT_OK


def _interrupted_hashes(
    command: list[str], folder: Path, cuts: int, dice: random.Random
) -> list[str]:
    """Return the final hash of each run; there are as many runs as all cuts need."""
    hashes: list[str] = []
    done = 0
    while done < cuts:
        run = TrialRun(command, folder, f"interrupted-{len(hashes)}")
        while done < cuts:
            kind = signal.SIGTERM if done % 2 else signal.SIGKILL
            if not run.cut(kind, dice, after_checkpoint=done % 4 != 3):
                break  # the run finished first
            done += 1
            run.start()
        run.wait_for_success()
        hashes.append(run.summary()["params_sha256"])
        say(f"interrupted:   {hashes[-1]}")
    return hashes


class TrialRun:
    """A run directory and the job that writes to it, which is started at once."""

    def __init__(self, command: list[str], folder: Path, name: str) -> None:
        self._path = folder / name
        self._log = folder / f"{name}.log"
        self._mark = f"{os.getpid()}-{name}"
        self._command = [*command, "--output", str(folder), "--experiment", name]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = os.environ | {MARK: self._mark, "PATH": path}
        self.start()

    def start(self) -> None:
        """Start or resume the job, in a session of its own."""
        self._job = Commanded(self._command, self._log, self._environment)

    def cut(self, kind: signal.Signals, dice: random.Random, after_checkpoint: bool) -> bool:
        """Send a signal to one worker at a random moment; return False where the run finished.

        `after_checkpoint`: at a moment after this start has written a checkpoint, possibly while
        it saves the next; else at any moment after it has logged.
        """
        before = self._progress(after_checkpoint)
        while self._progress(after_checkpoint) == before:
            if not self._is_running():
                self.wait_for_success()
                return False
            time.sleep(POLL_S)
        time.sleep(dice.uniform(0, LARGEST_DELAY_S))
        workers = self._workers() if self._is_running() else {}
        try:
            rank = dice.choice(sorted(workers))
            os.kill(workers[rank], kind)
        except (IndexError, ProcessLookupError):  # no worker is left
            self.wait_for_success()
            return False
        self._wait_until_gone()
        log = self._log.read_text(errors="replace")
        began = re.findall(r"continuing from .*(step-\d+)", log) or ["the beginning"]
        say(
            f"cut: {kind.name} to rank {rank} of a job that started from {began[-1]}; "
            f"newest checkpoint: {self._last()}"
        )
        return not self._finished()

    def wait_for_success(self) -> None:
        """Wait for the job. Raises TrainingError, with its last lines, unless the run finished."""
        while self._is_running():
            time.sleep(POLL_S)
        self._wait_until_gone()
        if not self._finished():
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise TrainingError(f"verify-resume: the training itself fails:\n{tail}")

    def summary(self) -> dict[str, str]:
        """Return the content of the run's summary.json; empty if it has none, or is cut off."""
        found: dict[str, str] = {}
        with suppress(OSError, ValueError):
            found = json.loads((self._path / "summary.json").read_text("utf-8"))
        return found

    def _finished(self) -> bool:
        return self.summary().get("status") == "finished"

    def _progress(self, by_checkpoint: bool) -> object:
        if by_checkpoint:
            return self._last()
        metrics = self._path / "metrics.jsonl"
        return metrics.stat().st_mtime_ns if metrics.exists() else None

    def _last(self) -> str:
        pointer = self._path / "checkpoints" / "last"
        return pointer.read_text("utf-8").strip() if pointer.exists() else "none"

    def _is_running(self) -> bool:
        return self._job.exit_code() is None

    def _workers(self) -> dict[int, int]:
        """Return the process ids of running workers, by rank."""
        found = {}
        for pid, environment in marked(MARK, self._mark).items():
            command = command_of(pid)
            if "hvdtrain.cli" in command and not re.search("horovodrun|mpirun", command):
                rank = environment.get("HOROVOD_RANK") or environment.get("OMPI_COMM_WORLD_RANK")
                found[int(rank or 0)] = pid
        return found

    def _wait_until_gone(self) -> None:
        """Wait until launcher and workers have ended; end those left after VANISH_S."""
        deadline = time.monotonic() + VANISH_S
        while marked(MARK, self._mark) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._job.end()
