"""The records of a run: all that rank 0 prints and writes."""

import resource
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

from hvdtrain.audit import AuditRecord
from hvdtrain.audit.trace import TraceRecord
from hvdtrain.errors import AgreedFailure, AuditMismatch, HvdtrainError, PeerFailure, Stopped
from hvdtrain.exchange import Exchange
from hvdtrain.files import open_to_read
from hvdtrain.log import complain, moment, say
from hvdtrain.pulse import Pulse
from hvdtrain.records.console import Console, final_lines, is_live, way_on
from hvdtrain.records.directory import RunDirectory
from hvdtrain.records.event_log import EventLog, valid_fields
from hvdtrain.records.folders import CHECKPOINTS
from hvdtrain.records.provenance import GpuMeter, changes, machine, versions
from hvdtrain.records.stragglers import Stragglers
from hvdtrain.records.trace_file import TraceFile, origin_of
from hvdtrain.records.trackers import FAILED_CLOSE_S, Tracker
from hvdtrain.records.uploader import upload_of
from hvdtrain.tasks import valid_metrics_of
from hvdtrain.train.checkpoint import Checkpoints, Snapshot, step_of
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.job import Job
from hvdtrain.train.metering import Totals
from hvdtrain.train.progress import Outcome

AUDITS = ("audit", "compute_audit")  # in the summary, each with its counts
RANK_0_FIRST_S = 0.5  # launchers end all ranks when the first one ends
SLOWEST_SHOWN = 8  # of those that `launch` shows
ALONE_CLOSE_S = 60.0  # for the last upload of a single worker that has failed
CAUSE = ".failed"  # in the run directory: the failure of a rank other than 0


