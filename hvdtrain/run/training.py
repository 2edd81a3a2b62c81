"""Assembly of a training run on this rank: exchange, data, model, ledger, audit and signals."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import cuda
from torch.profiler import ProfilerActivity, profile

from hvdtrain.audit import Auditor, Audits
from hvdtrain.audit.checks import BoundCheck, CanonicalCheck, ExactCheck
from hvdtrain.audit.compute import ComputeAudit
from hvdtrain.audit.trace import Setting, Tracer
from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import profiled_steps
from hvdtrain.config.options import as_flat_dict
from hvdtrain.errors import PeerFailure, Stopped, TrainingError, UsageError
from hvdtrain.exchange import Exchange, agree, join, known_order_of
from hvdtrain.exchange.connect import connect
from hvdtrain.exchange.waiting import LIMIT as STALL_LIMIT
from hvdtrain.exchange.waiting import TRAIN_LIMIT_S as STALL_LIMIT_S
from hvdtrain.log import say
from hvdtrain.plugins import exits_as_failures
from hvdtrain.pulse import Pulse
from hvdtrain.ring.orders import KnownOrder
from hvdtrain.run.console import final_lines, header
from hvdtrain.run.directory import RunDirectory
from hvdtrain.run.ledger import Ledger, RunLedger
from hvdtrain.run.machine import changes, machine
from hvdtrain.run.prepare import prepare
from hvdtrain.run.process import keep_freed_memory, leave_at_once, report_failure
from hvdtrain.run.resume import (
    Resumable,
    Resumed,
    find_resumable,
    refuse_changed_base,
    refuse_changed_data,
)
from hvdtrain.run.script import OPTIONS, Script
from hvdtrain.run.stop import RunKeeper, StopSignals
from hvdtrain.run.tasks import find_source
from hvdtrain.topology import Topology
from hvdtrain.train.job import Job
from hvdtrain.train.loop import Hooks, Outcome, State
from hvdtrain.train.metering import Meter
from hvdtrain.train.state import restore
from hvdtrain.train.step import Audit


@dataclass(frozen=True)
class Session:
    """The objects that exist as long as this process is a worker."""

    exchange: Exchange
    topology: Topology
    signals: StopSignals
    pulse: Pulse


@contextmanager
def join_session(
    config: TrainConfig, topology: Topology, script: Script | None = None
) -> Iterator[Session]:
    """Collective: join the other workers, and leave together with them on exit.

    A `script` stays joined after that, until it ends. On a failure within the context, a single
    process raises it. With several workers it is printed, and the process ends at once with its
    exit code.
    """
    pulse = Pulse.from_environment()
    keep_freed_memory()
    if config.run.profile is not None:  # Horovod reads it when it starts
        os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    if not pulse.is_watched:  # otherwise the launcher's watchdog, which sees every rank, decides
        os.environ.setdefault(STALL_LIMIT, str(STALL_LIMIT_S))
    with StopSignals() as signals:
        exchange = join(lambda: connect(topology)) if script else connect(topology)

        def stalled(error: PeerFailure) -> None:
            signals.note(error)
            leave_at_once(report_failure(error, topology))

        exchange.watch_stalls(stalled)
        try:
            with exchange.peer_failures():
                yield Session(exchange, topology, signals, pulse)
                if script is None:
                    exchange.close()
        except Exception as error:
            pulse.end(error)
            if exchange.size == 1:
                raise
            exit_code = report_failure(error, topology)
            if exchange.rank > 0:
                exchange.abandon()  # makes rank 0 fail too, which then writes its summary
            leave_at_once(exit_code)


@dataclass(frozen=True)
class TrainingRun:
    """A prepared run: `run.finish(train(run.job, run.state, session.exchange, run.hooks))`."""

    job: Job
    state: State
    hooks: Hooks
    finish: Callable[[Outcome], None]  # collective: ends the audit, and completes the ledger


@contextmanager
def training_run(
    config: TrainConfig, session: Session, script: Script | None = None
) -> Iterator[TrainingRun | None]:
    """Collective: prepare a run on all ranks and yield it once every rank has succeeded.

    Yields None if `--resume auto` finds a finished run. The ledger records failures within.
    """
    exchange = session.exchange
    session.pulse.beat("prepare")
    found = agree(exchange, "resume", lambda: find_resumable(config, exchange))
    try:
        with _run_or_none(config, session, script, found) as run:
            yield run
    finally:
        if found:  # a script may go on: the folder is not to stay locked
            found.directory.close()


@contextmanager
def _run_or_none(
    config: TrainConfig, session: Session, script: Script | None, found: Resumable | None
) -> Iterator[TrainingRun | None]:
    exchange = session.exchange
    resumed: Resumed | None = exchange.broadcast_object(
        found.resumed if found else None, "hvdtrain.resumed"
    )
    if resumed and resumed.finished:
        if found:
            say(final_lines(resumed.finished, str(found.directory.path)))
        yield None
        return
    batch_size = resumed.global_batch_size if resumed else config.batch.resolve(exchange.size)
    source = find_source(config, exchange, session.topology.local_rank, script)
    saved = resumed.state if resumed else None
    if saved:
        agree(exchange, "same_data", lambda: refuse_changed_data(config, found, source))
        # The weights of the checkpoint replace pretrained ones.
        config = replace(config, model=replace(config.model, pretrained=None))
    topology = session.topology
    job = agree(
        exchange, "prepare", lambda: prepare(config, batch_size, source, exchange, topology, script)
    )
    agree(exchange, "same_base", lambda: refuse_changed_base(job.model, found))
    order = agree(exchange, "audit", lambda: find_order(config, job, exchange))
    ledger = agree(
        exchange,
        "output",
        lambda: _open_ledger(config, job, exchange, found, session.pulse, script),
    )
    try:
        with exchange.peer_failures(), exits_as_failures(), ExitStack() as stack:
            yield _make_ready(config, job, saved, order, session, ledger, stack)
    except BaseException as error:
        session.signals.ignore()  # the summary is being written
        ledger.fail(error)
        raise
    finally:
        ledger.close()


def _make_ready(
    config: TrainConfig,
    job: Job,
    saved: dict[str, Any] | None,
    order: KnownOrder | None,
    session: Session,
    ledger: Ledger,
    stack: ExitStack,
) -> TrainingRun:
    """Collective: distribute the optimizer, restore the saved state, connect the audit's ring."""
    exchange, signals = session.exchange, session.signals
    job = job.distributed(exchange)
    state = State(Meter(exchange, job.sampler.samples, job.task.metrics, session.pulse))
    if saved:
        lost = restore(saved, job, state)
        if lost and exchange.rank == 0:
            say(f"resume: {lost}")
    audit = make_audits(config, job, exchange, order, state.step, ledger)

    def give_up(error: Stopped) -> None:
        ledger.fail(error)
        leave_at_once(error.exit_code)

    signals.training_starts(note=ledger.fail, give_up=give_up)
    keeper = RunKeeper(exchange, ledger, signals, session.pulse)
    steps = profiled_steps(config.run.profile or "")
    profiler = StepProfiler(steps, config.folder / "profile", exchange)
    stack.callback(profiler.close)

    def finish(outcome: Outcome) -> None:
        profiler.close()
        audit.close()
        ledger.finish(outcome)

    return TrainingRun(job, state, Hooks(audit, ledger, keeper, profiler), finish)


