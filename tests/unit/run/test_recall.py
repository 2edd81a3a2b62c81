"""The state of a run in memory: what each host keeps, and which of it a restart takes."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hvdtrain.audit import Audits
from hvdtrain.errors import AgreedFailure
from hvdtrain.exchange import SingleProcess
from hvdtrain.pulse import JOB, MEMORY_DIR
from hvdtrain.records.ledger import Ledger
from hvdtrain.records.memory_copy import Additions, MemoryCopy
from hvdtrain.run.hooks import StepProfiler
from hvdtrain.run.memory import RunMemory, open_memory
from hvdtrain.run.recall import recall
from hvdtrain.train.checkpoint import Checkpoints, Snapshot, load_checkpoint, load_state, name_of
from hvdtrain.train.interfaces import Hooks
from hvdtrain.train.loop import TrainingLoop, train
from hvdtrain.train.metering import Meter
from hvdtrain.train.progress import State
from hvdtrain.train.state import capture
from tests.unit.jobs import MemoryKeeper, Recording, equal, made_up_data, make_job
from tests.unit.threads import ThreadExchange, connect, run_ranks

RUN, OTHER = "r" * 32, "o" * 32
DISK = "disk"


def lines(until: int) -> str:
    return "".join(json.dumps({"step": step}) + "\n" for step in range(1, until + 1))


@dataclass(frozen=True)
class Content:
    """What a disk, or the memory of a host, has of a run."""

    steps: Sequence[int] = ()  # of its checkpoints
    damaged: Sequence[int] = ()
    run: str = RUN
    job: str = "job"

    def write(self, folder: Path, origin: str) -> None:
        checkpoints = Checkpoints(folder / "checkpoints", keep=9, run=self.run)
        for step in self.steps:
            tensors = {"weight": torch.full((3,), float(step))}
            state = {"step": step, "origin": origin}
            checkpoints.save(Snapshot(step, "sha", tensors, state), is_best=False)
            checkpoints.wait()
            if step in self.damaged:
                with (checkpoints.folder / name_of(step) / "training_state.pt").open("ab") as file:
                    file.write(b"\0")
        (folder / (".lock" if origin == DISK else ".run")).write_text(f"{self.run}\n")
        (folder / ".job").write_text(f"{self.job}\n")
        (folder / "config.yaml").write_text("seed: 0\n")
        (folder / "metrics.jsonl").write_text(lines(max(self.steps)))


# The disk, the memory of each host, the step that is taken, from where (None: no run is there).
CHOICES: dict[str, tuple[Content | None, list[Content | None], int | None, str | None]] = {
    "nothing in memory": (Content([4]), [None, None], 4, DISK),
    "the newest of two": (Content([4]), [Content([6]), Content([8])], 8, "1"),
    "rank 0's, of equal ones": (Content([4]), [Content([8]), Content([8])], 8, "0"),
    "the disk's, of equal ones": (Content([4, 8]), [Content([8]), Content([8])], 8, DISK),
    "a newer one on disk": (Content([9]), [Content([6]), Content([8])], 9, DISK),
    "the newest is damaged": (Content([4]), [Content([6]), Content([8], [8])], 6, "0"),
    "all are damaged": (Content([4]), [Content([6], [6]), Content([8], [8])], 4, DISK),
    "the disk's is damaged": (Content([4, 9], [9]), [Content([6]), None], 6, "0"),
    "as new, damaged on disk": (Content([4, 8], [8]), [None, Content([8])], 8, "1"),
    "another run's": (Content([4]), [None, Content([8], run=OTHER, job="other")], 4, DISK),
    "the disk is lost": (None, [None, Content([8])], 8, "1"),
    "lost, another job's": (None, [None, Content([8], job="other")], None, None),
    "lost, of no job": (None, [None, Content([8], job="")], None, None),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_newest_whole_state_is_taken(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a restart takes a damaged state, an older one, or that of another run; if records
    are not those up to its step; or if it is silent about a damaged one.
    """
    disk, memories, step, origin = CHOICES[case]
    monkeypatch.setenv(JOB, "job")
    run, copies = tmp_path / "runs" / "x", [tmp_path / f"{n}" / "x" for n in range(len(memories))]
    for folder, content, where in zip(
        (run, *copies), (disk, *memories), (DISK, *map(str, range(len(memories)))), strict=True
    ):
        if content:
            content.write(folder, where)
    run_ranks(connect(len(memories)), lambda exchange: recall(run, copies[exchange.rank], exchange))
    output = capsys.readouterr().out
    if step is None:
        assert not run.exists() and output == ""
        return
    good = [path for path in Checkpoints(run / "checkpoints", 1).complete() if is_good(path)]
    assert load_state(good[0]) == {"step": step, "origin": origin}
    assert {"config.yaml", "metrics.jsonl", ".job", ".lock"} <= {p.name for p in run.iterdir()}
    until = max(disk.steps) if disk and origin == DISK else step
    assert (run / "metrics.jsonl").read_text() == lines(until)
    assert (run / ".lock").read_text() == f"{RUN}\n"
    assert not [*run.rglob("*.partial")]
    skipped = sum(bool(content and content.damaged) for content in memories)
    assert output.count("resume: skipping step-") == skipped
    assert ("is newer than what" in output) == (origin != DISK)


