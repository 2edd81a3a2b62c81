"""The records of a run: all that rank 0 prints and writes."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hvdtrain import __version__
from hvdtrain.audit import AuditRecord
from hvdtrain.errors import AgreedFailure, AuditMismatch, HvdtrainError, PeerFailure, Stopped
from hvdtrain.exchange import Exchange
from hvdtrain.log import say
from hvdtrain.pulse import Pulse
from hvdtrain.run.console import Console, is_live, verdict, way_on
from hvdtrain.run.directory import RunDirectory
from hvdtrain.run.failure import describe, leave_cause, take_cause
from hvdtrain.run.records import Recorder
from hvdtrain.tasks import valid_metrics_of
from hvdtrain.train.checkpoint import Checkpoints, Snapshot
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.loop import Job, Outcome
from hvdtrain.train.metering import Totals


class Ledger:
    """The records of a run on a rank other than 0: none but the cause of a failure.

    The cause reaches rank 0's summary if both ranks share the folder.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def interval_end(self, totals: Totals, lr: float) -> None:
        """Record a logged step."""

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None:
        """Record an epoch."""

    def audited(self, record: AuditRecord) -> None:
        """Count an audit's result."""

    def progress(self) -> dict[str, Any]:
        """Return the values that the ledger of a resumed run continues from."""
        return {}

    def saved(self, snapshot: Snapshot | None, evaluation: Evaluation | None) -> None:
        """Write a checkpoint, in the background."""

    def check_saved(self) -> None:
        """Raise TrainingError if the last checkpoint could not be written."""

    def wait_until_saved(self) -> None:
        """Wait until the last checkpoint is on disk."""

    def finish(self, outcome: Outcome) -> None:
        """Complete the records of a finished run."""

    def fail(self, error: BaseException) -> None:
        """Record why the run did not finish; never raise an error that would hide `error`."""
        if not isinstance(error, PeerFailure | Stopped | AuditMismatch | AgreedFailure):
            leave_cause(self._folder, f"rank {self._rank}: {describe(error)}")

    def close(self) -> None:
        """Close all files and release the run directory."""


