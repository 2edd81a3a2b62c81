"""The records of a run: all that rank 0 prints and writes."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.audit import AuditRecord
from hvdtrain.audit.trace import TraceRecord
from hvdtrain.errors import AgreedFailure, AuditMismatch, HvdtrainError, PeerFailure, Stopped
from hvdtrain.exchange import Exchange
from hvdtrain.files import open_to_read
from hvdtrain.log import moment, say
from hvdtrain.pulse import Pulse
from hvdtrain.records.console import Console, final_lines, is_live, way_on
from hvdtrain.records.directory import CHECKPOINTS, RunDirectory
from hvdtrain.records.event_log import EventLog, Writer
from hvdtrain.records.machine import GpuMeter, changes, machine, versions
from hvdtrain.records.trace_file import TraceFile, origin_of
from hvdtrain.tasks import valid_metrics_of
from hvdtrain.train.checkpoint import Checkpoints, Snapshot
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.job import Job
from hvdtrain.train.loop import Outcome
from hvdtrain.train.metering import Totals

CAUSE = ".failed"  # in the run directory: the failure of a rank other than 0


class Ledger:
    """The records of a run on a rank other than 0: none but the cause of a failure.

    On rank 0 the failure only shows as a collective that ended early. The cause, in a file, reaches
    its summary if both ranks share the folder.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def interval_end(self, totals: Totals, lr: float) -> None:
        """Record a logged step."""

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None:
        """Record an epoch."""

    def evaluated(self, totals: Totals, evaluation: Evaluation) -> None:
        """Record an evaluation within an epoch."""

    def audited(self, record: AuditRecord) -> None:
        """Count an audit's result."""

    def recomputed(self, step: int, ok: bool) -> None:
        """Count a share that another rank has computed again."""

    def traced(self, record: TraceRecord) -> None:
        """Add a record to the run's trace."""

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
            # "x": the first cause stays, and no link is followed
            with suppress(OSError), (self._folder / CAUSE).open("x", encoding="utf-8") as stream:
                stream.write(f"rank {self._rank}: {_describe(error)}")

    def close(self) -> None:
        """Close all files and release the run directory."""