def is_good(checkpoint: Path) -> bool:
    try:
        load_checkpoint(checkpoint)
    except Exception:
        return False
    return True


def test_another_run_in_the_folder_is_not_mixed_with_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the job goes on with, or writes into, a run that another job has left there."""
    monkeypatch.setenv(JOB, "job")
    run, copy = tmp_path / "runs" / "x", tmp_path / "memory" / "x"
    Content([9], run=OTHER, job="other").write(run, DISK)
    Content([4]).write(copy, "0")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(AgreedFailure, match=r"runs/x is another run than that of this job"):
        recall(run, copy, SingleProcess())
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_disk_without_room_ends_the_job_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if rank 0 cannot write what arrives and leaves the others waiting in the exchange."""
    monkeypatch.setattr("hvdtrain.records.memory_copy.PIECE_BYTES", 100)  # many to send
    run, copy = tmp_path / "runs" / "x", tmp_path / "memory" / "x"
    Content([4]).write(run, DISK)
    Content([8]).write(copy, "1")
    (run / "..job.partial").mkdir()  # in the way of a file that arrives
    copies = [None, copy]
    with pytest.raises(AgreedFailure, match=r"rank 0: --output=.*runs/x cannot be written"):
        run_ranks(connect(2), lambda exchange: recall(run, copies[exchange.rank], exchange))


def test_only_what_is_new_in_the_records_travels(tmp_path: Path) -> None:
    """Fails if a record is lost or sent twice, or a file that was replaced is sent in part."""
    additions = Additions(tmp_path)
    metrics, evaluation = tmp_path / "metrics.jsonl", tmp_path / "evaluation.json"
    assert additions.take() == []
    metrics.write_text("one\n")
    evaluation.write_text("{}")
    assert additions.take() == [("metrics.jsonl", 0, b"one\n"), ("evaluation.json", 0, b"{}")]
    assert additions.take() == []
    with metrics.open("a") as file:
        file.write("two\n")
    evaluation.write_text("{1}")
    assert additions.take() == [("metrics.jsonl", 4, b"two\n"), ("evaluation.json", 0, b"{1}")]
    (tmp_path / "new").write_text("another file of the name\n")
    (tmp_path / "new").replace(metrics)
    assert additions.take() == [("metrics.jsonl", 0, b"another file of the name\n")]


