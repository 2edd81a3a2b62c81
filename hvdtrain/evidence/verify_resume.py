"""`hvdtrain verify-resume -- train ...`: verification that a configuration resumes exactly.

It trains once without interruption, and again while workers are stopped (SIGTERM) and killed
(SIGKILL) at random moments and the run is resumed each time. The final parameters must have the
same hash. Everything is started as a command.
"""

import os
import random
import re
import signal
import time
from pathlib import Path

from hvdtrain.errors import EXIT_MISMATCH, EXIT_OK
from hvdtrain.evidence.children import POLL_S
from hvdtrain.evidence.trials import MARK, Training, Trial, scratch_folder
from hvdtrain.launcher.processes import command_of, marked
from hvdtrain.log import counted, say
from hvdtrain.records.folders import CHECKPOINTS, METRICS

LARGEST_DELAY_S = 1.5


def verify_resume(training: Training, *, workers: int, cuts: int, seed: int) -> int:
    """Run the verification; return the exit code (17: the parameters differ).

    `cuts`: number of interruptions. `seed`: that of their moments.
    """
    with scratch_folder("verify-resume") as scratch:
        reference = Trial(training, workers, scratch, "reference")
        expected = reference.wait_for_success()["params_sha256"]
        say(f"uninterrupted: {expected}")
        hashes = _interrupted_hashes(training, workers, scratch, cuts, random.Random(seed))
    different = sum(digest != expected for digest in hashes)
    say(
        f"{counted(cuts, 'cut')} in {counted(len(hashes), 'run')} on {counted(workers, 'worker')} "
        f"({training.controller if workers > 1 else 'without Horovod'}): "
        + ("every run ended with the same parameters" if not different else f"{different} DIFFER")
    )
    return EXIT_MISMATCH if different else EXIT_OK


def _interrupted_hashes(
    training: Training, workers: int, folder: Path, cuts: int, dice: random.Random
) -> list[str]:
    """Return the final hash of each run; there are as many runs as all cuts need."""
    hashes: list[str] = []
    done = 0
    while done < cuts:
        run = InterruptedTrial(training, workers, folder, f"interrupted-{len(hashes)}")
        while done < cuts:
            if not run.cut(
                signal.SIGTERM if done % 2 else signal.SIGKILL,
                dice,
                after_checkpoint=done % 4 != 3,
            ):
                break  # the run finished first
            done += 1
            run.start(training, workers)
        hashes.append(run.wait_for_success()["params_sha256"])
        say(f"interrupted:   {hashes[-1]}")
    return hashes


class InterruptedTrial(Trial):
    """A run whose workers are stopped and killed."""

    def cut(self, kind: signal.Signals, dice: random.Random, after_checkpoint: bool) -> bool:
        """Send a signal to one worker at a random moment; return False where the run finished.

        `after_checkpoint`: at a moment after this start has written a checkpoint, possibly while
        it saves the next; else at any moment after it has logged.
        """
        before = self._progress(after_checkpoint)
        while self._progress(after_checkpoint) == before:
            if not self.is_running():
                self.wait_for_success()
                return False
            time.sleep(POLL_S)
        time.sleep(dice.uniform(0, LARGEST_DELAY_S))
        workers = self._workers() if self.is_running() else {}
        try:
            rank = dice.choice(sorted(workers))
            os.kill(workers[rank], kind)
        except (IndexError, ProcessLookupError):  # no worker is left
            self.wait_for_success()
            return False
        self._wait_until_gone()
        began = re.findall(r"continuing from .*(step-\d+)", self.log()) or ["the beginning"]
        say(
            f"cut: {kind.name} to rank {rank} of a job that started from {began[-1]}; "
            f"newest checkpoint: {self._last()}"
        )
        return not self.is_finished()

    def _progress(self, by_checkpoint: bool) -> object:
        if by_checkpoint:
            return self._last()
        metrics = self.path / METRICS
        return metrics.stat().st_mtime_ns if metrics.exists() else None

    def _last(self) -> str:
        pointer = self.path / CHECKPOINTS / "last"
        return pointer.read_text("utf-8").strip() if pointer.exists() else "none"

    def _workers(self) -> dict[int, int]:
        """Return the process ids of running workers, by rank."""
        pids = {}
        for pid, environment in marked(MARK, self._mark).items():
            command = command_of(pid)
            if self._training.mark in command and not re.search("horovodrun|mpirun", command):
                rank = environment.get("HOROVOD_RANK") or environment.get("OMPI_COMM_WORLD_RANK")
                pids[int(rank or 0)] = pid
        return pids
