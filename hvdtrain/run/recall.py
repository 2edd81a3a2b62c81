"""The run that a job continues: its name, and what storage and the memory of hosts have of it."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import AUTO
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.files import why_not_written, write_new
from hvdtrain.pulse import JOB, RESTART
from hvdtrain.records.directory import RunDirectory
from hvdtrain.records.folders import CHECKPOINTS, LOCK, folder_of_job, problem_of, run_id_of
from hvdtrain.records.memory_copy import (
    HeldCopy,
    IncomingCopy,
    folder_in_memory,
    held_copy,
    pieces_of,
)
from hvdtrain.records.storage_start import name_of_job, open_storage
from hvdtrain.records.trackers import check_trackers
from hvdtrain.run.resume import Resumable, find_resumable, lock_wait_s
from hvdtrain.train.checkpoint import Checkpoints, step_of


def of_this_job(config: TrainConfig, exchange: Exchange) -> TrainConfig:
    """Collective: return the configuration under which a restarted job resumes the run that it has
    begun itself, which may have got another name.
    """
    if os.environ.get(RESTART, "0") == "0":
        return config
    run, job = config.run, os.environ.get(JOB)
    name = run_on_all(
        exchange,
        "own_run",
        lambda: name_of_job(run.output, config.folder, job) if exchange.rank == 0 else None,
    )
    names = exchange.all_gather_object(name or _name_in_memory(config, job), "hvdtrain.own_run")
    if name := next(filter(None, names), None):
        run = replace(run, experiment=name, resume=AUTO)
    return replace(config, run=run)


def _name_in_memory(config: TrainConfig, job: str | None) -> str | None:
    """Return the name of the run of a job that this host has in memory."""
    copy = folder_in_memory(config.experiment)
    if not (config.run.memory_interval and copy and job):
        return None
    folder = folder_of_job(copy, job)
    return folder.name if folder else None


def find_run(
    config: TrainConfig, exchange: Exchange, local_rank: int, beat: Callable[[], object]
) -> Resumable | None:
    """Collective: return, on rank 0, the run that `--resume` selects, after what object storage and
    the memory of hosts have of it is copied to its folder. `beat`: called as parts arrive.
    """
    run = config.run

    def fetch() -> None:
        if exchange.rank == 0:
            check_trackers(run.log_to)
            open_storage(run.output, config.folder, run.resume, beat)

    run_on_all(exchange, "storage", fetch)
    if run.memory_interval and run.resume == AUTO:
        copy = folder_in_memory(config.experiment) if local_rank == 0 else None
        recall(config.folder, copy, exchange, beat)
    return run_on_all(exchange, "resume", lambda: find_resumable(config, exchange))


class _Wanted(NamedTuple):
    """The checkpoints in memory that are newer than those on rank 0's disk."""

    run_id: str = ""
    held: Sequence[tuple[int, int]] = ()  # step and rank, the newest first


def recall(
    run: Path, copy: Path | None, exchange: Exchange, beat: Callable[[], object] = lambda: None
) -> None:
    """Collective: copy the newest good checkpoint that a host has in memory, with the records up to
    it, to the run's folder on rank 0, unless the disk has one as new. `copy`: the folder of the
    run's copy in the memory of this host; None on all but its first rank.

    Other runs are left alone; damaged checkpoints are skipped, with a notice. Raises AgreedFailure
    if the folder has another run than the job's, or cannot be written.
    """
    here = held_copy(copy) if copy else HeldCopy()
    held = exchange.all_gather_object(here, "hvdtrain.memory.held")
    with ExitStack() as locked:
        wanted = run_on_all(
            exchange,
            "memory",
            lambda: _find_wanted(run, held, locked) if exchange.rank == 0 else _Wanted(),
        )
        wanted = exchange.broadcast_object(wanted, "hvdtrain.memory.wanted")
        for step, holder in wanted.held:
            pieces = pieces_of(copy, step) if copy and exchange.rank == holder else iter(())
            if holder > 0:
                pieces = _carried(pieces, holder, exchange)
            receive = partial(_receive, pieces, run, step, wanted.run_id, holder)
            taken = run_on_all(exchange, "memory", partial(receive, exchange.rank, beat))
            if exchange.broadcast_object(taken, "hvdtrain.memory.taken"):
                return


def _find_wanted(run: Path, held: Sequence[HeldCopy], locked: ExitStack) -> _Wanted:
    """Return what to copy to the folder of a run, which is `locked` then. Raises UsageError."""
    here, job = run_id_of(run), os.environ.get(JOB)
    of_job = next((one.run_id for one in held if job and one.job == job), "")
    if here and of_job and here != of_job:
        raise UsageError(
            f"--resume: {run} is another run than that of this job, which a host has in memory: "
            "move it away, or choose another --experiment"
        )
    run_id = here or of_job
    ranks = [rank for rank, one in enumerate(held) if run_id and one.run_id == run_id]
    newest_first = sorted(
        ((step, rank) for rank in ranks for step in held[rank].steps),
        key=lambda checkpoint: (-checkpoint[0], checkpoint[1]),
    )
    if not newest_first:
        return _Wanted()
    with _naming_failures(run):
        run.mkdir(parents=True, exist_ok=True)
        if not here:
            write_new(run / LOCK, f"{run_id}\n")
        locked.enter_context(closing(RunDirectory(run, reopen=True, wait_s=lock_wait_s())))
        on_disk = Checkpoints(run / CHECKPOINTS, keep=1)
        on_disk.put_back()
        complete = on_disk.complete()
    as_new = [path for path in complete if step_of(path.name) >= newest_first[0][0]]
    if not all(problem_of(path, "") for path in as_new):
        return _Wanted()
    since = max((step_of(path.name) for path in complete[len(as_new) :]), default=-1)
    return _Wanted(run_id, [(step, rank) for step, rank in newest_first if step > since])


def _carried(
    pieces: Iterator[tuple[str, bytes]], holder: int, exchange: Exchange
) -> Iterator[tuple[str, bytes]]:
    """Collective: yield, on every rank, the pieces that one of them has."""
    while piece := exchange.all_gather_object(next(pieces, None), "hvdtrain.memory.piece")[holder]:
        yield piece


def _receive(
    pieces: Iterator[tuple[str, bytes]],
    run: Path,
    step: int,
    run_id: str,
    holder: int,
    rank: int,
    beat: Callable[[], object],
) -> bool:
    """Take all pieces, on every rank; on rank 0, write them to the folder of the run, and return
    whether they are a good checkpoint of it. Raises UsageError, once all have arrived.
    """
    try:
        with _naming_failures(run):
            if rank == 0:
                incoming = IncomingCopy(run, step)
                for name, piece in pieces:
                    beat()
                    incoming.add(name, piece)
                return incoming.take(run_id, f"in the memory of rank {holder}'s host")
    finally:
        for _ in pieces:
            beat()
    return False


@contextmanager
def _naming_failures(run: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--output={run.parent}: {run} cannot be written: {why_not_written(run, error)}"
        ) from error