class Ledger:
    """The records of a run on a rank other than 0: none but the cause of a failure.

    On rank 0 the failure only shows as a collective that ended early. The cause, in a file, reaches
    its summary if both ranks share the folder.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, keep=0)  # that this rank writes
        self.takeaway: dict[str, Any] = {}  # for users of checkpoints, on rank 0

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

    def is_uploaded(self, wait_s: float) -> bool:
        """Wait until nothing is left to upload; return whether that came in time."""
        return True

    def finish(self, outcome: Outcome) -> None:
        """Complete the records of a finished run."""

    def fail(self, error: BaseException) -> None:
        """Record why the run did not finish; never raise an error that would hide `error`."""
        if not isinstance(error, PeerFailure | Stopped | AuditMismatch | AgreedFailure):
            # "x": the first cause stays, and no link is followed
            with suppress(OSError), (self._folder / CAUSE).open("x", encoding="utf-8") as stream:
                stream.write(f"rank {self._rank}: {type(error).__name__}: {error}")

    def give_up(self, error: Stopped) -> None:
        """Record and print that the process ends before the run is saved; it must end then."""
        time.sleep(RANK_0_FIRST_S)

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
        trackers: Sequence[Tracker],
        hosts: Sequence[str],
    ) -> None:
        """Open the records.

        `resumed`: the state to resume from, if any. `config`: all options, as resolved.
        `provenance`: of the summary. `trackers`: of scalars, besides TensorBoard. `hosts`: by rank.
        """
        take_cause(directory.path)  # from an earlier start
        self._directory, self._began_s, self._ended = directory, time.monotonic(), False
        folder, keep = directory.path / CHECKPOINTS, config["keep_checkpoints"]
        self.checkpoints = Checkpoints(folder, keep, directory.run_id)
        self.checkpoints.written.append(lambda name: pulse.saved(step_of(name)))
        self._uploader = upload_of(directory.path, config, self.checkpoints)
        self._job, self._pulse, self._gpu = job, pulse, GpuMeter(job.device)
        self.takeaway = job.task.takeaway() | {"config": config}
        step, before = (resumed["step"], resumed["progress"]) if resumed else (0, {})
        self._console = Console(job.total_steps, is_live(exchange, sys.stdout), step)
        self._events = EventLog(directory, step, self.takeaway.get("classes", ()), trackers)
        self._evaluated = _evaluated_figures(job)
        head = before.get("trace")
        self._trace = TraceFile(directory, origin_of(config, job.fingerprints), head)
        at_start = _summary_at_start(exchange, job, self._evaluated, config["virtual_workers"])
        self._summary = at_start | provenance | before.get("summary", {})
        self._summary |= {"resumed_from": step if resumed else None, "trace": head}
        for audit in AUDITS:
            self._summary[audit] |= before.get(audit, {})
        self._stragglers = Stragglers(hosts, step, self._summary["stragglers"])
        pulse.show(total_steps=job.total_steps, before={"steps": step, **self._audit_counts()})
        for change in changes(before.get("machine", {}), self._summary["machine"]):
            say(f"resume: {change}: bits may differ from those of the uninterrupted run")

    def interval_end(self, totals: Totals, lr: float) -> None:
        self._note(totals)
        gpu = self._read_gpu()
        lines = self._stragglers.judge(totals.of_ranks, totals.step, totals.step_s)
        self._summary["stragglers"] = self._stragglers.records
        slow = self._stragglers.current
        self._events.interval_end(totals, lr, gpu, slow)
        self._pulse.show(
            epoch=totals.epoch,
            loss=totals.loss,
            samples_per_s=totals.samples_per_s,
            step_s=totals.step_s,
            total_steps=self._job.total_steps,
            stragglers=sorted(slow, key=itemgetter("ratio"))[-SLOWEST_SHOWN:],
            **self._audit_counts(),
        )
        self._console.interval_end(totals, lr, gpu)
        self._console.notes(totals.step, lines)

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None:
        self._note(totals, evaluation)
        self._summary["epochs"] = totals.epoch
        if evaluation:
            self._note_best(evaluation, totals.step)
        self._events.epoch_end(totals, evaluation, lr)
        self._console.epoch_end(totals, evaluation, lr)

    def evaluated(self, totals: Totals, evaluation: Evaluation) -> None:
        self._note(totals, evaluation)
        self._note_best(evaluation, totals.step)
        self._events.evaluated(totals, evaluation)
        self._console.evaluated(totals, evaluation)

    def audited(self, record: AuditRecord) -> None:
        audit = self._summary["audit"]
        worst = max(audit["worst_error_over_bound"] or 0.0, record.worst_error_over_bound)
        audit |= {
            "checked": audit["checked"] + 1,
            "failed": audit["failed"] + (not record.ok),
            "worst_error_over_bound": worst,
        }
        self._pulse.show(**self._audit_counts())
        self._events.audited(record)

    def recomputed(self, step: int, ok: bool) -> None:
        self._summary["compute_audit"]["checked"] += 1
        self._summary["compute_audit"]["failed"] += not ok

    def traced(self, record: TraceRecord) -> None:
        self._trace.append(record)
        self._summary["trace"] = self._trace.head

    def progress(self) -> dict[str, Any]:
        names = ("epochs", "steps", "samples_seen", "train_loss", "bad_samples", "best")
        return {
            **{name: dict(self._summary[name]) for name in (*AUDITS, "machine")},
            "trace": self._trace.head if self._trace.head["records"] else None,
            "summary": {
                name: self._summary[name] for name in (*names, "stragglers", *self._evaluated)
            },
            "best": (self._summary["best"] or {}).get(f"valid_{self._job.task.best}"),
        }

    def saved(self, snapshot: Snapshot | None, evaluation: Evaluation | None) -> None:
        assert snapshot is not None
        self._summary["params_sha256"] = snapshot.params_sha256
        if evaluation:
            self._note_best(evaluation, snapshot.step)
        best = self._summary["best"] or {}
        is_best = evaluation is not None and best.get("step") == snapshot.step
        self._trace.sync()
        self.checkpoints.save(snapshot, is_best, self.takeaway | {"trace": self._summary["trace"]})

    def is_uploaded(self, wait_s: float) -> bool:
        return self._uploader is None or self._uploader.wait(wait_s)

    def _note_best(self, evaluation: Evaluation, step: int) -> None:
        """Update the best figure; call before the state is captured, so that it is saved."""
        name, best = f"valid_{self._job.task.best}", self._summary["best"]
        figure = valid_fields(evaluation)[name]
        sign = 1 if self._job.task.best_is_highest else -1
        if best is None or sign * figure > sign * best[name]:
            self._summary["best"] = {"step": step, "epoch": self._summary["epochs"], name: figure}

    def finish(self, outcome: Outcome) -> None:
        """Wait for the last checkpoint, write the summary and print the result."""
        self.checkpoints.wait()
        self._read_gpu()
        self._note(outcome.totals, outcome.evaluation)
        self._summary |= {
            "status": "finished",
            "epochs": outcome.totals.epoch,
            "ended": moment(),
            "end_reason": outcome.end_reason,
            "samples_per_s": outcome.steady_samples_per_s,
            "wall_s": time.monotonic() - self._began_s,
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
        self._directory.write_summary(self._summary)
        self._ended = True
        self._console.close()
        say(final_lines(self._summary, self.takeaway["config"], str(self._directory.path)))
        if self._uploader:
            self._uploader.finish(self._pulse.beat)

    def fail(self, error: BaseException) -> None:
        if self._ended:
            return
        statuses = {AuditMismatch: "audit_failed", Stopped: "stopped"}
        matching = (status for kind, status in statuses.items() if isinstance(error, kind))
        text, cause = f"{type(error).__name__}: {error}", take_cause(self._directory.path)
        self._summary |= {
            "status": next(matching, "failed"),
            "ended": moment(),
            "error": cause if cause and isinstance(error, PeerFailure) else text,
        }
        with suppress(HvdtrainError):
            self._directory.write_summary(self._summary)

    def give_up(self, error: Stopped) -> None:
        left = self.checkpoints.abandon()
        self.fail(error)
        complain(f"hvdtrain: {error}\n{way_on(left, 'script' in self.takeaway['config'])}")

    def close(self) -> None:
        """Close all files and release the run directory; after a stop, print how to continue."""
        self._console.close()
        if self._summary["status"] == "stopped":
            say(way_on(self.checkpoints.complete(), "script" in self.takeaway["config"]))
        self._events.close(self._summary)
        if self._uploader and not self._ended:
            # Only then is the error printed, and of several workers one that fails is soon killed.
            alone = self._summary["world_size"] == 1
            self._pulse.beat()
            self._uploader.close(ALONE_CLOSE_S if alone else FAILED_CLOSE_S)  # resume: the rest
        self._directory.close()

    def _audit_counts(self) -> dict[str, int]:
        """Return how many audits were done and failed, by kind: 'audit_checked' and so on."""
        counts = product(AUDITS, ("checked", "failed"))
        return {f"{audit}_{count}": self._summary[audit][count] for audit, count in counts}

    def _read_gpu(self) -> dict[str, float]:
        gpu = self._gpu.read()
        if "memory_mib" in gpu:
            before = self._summary["peak_gpu_mib"] or 0
            self._summary["peak_gpu_mib"] = max(before, int(gpu["memory_mib"]))
        return gpu

    def _note(self, totals: Totals, evaluation: Evaluation | None = None) -> None:
        self._summary |= {
            "steps": totals.step,
            "samples_seen": totals.samples_seen,
            "train_loss": totals.loss,
            "bad_samples": totals.bad_samples,
            **(valid_fields(evaluation) if evaluation else {}),
        }


def _evaluated_figures(job: Job) -> list[str]:
    """Return the names in the summary of what evaluations find."""
    figures = ("loss", "accuracy", *valid_metrics_of(job.task), "samples")
    return [f"valid_{name}" for name in dict.fromkeys(figures)]


def _summary_at_start(
    exchange: Exchange, job: Job, evaluated: Iterable[str], virtual_workers: int | None
) -> dict[str, Any]:
    """Return the summary of a run that ends before its first step; `evaluated`: figures."""
    return {
        "status": "failed",
        "world_size": exchange.size,
        "controller": exchange.controller,
        "virtual_workers": virtual_workers,
        "bucket_bytes": job.reduction.bucket_bytes,
        "epochs": 0,
        "steps": 0,
        "samples_seen": 0,
        "train_loss": None,
        **dict.fromkeys(evaluated),
        "best": None,
        "end_reason": None,
        "bad_samples": 0,
        "stragglers": [],
        "samples_per_s": None,
        "peak_gpu_mib": None,
        "params_sha256": None,
        "audit": {"checked": 0, "failed": 0, "worst_error_over_bound": None},
        "compute_audit": {"checked": 0, "failed": 0},
        "trace": None,
        "resumed_from": None,
        "repeatable_exchange": exchange.repeatable,
        "versions": versions(),
        "machine": machine(job.device),
    }


def take_cause(folder: Path) -> str | None:
    """Return the cause that another rank's ledger has left, and remove its file; None if none."""
    path, text = folder / CAUSE, None
    with suppress(OSError), open_to_read(path) as stream:
        text = stream.read()
    with suppress(OSError):
        path.unlink()
    return text