def _open_ledger(
    config: TrainConfig,
    job: Job,
    exchange: Exchange,
    found: Resumable | None,
    pulse: Pulse,
    script: Script | None,
) -> Ledger:
    """Return the ledger; on rank 0, take the run directory and print the header first."""
    if exchange.rank != 0:
        return Ledger(config.folder, exchange.rank)
    directory = found.directory if found else RunDirectory(config.folder)
    if found:
        found.make_ready()
    resolved = as_flat_dict(config) | {
        "global_batch_size": job.sampler.global_batch_size,
        "batch_size": None,
        "experiment": config.experiment,
    }
    name = config.model.task or config.model.model
    if script:
        name = type(script.model).__name__
        resolved = {option: resolved[option] for option in OPTIONS}
        resolved["script"] = [str(script.path), *sys.argv[1:]]
    directory.write_config(resolved)
    say(header(job, exchange, name))
    state = found.resumed.state if found else None
    return RunLedger(directory, job, exchange, state, resolved, pulse)


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
    each: list[Audit] = []
    if _has_audits(config, exchange):
        each.append(_make_auditor(config, job, exchange, order, ledger))
    if every := config.check.trace_every:
        each.append(_make_tracer(every, config, job, exchange, since, ledger))
    if config.check.audit_compute and exchange.size > 1:
        each.append(_make_compute_audit(config, job, exchange, ledger))
    return Audits(*each)


