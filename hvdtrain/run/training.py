"""Assembly of a training run on this rank: exchange, data, model, ledger, audit and signals."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import AUTO, profiled_steps
from hvdtrain.config.options import as_flat_dict
from hvdtrain.config.plugins import exits_as_failures
from hvdtrain.data.drawing import kept
from hvdtrain.errors import PeerFailure, Stopped, TrainingError
from hvdtrain.exchange import Exchange, join, run_on_all
from hvdtrain.exchange.connect import connect
from hvdtrain.exchange.waiting import LIMIT as STALL_LIMIT
from hvdtrain.exchange.waiting import TRAIN_LIMIT_S as STALL_LIMIT_S
from hvdtrain.files import make_folder
from hvdtrain.log import say
from hvdtrain.pulse import JOB, RESTART, Pulse
from hvdtrain.records.console import final_lines, header
from hvdtrain.records.directory import PROFILE, RunDirectory, folder_of_job, new_directory
from hvdtrain.records.ledger import Ledger, RunLedger
from hvdtrain.records.provenance import provenance
from hvdtrain.records.trackers import check_trackers, open_trackers
from hvdtrain.ring.orders import KnownOrder
from hvdtrain.run.audits import find_order, make_audits
from hvdtrain.run.balance import balance
from hvdtrain.run.prepare import prepare
from hvdtrain.run.process import keep_freed_memory, leave_at_once, report_failure
from hvdtrain.run.resume import (
    Resumable,
    Resumed,
    find_resumable,
    refuse_changed_build,
    refuse_changed_data,
)
from hvdtrain.run.script import OPTIONS, Script
from hvdtrain.run.stop import RunKeeper, StopSignals
from hvdtrain.run.tasks import find_source
from hvdtrain.run.wording import as_options
from hvdtrain.topology import Topology
from hvdtrain.train.batchnorm import convert_back
from hvdtrain.train.devices import check_devices, name_of
from hvdtrain.train.dynamo import defer_dynamo
from hvdtrain.train.job import Job
from hvdtrain.train.loop import Hooks, Outcome, State
from hvdtrain.train.metering import Meter
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

    `command`: of this process, to be recorded. A `script` stays joined until it ends.

    On a failure within the context, a single process raises it. With several workers it is printed,
    and the process ends at once with its exit code.
    """
    if config.run.single_worker:
        topology = topology.by_itself()
    pulse = Pulse.from_environment()
    keep_freed_memory()
    defer_dynamo()
    if config.run.profile is not None:  # Horovod reads it when it starts
        os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    if not pulse.is_watched or script:  # otherwise the launcher's watchdog, which sees every rank
        os.environ.setdefault(STALL_LIMIT, str(STALL_LIMIT_S))
    with StopSignals() as signals:
        exchange = join(lambda: connect(topology)) if script else connect(topology)

        def stalled(error: PeerFailure) -> None:
            signals.note(error)
            leave_at_once(report_failure(error, topology))

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
    folder: Path


@contextmanager
def training_run(config: TrainConfig, session: Session) -> Iterator[TrainingRun | None]:
    """Collective: prepare a run on all ranks and yield it once every rank has succeeded.

    Yields None if `--resume auto` finds a finished run. The ledger records failures within.
    """
    exchange = session.exchange
    session.pulse.beat("prepare")
    resumable = run_on_all(exchange, "resume", lambda: _find_resumable(config, exchange))
    try:
        with _run_or_none(config, session, resumable) as run:
            yield run
        session.pulse.finish()
    finally:
        if resumable:  # a script may go on: the folder is not to stay locked
            resumable.directory.close()


@contextmanager
def _run_or_none(
    config: TrainConfig, session: Session, resumable: Resumable | None
) -> Iterator[TrainingRun | None]:
    exchange = session.exchange
    resumed: Resumed | None = exchange.broadcast_object(
        resumable.resumed if resumable else None, "hvdtrain.resumed"
    )  # on rank 0 the same object, so that its state is there once
    if resumed and resumed.finished:
        if resumable:
            say(final_lines(resumed.finished, as_flat_dict(config), str(resumable.directory.path)))
        yield None
        return
    batch_size = resumed.global_batch_size if resumed else config.batch.resolve(exchange.size)
    source = find_source(config, exchange, session.topology.local_rank, session.script)
    saved = resumed.state if resumed else None
    if saved:
        chooser = _place_of_data(config, session.script)
        run_on_all(
            exchange, "same_data", lambda: refuse_changed_data(config, resumable, source, chooser)
        )
        # The weights of the checkpoint replace pretrained ones.
        config = replace(config, model=replace(config.model, pretrained=None))
    topology, script = session.topology, session.script
    if config.batch.rank_weights == AUTO:
        before = resumed.rank_weights if resumed else None
        config, source = balance(config, source, batch_size, exchange, topology, before)
    job = run_on_all(
        exchange, "prepare", lambda: prepare(config, batch_size, source, exchange, topology, script)
    )
    check_devices(job.device, exchange)
    if saved:
        run_on_all(
            exchange, "same_build", lambda: refuse_changed_build(saved, job.model, job.built)
        )
    order = run_on_all(exchange, "audit", lambda: find_order(config, job, exchange))
    job = job.distributed(exchange)
    state = _restored(saved, job, session)
    directory = run_on_all(exchange, "output", lambda: _take_directory(config, exchange, resumable))
    config = _named(config, exchange, directory)
    with kept():  # trackers may draw random numbers
        ledger = _open_ledger(config, job, session, resumable, directory)
    try:
        with exchange.peer_failures(), exits_as_failures(), ExitStack() as stack:
            yield _make_ready(config, job, state, order, session, ledger, stack)
    except BaseException as error:
        session.signals.ignore()  # the summary is being written
        ledger.fail(error)
        raise
    finally:
        ledger.close()
        job.workers.close()
        convert_back(job.model)