def test_rank_0_and_its_partner_keep_the_same(tmp_path: Path) -> None:
    """Fails if the partner's copy lacks a record or differs in the state, if a copy keeps more than
    its newest checkpoint, or if rank 0 writes to memory what it writes to disk.
    """
    run, ranks = tmp_path / "run", connect(3)
    run.mkdir()
    jobs = [make_job(made_up_data(24), 6, exchange) for exchange in ranks]
    folders = [tmp_path / "0", tmp_path / "1"]

    def work(exchange: ThreadExchange) -> list[Snapshot | None]:
        rank, taken = exchange.rank, []
        copy = MemoryCopy(folders[rank], RUN, {"classes": ["a"]}) if rank < 2 else None
        memory = RunMemory(exchange, run, copy)
        for step, on_disk in ((2, False), (4, False), (6, True)):
            if rank == 0:
                (run / "metrics.jsonl").write_text(lines(step))
            given = {"trace": {"step": step}} if rank == 0 else {}
            progress = memory.share(given)
            at = State(Meter(exchange, 24), step)
            taken.append(capture(jobs[rank], at, exchange, progress, memory.is_partner))
            memory.save(taken[-1], on_disk)
        memory.wait()
        return taken

    of_0, of_1, of_2 = run_ranks(ranks, work)
    assert of_2 == [None] * 3
    for one, other in zip(of_0, of_1, strict=True):
        assert one and other and equal(one.weights, other.weights)
        assert one.state.pop("meter").keys() == other.state.pop("meter").keys()
        assert equal(one.state, other.state)
    for folder, step in zip(folders, (4, 6), strict=True):
        (newest,) = Checkpoints(folder / "checkpoints", 1).complete()
        assert newest.name == name_of(step)
        assert load_state(newest)["progress"] == {"trace": {"step": step}}
        manifest = json.loads((newest / "manifest.json").read_text())
        assert (manifest["run"], manifest["takeaway"]["trace"]) == (RUN, {"step": step})
        assert (folder / "metrics.jsonl").read_text() == lines(6)


@contextmanager
def little_room() -> Iterator[None]:
    """No file can grow beyond 4 KiB, as on a file system that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_memory_without_room_ends_no_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fails if a full memory ends the run, is reported at each step, or costs the copy before."""
    copy = MemoryCopy(tmp_path / "x", RUN, {})

    def save(step: int, size: int) -> None:
        copy.add([("metrics.jsonl", 0, lines(step).encode())])
        copy.save(Snapshot(step, "sha", {"weight": torch.zeros(size)}, {"step": step}), None)
        copy.wait()

    save(1, 1)
    with little_room():
        for step in (2, 3):
            save(step, 10_000)
    save(4, 1)
    (kept,) = Checkpoints(tmp_path / "x" / "checkpoints", 1).complete()
    assert load_state(kept) == {"step": 1}
    notice = capfd.readouterr().err
    assert notice.count("warning: --memory-interval: on ") == 1
    assert "training goes on without the copy in memory there" in notice


def test_a_folder_that_is_not_there_is_not_made(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fails if a copy is made in a folder that nothing removes at the end of the job."""
    copy = MemoryCopy(tmp_path / "gone" / "x", RUN, {})
    copy.add([])
    assert not (tmp_path / "gone").exists()
    assert "No such file or directory" in capfd.readouterr().err


def test_the_partner_is_on_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if workers of one host keep the state twice, or a run without a launcher does not say
    that the option has no effect.
    """
    (tmp_path / "x").mkdir()
    monkeypatch.delenv(MEMORY_DIR, raising=False)

    def opened(exchange: ThreadExchange) -> RunMemory | None:
        return open_memory(20, tmp_path / "x", exchange, Ledger(tmp_path / "x", exchange.rank))

    assert run_ranks(connect(2), opened) == [None, None]
    assert f"--memory-interval=20: has no effect, .* {MEMORY_DIR}"[:35] in capsys.readouterr().out
    monkeypatch.setenv(MEMORY_DIR, str(tmp_path))
    assert [memory and memory.is_partner for memory in run_ranks(connect(2), opened)] == [False] * 2
    assert open_memory(0, tmp_path / "x", SingleProcess(), Ledger(tmp_path, 0)) is None


def test_steps_between_checkpoints_are_saved_in_memory() -> None:
    """Fails if a state is not saved in memory at its step, or besides a checkpoint on disk."""
    job = make_job(made_up_data(24), 6, SingleProcess(), total_steps=11)
    job = replace(job, intervals=replace(job.intervals, memory=3, checkpoint=9))
    exchange = SingleProcess()
    keeper, state = MemoryKeeper(exchange), State(Meter(exchange, 24, job.task.metrics))
    profiler = StepProfiler(None, Path(), exchange)
    train(TrainingLoop(job, state, exchange, Hooks(Audits(), Recording(), keeper, profiler)))
    assert keeper.saved_in_memory == [3, 6]  # the epochs end at 4, 8 and 11
