"""Assembly of a training run on this rank: exchange, data, model, ledger, audit and signals."""

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import AUTO, step_range
from hvdtrain.config.keywords import OPTIONS
from hvdtrain.config.options import as_flat_dict
from hvdtrain.config.plugins import exits_as_failures
from hvdtrain.data.drawing import kept
from hvdtrain.errors import PeerFailure, Stopped
from hvdtrain.exchange import Exchange, join
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.exchange.connect import connect
from hvdtrain.exchange.waiting import LIMIT as STALL_LIMIT
from hvdtrain.exchange.waiting import TRAIN_LIMIT_S as STALL_LIMIT_S
from hvdtrain.log import say
from hvdtrain.pulse import JOB, WAITING, Pulse, stop_within_s
from hvdtrain.records.console import final_lines, header
from hvdtrain.records.directory import RunDirectory, new_directory
from hvdtrain.records.folders import PROFILE
from hvdtrain.records.ledger import Ledger, RunLedger
from hvdtrain.records.provenance import provenance
from hvdtrain.records.storage_start import claim_name, taken_names
from hvdtrain.records.trackers import open_trackers
from hvdtrain.records.uploader import finish_upload
from hvdtrain.ring.orders import KnownOrder
from hvdtrain.run.balance import balance, follower_of
from hvdtrain.run.hooks import RunKeeper, StepProfiler, find_order, make_audits
from hvdtrain.run.memory import open_memory
from hvdtrain.run.micro_batch import fit_micro_batch
from hvdtrain.run.prepare import prepare
from hvdtrain.run.process import keep_freed_memory, leave_at_once, leave_together, report_failure
from hvdtrain.run.recall import find_run
from hvdtrain.run.resume import (
    Resumable,
    Resumed,
    refuse_changed_build,
    refuse_changed_data,
)
from hvdtrain.run.script import Script, as_options
from hvdtrain.run.stop import StopSignals
from hvdtrain.run.tasks import chosen_by, find_source
from hvdtrain.topology import Topology
from hvdtrain.train.batchnorm import convert_back
from hvdtrain.train.devices import check_devices, name_of
from hvdtrain.train.interfaces import Hooks
from hvdtrain.train.job import Job
from hvdtrain.train.metering import Meter
from hvdtrain.train.progress import Outcome, State
from hvdtrain.train.state import restore

NEEDED_LATER = {"step", "progress"}  # of a state that is restored


@dataclass(frozen=True)
class Session:
    """The objects that exist as long as this process is a worker."""

    exchange: Exchange
    topology: Topology
    signals: StopSignals
    pulse: Pulse
    command: Sequence[str]  # of this process, to be recorded
    script: Script | None = None  # with a loop of its own


@contextmanager
def join_session(
    config: TrainConfig,
    topology: Topology,
    command: Sequence[str] = (),
    script: Script | None = None,
) -> Iterator[Session]:
    """Collective: join the other workers, and leave together with them on exit.

    `command`: of this process, to be recorded. A `script` stays joined until it ends. A failure is
    raised by a single process; several workers print it, and end at once with its exit code.
    """
    topology = topology.by_itself() if config.run.single_worker else topology
    pulse = Pulse.from_environment()
    keep_freed_memory()
    if config.run.profile is not None:  # Horovod reads it when it starts
        os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    if not pulse.is_watched or script:  # otherwise the launcher's watchdog, which sees every rank
        os.environ.setdefault(STALL_LIMIT, str(STALL_LIMIT_S))
    with StopSignals(stop_within_s()) as signals:

        def stalled(error: PeerFailure) -> None:
            signals.note(error)
            leave_at_once(report_failure(error, topology))

        exchange = join(lambda: connect(topology)) if script else connect(topology)
        exchange.watch_stalls(stalled)
        try:
            with exchange.peer_failures():
                yield Session(exchange, topology, signals, pulse, command, script)
                if script is None:
                    exchange.close()
        except Exception as error:
            pulse.end(error)
            if exchange.size == 1:
                raise
            leave_together(error, exchange, topology)


@dataclass(frozen=True)
class TrainingRun:
    """A prepared run: its loop is `TrainingLoop(job, state, session.exchange, hooks)`."""

    job: Job
    state: State
    hooks: Hooks
    finish: Callable[[Outcome], None]  # collective: ends the audit, and completes the ledger
    folder: Path