class RunLedger(Ledger):
    """The records of a run on rank 0; the summary is kept current, to be written at any time."""

    def __init__(
        self,
        directory: RunDirectory,
        job: Job,
        exchange: Exchange,
        keep_checkpoints: int,
        resumed: dict[str, Any] | None,
        config: dict[str, Any],
        pulse: Pulse,
    ) -> None:
        """Open the records.

        `resumed`: the state to resume from, if any. `config`: all options, as resolved. `pulse`
        receives the progress of the run.
        """
        self._pulse, self._total_steps = pulse, job.total_steps
        take_cause(directory.path)  # from an earlier start
        self._directory = directory
        self._checkpoints = Checkpoints(directory.path / "checkpoints", keep_checkpoints)
        self._params_sha256: str | None = None
        self._ended = False
        self._task = job.task
        self._best: float | None = None
        figures = ("loss", "accuracy", *valid_metrics_of(job.task), "samples")
        self._evaluated = [f"valid_{name}" for name in dict.fromkeys(figures)]
        live, step = is_live(exchange, sys.stdout), resumed["step"] if resumed else 0
        self._console = Console(job.total_steps, live, step)
        self._began_s = time.monotonic()
        self._takeaway = job.task.takeaway() | {"config": config}
        classes = self._takeaway.get("classes", ())
        self._recorder = Recorder(directory, step, classes)
        self._audit: dict[str, Any] = {
            "checked": 0,
            "failed": 0,
            "worst_error_over_bound": None,
        }
        self._summary: dict[str, Any] = {
            "status": "failed",
            "world_size": exchange.size,
            "controller": exchange.controller,
            "epochs": 0,
            "steps": 0,
            "samples_seen": 0,
            "train_loss": None,
            **dict.fromkeys(self._evaluated),
            "best": None,
            "bad_samples": 0,
            "samples_per_s": None,
            "params_sha256": None,
            "audit": self._audit,
            "resumed_from": resumed["step"] if resumed else None,
            "repeatable_exchange": exchange.repeatable,
            "versions": _versions(),
        }
        if resumed:
            self._audit |= resumed["progress"]["audit"]
            self._summary |= resumed["progress"]["summary"]
            self._best = resumed["progress"]["best"]

    def interval_end(self, totals: Totals, lr: float) -> None:
        self._note(totals)
        self._recorder.interval_end(totals, lr)
        self._pulse.show(
            epoch=totals.epoch,
            loss=totals.loss,
            samples_per_s=totals.samples_per_s,
            step_s=totals.step_s,
            total_steps=self._total_steps,
        )
        self._console.interval_end(totals, lr)

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None:
        self._note(totals)
        self._summary["epochs"] = totals.epoch
        if evaluation:
            self._note_evaluation(evaluation)
            self._note_best(evaluation, totals.step)
        self._recorder.epoch_end(totals, evaluation, lr)
        self._console.epoch_end(totals, evaluation, lr)

    def audited(self, record: AuditRecord) -> None:
        self._audit["checked"] += 1
        self._audit["failed"] += not record.ok
        worst = self._audit["worst_error_over_bound"] or 0.0
        self._audit["worst_error_over_bound"] = max(worst, record.worst_error_over_bound)
        self._recorder.audited(record)

    def progress(self) -> dict[str, Any]:
        names = ("epochs", "steps", "samples_seen", "train_loss", "bad_samples", "best")
        return {
            "audit": dict(self._audit),
            "summary": {name: self._summary[name] for name in (*names, *self._evaluated)},
            "best": self._best,
        }

    def saved(self, snapshot: Snapshot | None, evaluation: Evaluation | None) -> None:
        """Write a checkpoint, in the background."""
        assert snapshot is not None
        self._params_sha256 = snapshot.params_sha256
        if evaluation:
            self._note_best(evaluation, snapshot.step)
        best = self._summary["best"] or {}
        is_best = evaluation is not None and best.get("step") == snapshot.step
        self._checkpoints.save(snapshot, is_best, self._takeaway)

    def _note_best(self, evaluation: Evaluation, step: int) -> None:
        """Update the best figure; call before the state is captured, so that it is saved."""
        found = {"loss": evaluation.loss, **evaluation.metrics}[self._task.best]
        sign = 1 if self._task.best_is_highest else -1
        if self._best is None or sign * found > sign * self._best:
            self._best = found
            epoch = self._summary["epochs"]
            self._summary["best"] = {
                "step": step,
                "epoch": epoch,
                f"valid_{self._task.best}": found,
            }

    def check_saved(self) -> None:
        self._checkpoints.check()

    def wait_until_saved(self) -> None:
        self._checkpoints.wait()

    def finish(self, outcome: Outcome) -> None:
        """Wait for the last checkpoint, write the summary and print the verdict."""
        self._checkpoints.wait()
        self._note(outcome.totals)
        self._note_evaluation(outcome.evaluation)
        self._summary |= {
            "status": "finished",
            "epochs": outcome.totals.epoch,
            "samples_per_s": outcome.steady_samples_per_s,
            "wall_s": time.monotonic() - self._began_s,
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "params_sha256": self._params_sha256,
        }
        self._directory.write_summary(self._summary)
        self._ended = True
        self._console.close()
        say(verdict(self._summary, str(self._directory.path)))

    def fail(self, error: BaseException) -> None:
        """Write the summary of an unfinished run; never raise an error that would hide `error`."""
        if self._ended:
            return
        statuses = {AuditMismatch: "audit_failed", Stopped: "stopped"}
        self._summary["status"] = statuses.get(type(error), "failed")
        self._summary["params_sha256"] = self._params_sha256
        cause = take_cause(self._directory.path)
        known = cause if isinstance(error, PeerFailure) else None
        self._summary["error"] = known or describe(error)
        with suppress(HvdtrainError):
            self._directory.write_summary(self._summary)

    def close(self) -> None:
        """Close all files and release the run directory; after a stop, print how to continue."""
        self._console.close()
        if self._summary["status"] == "stopped":
            say(way_on(self._checkpoints.complete()))
        self._recorder.close()
        self._directory.close()

    def _note(self, totals: Totals) -> None:
        self._summary |= {
            "steps": totals.step,
            "samples_seen": totals.samples_seen,
            "train_loss": totals.loss,
            "bad_samples": totals.bad_samples,
        }

    def _note_evaluation(self, evaluation: Evaluation) -> None:
        self._summary |= {
            "valid_loss": evaluation.loss,
            **{f"valid_{name}": value for name, value in evaluation.metrics.items()},
            "valid_samples": evaluation.samples,
        }


def _versions() -> dict[str, str]:
    versions = {"hvdtrain": __version__, "python": platform.python_version()}
    versions["torch"] = str(torch.__version__)
    for package in ("horovod", "mpi4py"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
