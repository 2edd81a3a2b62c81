"""The hooks of a run, which the loop calls: audits and trace, keeper, profiler."""

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.profiler import ProfilerActivity, profile

from hvdtrain.audit import Auditor, Audits
from hvdtrain.audit.checks import BoundCheck, CanonicalCheck, ExactCheck
from hvdtrain.audit.compute import ComputeAudit
from hvdtrain.audit.trace import StepConditions, Tracer
from hvdtrain.config import TrainConfig
from hvdtrain.errors import Stopped, TrainingError, UsageError
from hvdtrain.exchange import Exchange, known_order_of
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.files import make_folder
from hvdtrain.pulse import Pulse
from hvdtrain.records.ledger import Ledger
from hvdtrain.records.provenance import changes, machine
from hvdtrain.ring.orders import KnownOrder
from hvdtrain.run.memory import RunMemory
from hvdtrain.run.stop import StopSignals
from hvdtrain.train.checkpoint import Snapshot
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.interfaces import Audit
from hvdtrain.train.job import Job
from hvdtrain.train.progress import State
from hvdtrain.train.state import capture

UPLOAD_LOOK_S = 5.0  # at a stop: well within the time after which it is given up


def find_order(config: TrainConfig, job: Job, exchange: Exchange) -> KnownOrder | None:
    """Return the order of sums for an exact audit, if it matters. Raises UsageError if unknown."""
    is_canonical = config.batch.virtual_workers is not None
    if config.check.audit != "exact" or is_canonical or not _has_audits(config, exchange):
        return None
    if job.device.type != "cpu":
        raise UsageError(
            f"--audit=exact: the order of summation on {job.device} is not known: use --audit bound"
        )
    return exchange.summation_order()


def make_audits(
    config: TrainConfig,
    job: Job,
    exchange: Exchange,
    order: KnownOrder | None,
    since: int,
    ledger: Ledger,
) -> Audits:
    """Collective: return the audits and the trace of the run, which begins after step `since`."""
    computes = config.check.audit_compute and exchange.size > 1
    each: tuple[Audit | None, ...] = (
        _make_auditor(config, job, exchange, order, ledger)
        if _has_audits(config, exchange)
        else None,
        _make_tracer(config, job, exchange, since, ledger) if config.check.trace_every else None,
        _make_compute_audit(config, job, exchange, ledger) if computes else None,
    )
    return Audits(*filter(None, each))


def _make_tracer(
    config: TrainConfig, job: Job, exchange: Exchange, since: int, ledger: Ledger
) -> Tracer:
    """Return the trace of every K-th step, and of the last one, which the final checkpoint holds.

    If one process could not add as these ranks do, it can only compute the first step after each
    checkpoint again, so these are recorded as well, with sums to compare.
    """
    every, is_virtual = config.check.trace_every, config.batch.virtual_workers is not None
    order = None if is_virtual else known_order_of(exchange, job.device)
    repeats = is_virtual or order is not None
    setting = StepConditions(job.total_steps, torch.get_num_threads())
    if not is_virtual:
        setting = replace(
            setting,
            since=since,
            order=order.name if order else None,
            weights=config.batch.weights(exchange.size),
            bucket_bytes=job.reduction.bucket_bytes,
        )
    saved_at = (job.intervals.checkpoint or job.total_steps, job.sampler.steps_per_epoch)

    def is_due(step: int) -> bool:
        if step % every == 0 or step == job.total_steps:
            return True
        return not repeats and any((step - 1) % interval == 0 for interval in saved_at)

    return Tracer(job, exchange, setting, is_due, ledger.traced, keeps_sums=not repeats)


def _make_compute_audit(
    config: TrainConfig, job: Job, exchange: Exchange, ledger: Ledger
) -> ComputeAudit:
    """Collective: return the audit of the computation. Raises AgreedFailure where bits of equal
    computations may differ.
    """
    hosts = exchange.all_gather_object(socket.gethostname(), "hvdtrain.compute_audit.hosts")
    machines = exchange.all_gather_object(machine(job.device), "hvdtrain.compute_audit.machines")

    def make() -> ComputeAudit:
        if others := changes(machines[0], machines[exchange.rank]):
            raise UsageError(
                f"--audit-compute: bits of this rank may differ from those of rank 0: {others[0]}. "
                "Leave --audit-compute out, or use equal workers"
            )
        return ComputeAudit(
            job, exchange, hosts, config.check.audit_compute, config.run.seed, ledger.recomputed
        )

    return run_on_all(exchange, "compute_audit", make)