@contextmanager
def training_run(config: TrainConfig, session: Session) -> Iterator[TrainingRun | None]:
    """Collective: prepare a run on all ranks and yield it once every rank has succeeded.

    Yields None if `--resume auto` finds a finished run. The ledger records failures within.
    """
    exchange = session.exchange
    session.pulse.beat("prepare" if exchange.rank == 0 else WAITING)  # for what it may download
    local_rank, beat = session.topology.local_rank, session.pulse.beat
    resumable = find_run(config, exchange, local_rank, beat)
    try:
        resumed: Resumed = exchange.broadcast_object(
            resumable.resumed if resumable else Resumed(), "hvdtrain.resumed"
        )  # on rank 0 the same object, so that its state is there once
        session.pulse.beat("prepare")
        if not resumed.finished:
            with _unfinished_run(config, session, resumable, resumed) as run:
                yield run
        else:
            if resumable:
                options = as_flat_dict(config) | {"script": session.script}
                say(final_lines(resumed.finished, options, str(config.folder)))
                finish_upload(config.folder, options, session.pulse.beat)
            yield None
        session.pulse.finish()
    finally:
        if resumable:  # a script may go on: the folder is not to stay locked
            resumable.directory.close()


@contextmanager
def _unfinished_run(
    config: TrainConfig, session: Session, resumable: Resumable | None, resumed: Resumed
) -> Iterator[TrainingRun]:
    exchange = session.exchange
    config, job = _prepare(config, session, resumable, resumed)
    order = run_on_all(exchange, "audit", lambda: find_order(config, job, exchange))
    job = job.distributed(exchange)
    state = _restored(resumed.state, job, session)
    directory = run_on_all(exchange, "output", lambda: _take_directory(config, exchange, resumable))
    name = exchange.broadcast_object(directory.path.name if directory else None, "hvdtrain.name")
    config = replace(config, run=replace(config.run, experiment=name))
    hosts = exchange.all_gather_object(socket.gethostname(), "hvdtrain.hosts")
    profiler = StepProfiler(step_range(config.run.profile or ""), config.folder / PROFILE, exchange)
    with kept():  # trackers may draw random numbers
        ledger = run_on_all(
            exchange,
            "ledger",
            lambda: _open_ledger(config, job, session, directory, resumable, hosts),
        )
    try:
        with exchange.peer_failures(), exits_as_failures(), closing(profiler):
            yield _make_ready(config, job, state, order, session, ledger, profiler)
    except BaseException as error:
        session.signals.ignore()  # the summary is being written
        ledger.fail(error)
        raise
    finally:
        ledger.close()
        session.signals.alive()  # a script may go on
        job.workers.close()
        convert_back(job.model)


def _prepare(
    config: TrainConfig, session: Session, resumable: Resumable | None, resumed: Resumed
) -> tuple[TrainConfig, Job]:
    """Collective: return the configuration, now complete, and the job, not distributed yet."""
    exchange, script, topology = session.exchange, session.script, session.topology
    batch_size = resumed.global_batch_size or config.batch.resolve(exchange.size)
    source = find_source(config, exchange, topology.local_rank, script)
    if saved := resumed.state:
        chooser = "hvdtrain.Loop" if script else "=".join(chosen_by(config, "data"))
        run_on_all(
            exchange, "same_data", lambda: refuse_changed_data(config, resumable, source, chooser)
        )
        # The weights of the checkpoint replace pretrained ones.
        config = replace(config, model=replace(config.model, pretrained=None))
    if config.batch.rank_weights == AUTO and script is None:
        config, source = balance(
            config, source, batch_size, exchange, topology, resumed.rank_weights
        )
    if config.batch.micro_batch == AUTO:
        config = fit_micro_batch(config, source, batch_size, exchange, topology, resumed, script)
    job = run_on_all(
        exchange, "prepare", lambda: prepare(config, batch_size, source, exchange, topology, script)
    )
    check_devices(job.device, exchange)
    if saved:
        run_on_all(
            exchange, "same_build", lambda: refuse_changed_build(saved, job.model, job.built)
        )
    return config, job


