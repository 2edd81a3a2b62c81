"""`hvdtrain verify-resume -- train ...`: verification that a configuration resumes exactly.

It trains once without interruption, and again while workers are stopped (SIGTERM) and killed
(SIGKILL) at random moments and the run is resumed each time. The final parameters must have the
same hash. Only the standard library is needed, as everything is started as a command.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import EXIT_MISMATCH, EXIT_OK, TrainingError, UsageError
from hvdtrain.launcher.processes import command_of, marked
from hvdtrain.log import say

MARK = "HVDTRAIN_VERIFY_RESUME"
POLL_S = 0.02
LARGEST_DELAY_S = 1.5
VANISH_S = 30.0


@dataclass(frozen=True)
class ResumeTrial:
    """Configuration of one verification."""

    train_flags: list[str]
    workers: int
    controller: str  # gloo or mpi
    cuts: int
    seed: int


def verify_resume(trial: ResumeTrial) -> int:
    """Run the verification; return the exit code (17: the parameters differ)."""
    for flag in ("--output", "--experiment", "--resume"):
        if any(part == flag or part.startswith(flag + "=") for part in trial.train_flags):
            raise UsageError(f"{flag} is chosen by verify-resume: leave it out")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-verify-resume-") as scratch:
        reference = TrialRun(trial, Path(scratch), "reference")
        reference.start()
        reference.wait_for_success()
        expected = reference.summary()["params_sha256"]
        say(f"uninterrupted: {expected}")
        hashes = _interrupted_hashes(trial, Path(scratch))
    different = sum(found != expected for found in hashes)
    say(
        f"{trial.cuts} cuts in {len(hashes)} runs on {trial.workers} workers ({trial.controller}): "
        + ("every run ended with the same parameters" if not different else f"{different} DIFFER")
    )
    return EXIT_MISMATCH if different else EXIT_OK


def _interrupted_hashes(trial: ResumeTrial, folder: Path) -> list[str]:
    """Return the final hash of each run; there are as many runs as all cuts need."""
    dice = random.Random(trial.seed)
    hashes: list[str] = []
    cuts = 0
    while cuts < trial.cuts or not hashes:
        run = TrialRun(trial, folder, f"interrupted-{len(hashes)}")
        while cuts < trial.cuts:
            run.start()
            kind = signal.SIGTERM if cuts % 2 else signal.SIGKILL
            if not run.cut(kind, dice, after_checkpoint=cuts % 4 != 3):
                break  # the run finished first
            cuts += 1
        if not run.finished():
            run.start()
            run.wait_for_success()
        hashes.append(run.summary()["params_sha256"])
        say(f"interrupted:   {hashes[-1]}")
    return hashes


class TrialRun:
    """A run directory and the job that writes to it."""

    def __init__(self, trial: ResumeTrial, folder: Path, name: str) -> None:
        self._trial = trial
        self._path = folder / name
        self._log = folder / f"{name}.log"
        self._mark = f"{os.getpid()}-{name}"
        command = [sys.executable, "-m", "hvdtrain.cli", "train", *trial.train_flags]
        command += ["--output", str(folder), "--experiment", name, "--resume", "auto"]
        if trial.workers > 1:
            horovodrun = str(Path(sys.executable).parent / "horovodrun")
            launcher = [horovodrun, "-np", str(trial.workers), f"--{trial.controller}"]
            command = [*launcher, *command]
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start or resume the job, in a session of its own."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | {MARK: self._mark, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

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
        workers = self._workers()
        if not self._is_running() or not workers:
            self.wait_for_success()
            return False
        rank = dice.choice(sorted(workers))
        try:
            os.kill(workers[rank], kind)
        except ProcessLookupError:
            self.wait_for_success()
            return False
        self._wait_until_gone()
        resumed = re.findall(r"resume: (.*)", self._log.read_text(errors="replace"))
        say(
            f"cut: {kind.name} to rank {rank}, last checkpoint {self._last()}"
            f" (this start: {resumed[-1].strip() if resumed else 'from the beginning'})"
        )
        return not self.finished()

    def wait_for_success(self) -> None:
        """Wait for the job. Raises TrainingError, with its last lines, unless the run finished."""
        assert self._process is not None
        self._process.wait()
        self._wait_until_gone()
        if not self.finished():
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise TrainingError(f"verify-resume: the training itself fails:\n{tail}")

    def finished(self) -> bool:
        try:
            return bool(self.summary()["status"] == "finished")
        except (OSError, ValueError):
            return False

    def summary(self) -> dict[str, str]:
        """Return the content of the run's summary.json."""
        found: dict[str, str] = json.loads((self._path / "summary.json").read_text("utf-8"))
        return found

    def _progress(self, by_checkpoint: bool) -> object:
        if by_checkpoint:
            return self._last()
        metrics = self._path / "metrics.jsonl"
        return metrics.stat().st_mtime_ns if metrics.exists() else None

    def _last(self) -> str:
        pointer = self._path / "checkpoints" / "last"
        return pointer.read_text("utf-8").strip() if pointer.exists() else "none"

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

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
        """Wait until launcher and workers have ended; kill those left after VANISH_S."""
        assert self._process is not None
        deadline = time.monotonic() + VANISH_S
        while (self._is_running() or marked(MARK, self._mark)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for pid in marked(MARK, self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