def _place_of_data(config: TrainConfig, script: Script | None) -> str:
    """Return what has chosen the data, as messages call it."""
    if script:
        return "hvdtrain.Loop"
    return f"--task={config.model.task}" if config.model.task else f"--data={config.data.data}"


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
    stack: ExitStack,
) -> TrainingRun:
    """Collective: connect the audit's ring, and let signals be recorded from now on."""
    exchange, signals = session.exchange, session.signals
    audit = make_audits(config, job, exchange, order, state.step, ledger)

    def give_up(error: Stopped) -> None:
        ledger.fail(error)
        leave_at_once(error.exit_code)

    signals.training_starts(note=ledger.fail, give_up=give_up)
    keeper = RunKeeper(exchange, ledger, signals, session.pulse)
    steps = profiled_steps(config.run.profile or "")
    profiler = StepProfiler(steps, config.folder / PROFILE, exchange)
    stack.callback(profiler.close)

    def finish(outcome: Outcome) -> None:
        profiler.close()
        audit.close()
        ledger.finish(outcome)

    hooks = Hooks(audit, ledger, keeper, profiler)
    return TrainingRun(job, state, hooks, finish, config.folder)


def of_this_job(config: TrainConfig, exchange: Exchange) -> TrainConfig:
    """Collective: return the configuration under which a restarted job resumes the run that it has
    begun itself, which may have got another name.
    """
    if os.environ.get(RESTART, "0") == "0":
        return config
    run = config.run
    if exchange.rank == 0 and (folder := folder_of_job(config.folder, os.environ.get(JOB, ""))):
        run = replace(run, experiment=folder.name, resume="auto")
    return replace(config, run=exchange.broadcast_object(run, "hvdtrain.own_run"))


def _find_resumable(config: TrainConfig, exchange: Exchange) -> Resumable | None:
    if exchange.rank == 0:
        check_trackers(config.run.log_to)
    return find_resumable(config, exchange)


def _open_ledger(
    config: TrainConfig,
    job: Job,
    session: Session,
    resumable: Resumable | None,
    directory: RunDirectory | None,
) -> Ledger:
    """Collective: return the ledger; on rank 0, which has the directory, print the header first."""
    exchange = session.exchange
    hosts = exchange.all_gather_object(socket.gethostname(), "hvdtrain.hosts")

    def open_ledger() -> Ledger:
        if directory is None:
            return Ledger(config.folder, exchange.rank)
        return _open_records(config, job, session, directory, resumable, hosts)

    return run_on_all(exchange, "ledger", open_ledger)


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
    return new_directory(config.folder, numbered=config.run.resume is None)


def _named(config: TrainConfig, exchange: Exchange, directory: RunDirectory | None) -> TrainConfig:
    """Collective: return the configuration with the name of the folder that rank 0 has taken."""
    name = exchange.broadcast_object(directory.path.name if directory else None, "hvdtrain.name")
    return replace(config, run=replace(config.run, experiment=name))


def _open_records(
    config: TrainConfig,
    job: Job,
    session: Session,
    directory: RunDirectory,
    resumable: Resumable | None,
    hosts: Sequence[str],
) -> RunLedger:
    """Write the configuration, print the header and return the ledger of rank 0."""
    recorded = directory.last_step()
    if resumable:
        resumable.make_ready()
    resolved = as_flat_dict(config) | {
        "global_batch_size": job.sampler.global_batch_size,
        "batch_size": None,
        "device": name_of(job.device),  # a replay elsewhere is to choose the same
    }
    name = config.model.task or config.model.model
    code: tuple[str | Path | None, ...] = (config.model.task, config.model.model, config.data.data)
    if script := session.script:
        name, code = type(script.model).__name__, (script.path,)
        resolved = {option: resolved[option] for option in OPTIONS}
        resolved["script"] = [str(script.path), *sys.argv[1:]]
        resolved["loop"] = script.loop
    directory.write_config(resolved)
    if JOB in os.environ:
        directory.write_job(os.environ[JOB])
    session.pulse.begin_run(directory.path)
    first_lines = header(job, session.exchange, name)
    say(as_options(first_lines) if session.script else first_lines)
    return RunLedger(
        directory,
        job,
        session.exchange,
        resumed=resumable.resumed.state if resumable else None,
        config=resolved,
        pulse=session.pulse,
        provenance=provenance(code, hosts, session.command),
        writers=open_trackers(config.run.log_to, directory, resolved, recorded),
    )


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
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
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