def _restored(saved: dict[str, Any] | None, job: Job, session: Session) -> State:
    """Collective: return the state from which to train, restored from a checkpoint's, if any, which
    is then emptied of what is in the job now.

    Nothing of the resumed run is touched yet, so that a failure leaves it as it is.
    """
    exchange, samples = session.exchange, job.sampler.samples
    state = State(Meter(exchange, samples, job.task.metrics, session.pulse, job.device))
    if saved:
        lost = run_on_all(exchange, "restore", lambda: restore(saved, job, state))
        if lost and exchange.rank == 0:
            say(f"resume: {lost}")
        for name in saved.keys() - NEEDED_LATER:  # the rest would stay in memory until the end
            del saved[name]
    return state


def _make_ready(
    config: TrainConfig,
    job: Job,
    state: State,
    order: KnownOrder | None,
    session: Session,
    ledger: Ledger,
    profiler: StepProfiler,
) -> TrainingRun:
    """Collective: connect the audit's ring, and let signals be recorded from now on."""
    exchange, signals = session.exchange, session.signals
    audit = make_audits(config, job, exchange, order, state.step, ledger)

    def give_up(error: Stopped) -> None:
        leave_at_once(error.exit_code, lambda: ledger.give_up(error))

    signals.training_starts(note=ledger.fail, give_up=give_up)
    memory = open_memory(config.run.memory_interval, config.folder, exchange, ledger)
    keeper = RunKeeper(exchange, ledger, signals, session.pulse, memory)
    hook = session.script.on_evaluation if session.script else None

    def finish(outcome: Outcome) -> None:
        signals.saving()  # until the ledger is closed
        profiler.close()
        audit.close()
        ledger.finish(outcome)
        if memory:
            memory.remove()

    balancer = follower_of(config, job, exchange, state.step)
    hooks = Hooks(audit, ledger, keeper, profiler, hook, balancer)
    return TrainingRun(job, state, hooks, finish, config.folder)


def _take_directory(
    config: TrainConfig, exchange: Exchange, resumable: Resumable | None
) -> RunDirectory | None:
    """Return the run directory on rank 0, None elsewhere.

    A new run is numbered where its name is taken; the launcher may not see this host's folders.
    """
    if exchange.rank != 0:
        return None
    if resumable:
        return resumable.directory
    run = config.run
    return new_directory(config.folder, run.resume is None, taken_names(run.output, run.resume))


def _resolved_options(config: TrainConfig, job: Job, script: Script | None) -> dict[str, Any]:
    """Return the options of the run as they are recorded: of a script those that it may give."""
    resolved = as_flat_dict(config) | {
        "global_batch_size": job.sampler.global_batch_size,
        "batch_size": None,
        "device": name_of(job.device),  # a replay elsewhere is to choose the same
    }
    if script is None:
        return resolved
    command = [str(script.path), *sys.argv[1:]]
    return {name: resolved[name] for name in OPTIONS} | {"script": command, "loop": script.loop}


def _open_ledger(
    config: TrainConfig,
    job: Job,
    session: Session,
    directory: RunDirectory | None,
    resumable: Resumable | None,
    hosts: Sequence[str],
) -> Ledger:
    """Return the ledger; on rank 0, claim the name, write the configuration, print the header."""
    if directory is None:
        return Ledger(config.folder, session.exchange.rank)
    claim_name(config.run, directory.path.name, directory.run_id, os.environ.get(JOB))
    recorded = directory.last_step()
    if resumable:
        resumable.make_ready()
    script, chosen = session.script, config.model
    name = type(script.model).__name__ if script else chosen.task or chosen.model
    code: Iterable[str | Path | None]
    code = (script.path,) if script else (chosen.task, chosen.model, config.data.data)
    resolved = _resolved_options(config, job, script)
    directory.write_config(resolved)
    if JOB in os.environ:
        directory.write_job(os.environ[JOB])
    session.pulse.begin_run(directory.path)
    first_lines = header(job, session.exchange, name)
    say(as_options(first_lines) if script else first_lines)
    return RunLedger(
        directory,
        job,
        session.exchange,
        resumed=resumable.resumed.state if resumable else None,
        config=resolved,
        pulse=session.pulse,
        provenance=provenance(code, hosts, session.command),
        trackers=open_trackers(config.run.log_to, directory, resolved, recorded),
        hosts=hosts,
    )