class RunLedger(Ledger):
    """The records of a run on rank 0; the summary is kept current, to be written at any time."""

    def __init__(
        self,
        directory: RunDirectory,
        job: Job,
        exchange: Exchange,
        resumed: dict[str, Any] | None,
        config: dict[str, Any],
        pulse: Pulse,
        provenance: dict[str, Any],
        writers: Sequence[Writer],
    ) -> None:
        """Open the records.

        `resumed`: the state to resume from, if any. `config`: all options, as resolved.
        `provenance`: further fields of the summary. `writers`: of scalars, besides TensorBoard.
        """
        take_cause(directory.path)  # from an earlier start
        self._directory = directory
        folder, keep = directory.path / CHECKPOINTS, config["keep_checkpoints"]
        self._checkpoints = Checkpoints(folder, keep, directory.run_id)
        self._pulse, self._total_steps = pulse, job.total_steps
        self._gpu = GpuMeter(job.device)
        self._task = job.task
        self._takeaway = job.task.takeaway() | {"config": config}
        step = resumed["step"] if resumed else 0
        self._console = Console(job.total_steps, is_live(exchange, sys.stdout), step)
        self._events = EventLog(directory, step, self._takeaway.get("classes", ()), writers)
        self._began_s = time.monotonic()
        self._ended = False
        figures = ("loss", "accuracy", *valid_metrics_of(job.task), "samples")
        self._evaluated = [f"valid_{name}" for name in dict.fromkeys(figures)]
        virtual_workers = config["virtual_workers"]
        bucket_bytes = job.reduction.bucket_bytes
        at_start = _summary_at_start(exchange, self._evaluated, virtual_workers, bucket_bytes)
        self._summary = at_start | {"machine": machine(job.device)} | provenance
        self._audit, self._computed = self._summary["audit"], self._summary["compute_audit"]
        head = resumed["progress"].get("trace") if resumed else None
        self._trace = TraceFile(directory, origin_of(config, job.fingerprints), head)
        if resumed:
            self._audit |= resumed["progress"]["audit"]
            self._computed |= resumed["progress"].get("compute_audit", {})
            self._summary |= resumed["progress"]["summary"] | {"resumed_from": step}
            self._summary["trace"] = head
            before = resumed["progress"].get("machine", {})
            for change in changes(before, self._summary["machine"]):
                say(f"resume: {change}: bits may differ from those of the uninterrupted run")

    def interval_end(self, totals: Totals, lr: float) -> None:
        self._note(totals)
        gpu = self._read_gpu()
        self._events.interval_end(totals, lr, gpu)
        self._pulse.show(
            epoch=totals.epoch,
            loss=totals.loss,
            samples_per_s=totals.samples_per_s,
            step_s=totals.step_s,
            total_steps=self._total_steps,
        )
        self._console.interval_end(totals, lr, gpu)

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None:
        self._note(totals)
        self._summary["epochs"] = totals.epoch
        if evaluation:
            self._note_evaluation(evaluation)
            self._note_best(evaluation, totals.step)
        self._events.epoch_end(totals, evaluation, lr)
        self._console.epoch_end(totals, evaluation, lr)

    def evaluated(self, totals: Totals, evaluation: Evaluation) -> None:
        self._note(totals)
        self._note_evaluation(evaluation)
        self._note_best(evaluation, totals.step)
        self._events.evaluated(totals, evaluation)
        self._console.evaluated(totals, evaluation)

    def audited(self, record: AuditRecord) -> None:
        self._audit["checked"] += 1
        self._audit["failed"] += not record.ok
        worst = self._audit["worst_error_over_bound"] or 0.0
        self._audit["worst_error_over_bound"] = max(worst, record.worst_error_over_bound)
        self._events.audited(record)

    def recomputed(self, step: int, ok: bool) -> None:
        self._computed["checked"] += 1
        self._computed["failed"] += not ok

    def traced(self, record: TraceRecord) -> None:
        self._trace.append(record)
        self._summary["trace"] = self._trace.head

    def progress(self) -> dict[str, Any]:
        names = ("epochs", "steps", "samples_seen", "train_loss", "bad_samples", "best")
        return {
            "audit": dict(self._audit),
            "compute_audit": dict(self._computed),
            "machine": dict(self._summary["machine"]),
            "trace": self._trace.head if self._trace.head["records"] else None,
            "summary": {name: self._summary[name] for name in (*names, *self._evaluated)},
            "best": (self._summary["best"] or {}).get(f"valid_{self._task.best}"),
        }

    def saved(self, snapshot: Snapshot | None, evaluation: Evaluation | None) -> None:
        assert snapshot is not None
        self._summary["params_sha256"] = snapshot.params_sha256
        if evaluation:
            self._note_best(evaluation, snapshot.step)
        best = self._summary["best"] or {}
        is_best = evaluation is not None and best.get("step") == snapshot.step
        self._trace.sync()
        takeaway = self._takeaway | {"trace": self._summary["trace"]}
        self._checkpoints.save(snapshot, is_best, takeaway)

    def _note_best(self, evaluation: Evaluation, step: int) -> None:
        """Update the best figure; call before the state is captured, so that it is saved."""
        figure = {"loss": evaluation.loss, **evaluation.metrics}[self._task.best]
        name, best = f"valid_{self._task.best}", self._summary["best"]
        sign = 1 if self._task.best_is_highest else -1
        if best is None or sign * figure > sign * best[name]:
            self._summary["best"] = {"step": step, "epoch": self._summary["epochs"], name: figure}

    def check_saved(self) -> None:
        self._checkpoints.check()

    def wait_until_saved(self) -> None:
        self._checkpoints.wait()

    def finish(self, outcome: Outcome) -> None:
        """Wait for the last checkpoint, write the summary and print the result."""
        self._checkpoints.wait()
        self._read_gpu()
        self._note(outcome.totals)
        if outcome.evaluation:
            self._note_evaluation(outcome.evaluation)
        self._summary |= {
            "status": "finished",
            "epochs": outcome.totals.epoch,
            "ended": moment(),
            "samples_per_s": outcome.steady_samples_per_s,
            "wall_s": time.monotonic() - self._began_s,
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
        self._directory.write_summary(self._summary)
        self._ended = True
        self._console.close()
        say(final_lines(self._summary, self._takeaway["config"], str(self._directory.path)))

    def fail(self, error: BaseException) -> None:
        if self._ended:
            return
        statuses = {AuditMismatch: "audit_failed", Stopped: "stopped"}
        matching = (status for kind, status in statuses.items() if isinstance(error, kind))
        self._summary |= {"status": next(matching, "failed"), "ended": moment()}
        cause = take_cause(self._directory.path)
        is_peer = isinstance(error, PeerFailure)
        self._summary["error"] = cause if is_peer and cause else _describe(error)
        with suppress(HvdtrainError):
            self._directory.write_summary(self._summary)

    def close(self) -> None:
        """Close all files and release the run directory; after a stop, print how to continue."""
        self._console.close()
        if self._summary["status"] == "stopped":
            is_script = "script" in self._takeaway["config"]
            say(way_on(self._checkpoints.complete(), is_script))
        self._events.close(self._summary)
        self._directory.close()

    def _read_gpu(self) -> dict[str, float]:
        gpu = self._gpu.read()
        if "memory_mib" in gpu:
            used = int(gpu["memory_mib"])
            self._summary["peak_gpu_mib"] = max(self._summary["peak_gpu_mib"] or 0, used)
        return gpu

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


def _summary_at_start(
    exchange: Exchange, evaluated: Iterable[str], virtual_workers: int | None, bucket_bytes: int
) -> dict[str, Any]:
    """Return the summary of a run that ends before its first step; `evaluated`: figures."""
    return {
        "status": "failed",
        "world_size": exchange.size,
        "controller": exchange.controller,
        "virtual_workers": virtual_workers,
        "bucket_bytes": bucket_bytes,
        "epochs": 0,
        "steps": 0,
        "samples_seen": 0,
        "train_loss": None,
        **dict.fromkeys(evaluated),
        "best": None,
        "bad_samples": 0,
        "samples_per_s": None,
        "peak_gpu_mib": None,
        "params_sha256": None,
        "audit": {"checked": 0, "failed": 0, "worst_error_over_bound": None},
        "compute_audit": {"checked": 0, "failed": 0},
        "trace": None,
        "resumed_from": None,
        "repeatable_exchange": exchange.repeatable,
        "versions": versions(),
    }


def take_cause(folder: Path) -> str | None:
    """Return the cause that another rank's ledger has left, and remove its file; None if none."""
    path, text = folder / CAUSE, None
    with suppress(OSError), open_to_read(path) as stream:
        text = stream.read()
    with suppress(OSError):
        path.unlink()
    return text


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