def _make_tracer(
    every: int, config: TrainConfig, job: Job, exchange: Exchange, since: int, ledger: Ledger
) -> Tracer:
    """Return the trace of every K-th step, and of the last one, which the final checkpoint holds.

    If one process could not add as these ranks do, it can only compute the first step after each
    checkpoint again, so these are recorded as well, with sums to compare.
    """
    is_virtual = config.batch.virtual_workers is not None
    order = None if is_virtual else known_order_of(exchange, job.device)
    repeats = is_virtual or order is not None
    setting = Setting(job.total_steps, torch.get_num_threads())
    if not is_virtual:
        name, weights = order.name if order else None, config.batch.weights(exchange.size)
        setting = replace(setting, since=since, order=name, weights=weights)
    saved_at = (job.intervals.checkpoint or job.total_steps, job.sampler.steps_per_epoch)

    def is_due(step: int) -> bool:
        after_checkpoint = any((step - 1) % interval == 0 for interval in saved_at)
        is_regular = step % every == 0 or step == job.total_steps
        return is_regular or (after_checkpoint and not repeats)

    return Tracer(job, exchange, setting, is_due, ledger.traced, keeps_sums=not repeats)


def _make_compute_audit(
    config: TrainConfig, job: Job, exchange: Exchange, ledger: Ledger
) -> ComputeAudit:
    """Collective: return the audit of the computation. Raises AgreedFailure where bits of equal
    computations may differ.
    """
    hosts = exchange.all_gather_object(socket.gethostname(), "hvdtrain.compute_audit.hosts")
    machines = exchange.all_gather_object(machine(), "hvdtrain.compute_audit.machines")

    def make() -> ComputeAudit:
        if others := changes(machines[0], machines[exchange.rank]):
            raise UsageError(
                f"--audit-compute: bits of this rank may differ from those of rank 0: {others[0]}. "
                "Leave --audit-compute out, or use equal workers"
            )
        every, seed = config.check.audit_compute, config.run.seed
        return ComputeAudit(job, exchange, hosts, every, seed, ledger.recomputed)

    return agree(exchange, "compute_audit", make)


def _make_auditor(
    config: TrainConfig, job: Job, exchange: Exchange, order: KnownOrder | None, ledger: Ledger
) -> Auditor:
    """Collective: return the auditor: bit by bit with an `order`, else within a bound.

    Canonical sums are always checked bit by bit.
    """
    settings, reduction = config.check, job.reduction
    ring = exchange.ring()
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
    )


def _has_audits(config: TrainConfig, exchange: Exchange) -> bool:
    return config.check.audit_every > 0 and exchange.size > 1


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
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(f"--profile: {self.folder}: {error.strerror}") from error
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if cuda.is_available() else []
        self._profile = profile(activities=activities)
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