def _make_auditor(
    config: TrainConfig, job: Job, exchange: Exchange, order: KnownOrder | None, ledger: Ledger
) -> Auditor:
    """Collective: return the auditor: bit by bit with an `order`, else within a bound.

    Canonical sums are always checked bit by bit.
    """
    settings, reduction, ring = config.check, job.reduction, exchange.ring()
    check: BoundCheck | CanonicalCheck | ExactCheck = BoundCheck(ring, reduction)
    if config.batch.virtual_workers is not None:
        check = CanonicalCheck(ring, config.batch.virtual_workers)
    elif order:
        check = ExactCheck(ring, order, reduction)
    return Auditor(
        job.model,
        ring,
        settings.audit_every,
        ledger.audited,
        check,
        settings.audit_parts,
        config.run.seed,
        evidence=config.folder / "audit",
        messages=(lambda: job.messages(job.reduction.bucket_bytes)) if order else None,
    )


def _has_audits(config: TrainConfig, exchange: Exchange) -> bool:
    return config.check.audit_every > 0 and exchange.size > 1


@dataclass(frozen=True)
class RunKeeper:
    """The keeper of every rank: saving and stopping are collective; only rank 0's ledger writes."""

    exchange: Exchange
    ledger: Ledger
    signals: StopSignals
    pulse: Pulse
    memory: RunMemory | None = None

    def stop_requested(self) -> bool:
        self.signals.alive()
        self.pulse.beat()
        self.ledger.checkpoints.check()
        return self.signals.requested is not None

    def save(self, job: Job, state: State, evaluation: Evaluation | None) -> None:
        progress = self.ledger.progress()
        self.signals.saving()
        self.pulse.beat("save")
        self.ledger.checkpoints.wait()  # before the next copy of the state is made
        snapshot = self._captured(job, state, progress)
        self.ledger.saved(snapshot, evaluation)
        if self.memory is not None:
            self.memory.save(snapshot, on_disk=True)
        self.signals.alive()

    def save_in_memory(self, job: Job, state: State) -> None:
        if self.memory is not None:
            self.memory.save(self._captured(job, state, self.ledger.progress()), on_disk=False)
            self.signals.alive()

    def _captured(self, job: Job, state: State, progress: dict[str, Any]) -> Snapshot | None:
        """Collective: return the state, on rank 0 and on its partner."""
        self.pulse.beat("exchange")
        is_partner = False
        if self.memory is not None:
            progress, is_partner = self.memory.share(progress), self.memory.is_partner
        snapshot = capture(job, state, self.exchange, progress, is_partner)
        self.pulse.beat("save")
        return snapshot

    def stop(self) -> NoReturn:
        """Collective: raise Stopped on all ranks with the highest signal that any received."""
        self.signals.saving()
        self.ledger.checkpoints.wait()
        if self.memory is not None:
            self.memory.wait()
        while True:  # the others wait for rank 0's upload, and show that they are alive
            answer = self.signals.requested, self.ledger.is_uploaded(UPLOAD_LOOK_S)
            self.signals.alive()
            self.pulse.beat()
            answers = self.exchange.all_gather_object(answer, "hvdtrain.stop")
            if all(uploaded for _, uploaded in answers):
                raise Stopped(max(number for number, _ in answers if number is not None))


@dataclass
class StepProfiler:
    """A profiler of a range of steps: torch's on every rank, and Horovod's timeline.

    Both can be opened in chrome://tracing and https://ui.perfetto.dev.
    """

    steps: tuple[int, int] | None  # first and last, counted from 1; None: no profile
    folder: Path  # receives rank-N.json of every rank, and timeline.json of rank 0
    exchange: Exchange
    _profile: profile | None = None

    def begin(self, step: int) -> None:
        """Start the profile if `step` is in the range; call before each step."""
        due = self.steps is not None and self.steps[0] <= step <= self.steps[1]
        if not due or self._profile is not None:
            return
        try:
            make_folder(self.folder)
        except OSError as error:
            raise TrainingError(f"--profile: {self.folder}: {error.strerror}") from error
        on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._profile.start()
        self.exchange.start_timeline(self.folder / "timeline.json")

    def end(self, step: int) -> None:
        """Write the profile at the end of the range; call after each step."""
        if self.steps is not None and step >= self.steps[1]:
            self.close()

    def close(self) -> None:
        """Stop the profile and write it. Further calls have no effect."""
        if self._profile is None:
            return
        done, self._profile, self.steps = self._profile, None, None
        self.exchange.stop_timeline()
        done.stop()
        done.export_chrome_trace(str(self.folder / f"rank-{self.exchange.rank}.json"))
