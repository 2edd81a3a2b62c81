"""`hvdtrain train`: puts the parts together, runs the loop, leaves a summary however it ends."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import profiled_steps
from hvdtrain.config.options import as_flat_dict
from hvdtrain.errors import EXIT_OK, PeerFailure, PreflightError, Stopped
from hvdtrain.exchange import Exchange, SingleProcess, agree
from hvdtrain.exchange.stalls import LIMIT as STALL_LIMIT
from hvdtrain.exchange.stalls import TRAIN_LIMIT_S as STALL_LIMIT_S
from hvdtrain.log import say
from hvdtrain.plugins import exits_as_failures
from hvdtrain.pulse import Pulse
from hvdtrain.ring.orders import KnownOrder
from hvdtrain.run.audits import find_order, make_audit
from hvdtrain.run.console import header, verdict
from hvdtrain.run.directory import RunDirectory
from hvdtrain.run.failure import leave_at_once, tell
from hvdtrain.run.keeper import RunKeeper
from hvdtrain.run.ledger import NoReport, Report
from hvdtrain.run.memory import keep_freed_memory
from hvdtrain.run.prepare import prepare
from hvdtrain.run.profiling import StepProfiler
from hvdtrain.run.resume import Resumable, Resumed, find_resumable, refuse_changed_data
from hvdtrain.run.signals import StopSignals
from hvdtrain.run.tasks import find_source
from hvdtrain.topology import Topology
from hvdtrain.train.loop import Job, Position, train
from hvdtrain.train.metering import Meter
from hvdtrain.train.state import restore

if TYPE_CHECKING:
    from hvdtrain.exchange.horovod import HorovodExchange


def run(config: TrainConfig, topology: Topology) -> int:
    """Collective: one training run; its failures are told here. Returns the exit code."""
    pulse = Pulse.from_environment()
    keep_freed_memory()
    if config.run.profile is not None:  # Horovod wants to know when it starts
        os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    if not pulse.is_watched:  # else the launcher's watchdog judges, which sees every rank
        os.environ.setdefault(STALL_LIMIT, str(STALL_LIMIT_S))
    with StopSignals() as signals:
        exchange = connect(topology)

        def stalled(error: PeerFailure) -> None:
            signals.note(error)
            leave_at_once(tell(error, topology))

        exchange.watch_stalls(stalled)
        try:
            with exchange.peer_failures():
                _run(config, exchange, topology, signals, pulse)
                exchange.close()
        except Exception as error:
            pulse.end(error)
            exit_code = tell(error, topology)
            if exchange.rank > 0:
                exchange.abandon()  # rank 0 hears of it, and can write its summary
            if exchange.size > 1:
                leave_at_once(exit_code)
            return exit_code
    return EXIT_OK


def _run(
    config: TrainConfig,
    exchange: Exchange,
    topology: Topology,
    signals: StopSignals,
    pulse: Pulse,
) -> None:
    """Collective: prepare on all ranks, and train once all of them can."""
    pulse.beat("prepare")
    found = agree(exchange, "resume", lambda: find_resumable(config, exchange))
    resumed: Resumed | None = exchange.broadcast_object(
        found.resumed if found else None, "hvdtrain.resumed"
    )
    if resumed and resumed.finished:
        if found:
            say(verdict(resumed.finished, str(found.directory.path)))
        return
    batch_size = resumed.global_batch_size if resumed else config.batch.resolve(exchange.size)
    source = find_source(config, exchange, topology.local_rank)
    if resumed and resumed.state:
        agree(exchange, "same_data", lambda: refuse_changed_data(config, found, source))
        # The weights are those of the checkpoint.
        config = replace(config, model=replace(config.model, pretrained=None))
    job = agree(
        exchange, "prepare", lambda: prepare(config, batch_size, source, exchange, topology)
    )
    order = agree(exchange, "audit", lambda: find_order(config, job, exchange))
    report = agree(exchange, "output", lambda: _open_report(config, job, exchange, found, pulse))
    try:
        with exchange.peer_failures(), exits_as_failures():
            state = resumed.state if resumed else None
            _train(config, job, state, exchange, order, report, signals, pulse)
    except BaseException as error:
        signals.ignore()  # the summary is being written
        report.fail(error)
        raise
    finally:
        report.close()


def _train(
    config: TrainConfig,
    job: Job,
    state: dict[str, Any] | None,
    exchange: Exchange,
    order: KnownOrder | None,
    report: Report | NoReport,
    signals: StopSignals,
    pulse: Pulse,
) -> None:
    """Collective: train what was prepared, from the beginning or from `state`."""
    job = job.distributed(exchange)
    position = Position()
    meter = Meter(exchange, job.sampler.samples, job.task.metrics, pulse)
    if state:
        lost = restore(state, job, position, meter, exchange)
        if lost and exchange.rank == 0:
            say(f"resume: {lost}")
    audit = make_audit(config, job, exchange, order, report)

    def give_up(error: Stopped) -> None:
        report.fail(error)
        leave_at_once(error.exit_code)

    signals.training_starts(note=report.fail, give_up=give_up)
    keeper = RunKeeper(exchange, position, report, signals, pulse)
    steps = config.run.profile and profiled_steps(config.run.profile)
    folder = config.folder / "profile"
    profiler = StepProfiler(steps or None, folder, exchange)
    try:
        outcome = train(job, position, meter, exchange, audit, report, keeper, profiler)
    finally:
        profiler.close()
    audit.close()
    report.finish(outcome)


def connect(topology: Topology) -> Exchange:
    """Collective: join the other workers, if a launcher started this process as one of several.

    Raises UsageError where that launcher's processes cannot be joined.
    """
    if topology.launched:
        return connect_workers()
    topology.check_joined(1)
    return SingleProcess()


def connect_workers() -> HorovodExchange:
    """Collective: join the other workers. Raises PreflightError where Horovod does not work."""
    try:
        from hvdtrain.exchange.horovod import HorovodExchange
    except ImportError as error:
        raise PreflightError(
            f"Horovod cannot be loaded here: {error}. Run launch/setup, or install "
            "hvdtrain[distributed]"
        ) from error
    return HorovodExchange()


def _open_report(
    config: TrainConfig, job: Job, exchange: Exchange, found: Resumable | None, pulse: Pulse
) -> Report | NoReport:
    """Rank 0 claims the run directory and prints the header."""
    if exchange.rank != 0:
        return NoReport(config.folder, exchange.rank)
    directory = found.directory if found else RunDirectory(config.folder)
    if found:
        found.make_ready()
    resolved = as_flat_dict(config) | {
        "global_batch_size": job.sampler.global_batch_size,
        "batch_size": None,
        "experiment": config.experiment,
    }
    directory.write_config(resolved)
    name = config.model.task or config.model.model
    say(header(job, exchange, name, config.optimizer.opt))
    state = found.resumed.state if found else None
    return Report(directory, job, exchange, config.run.keep_checkpoints, state, resolved, pulse)
