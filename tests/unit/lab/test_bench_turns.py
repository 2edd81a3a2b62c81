"""Turns: who is stopped and who runs, and which steps count."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdtrain.evidence.children import Child, ChildFailure, CommandProcess
from hvdtrain.lab.bench.jobs import Logged, read_steps, steps_per_s
from hvdtrain.lab.bench.turns import PausableJob, TurnJob
from hvdtrain.launcher.processes import process_state

# Reports a step every hundredth of a second, and ends after so many.
PROGRAM = """
import sys, time
with open(sys.argv[1], "w") as stream:
    for step in range(1, int(sys.argv[2])):
        time.sleep(0.01)
        stream.write(f"{step} {time.time()}\\n")
        stream.flush()
sys.exit(int(sys.argv[3]))
"""


@contextmanager
def running(
    folder: Path, steps: int = 100_000, code: int = 0
) -> Iterator[tuple[PausableJob, Path]]:
    """One that has warmed up, and its log."""
    folder.mkdir(exist_ok=True)
    log = folder / "steps"
    argv = [sys.executable, "-c", PROGRAM, str(log), str(steps), str(code)]

    def start(children: list[Child]) -> None:
        children.append(CommandProcess(argv, folder / "process-0.log"))

    job = TurnJob(folder, start, [log], lambda children: None, lambda: [read_steps(log)])
    turns = PausableJob(job, time.monotonic() + 30)
    try:
        yield turns, log
    finally:
        turns.close()


def test_it_stands_still_but_for_its_turns(tmp_path: Path) -> None:
    """Fails if a job goes on outside its turns, or steps count that were made there, or in the
    interval in which it stood still.
    """
    with running(tmp_path) as (turns, log):
        while {process_state(pid) for pid in turns._processes} != {"T"}:
            time.sleep(0.01)  # until the kernel has stopped it
        before = log.read_bytes()
        time.sleep(0.3)
        assert log.read_bytes() == before
        begun_s = []
        for _ in range(2):
            begun_s.append(time.time())
            turns.take(0.2)
            time.sleep(0.3)
        found = turns.end()
    assert len(found) == 2
    for (steps,), began_s in zip(found, begun_s, strict=True):
        assert len(steps) >= 2
        assert began_s < steps[0].at_s < steps[-1].at_s < began_s + 10
        assert steps_per_s(steps) < 101
    assert found[0][0][-1].step < found[1][0][0].step


# One of two threads computes; the other reports a step every hundredth of a second.
BUSY = """
import sys, threading, time
log = open(sys.argv[1], "w")
def compute():
    while True:
        pass
def report():
    for step in range(1, 100_000):
        time.sleep(0.01)
        log.write(f"{step} {time.time()}\\n")
        log.flush()
where = {"main": (report, compute), "other": (compute, report)}[sys.argv[2]]
threading.Thread(target=where[0], daemon=True).start()
where[1]()
"""


@pytest.mark.parametrize("thread", ["main", "other"])
def test_cpu_time_is_told_by_thread(thread: str, tmp_path: Path) -> None:
    """Fails if CPU time outside turns counts, or that of the main thread as another's."""
    log = tmp_path / "steps"
    argv = [sys.executable, "-c", BUSY, str(log), thread]

    def start(children: list[Child]) -> None:
        children.append(CommandProcess(argv, tmp_path / "process-0.log"))

    job = TurnJob(tmp_path, start, [log], lambda children: None, lambda: [read_steps(log)])
    turns = PausableJob(job, time.monotonic() + 30)
    try:
        for _ in range(2):
            turns.take(0.5)
        cores = turns.cores
    finally:
        turns.close()
    assert len(cores) == 2
    for used in cores:
        busy, idle = used if thread == "main" else reversed(used)
        assert idle < busy / 2 and busy < 1.1


def test_a_turn_lasts_until_enough_steps_are_reported(tmp_path: Path) -> None:
    """Fails if a turn ends without an interval to measure."""
    with running(tmp_path) as (turns, _):
        turns.take(0.0)
        assert all(len(steps) >= 2 for steps in turns.end()[0])


@pytest.mark.parametrize(
    ("steps", "code", "expected"),
    [(1, 0, "before its turns were over"), (1, 3, "ended with code 3"), (40, 5, "with code 5")],
)
def test_a_contestant_that_ends_is_reported(
    steps: int, code: int, expected: str, tmp_path: Path
) -> None:
    """Fails if a job that has ended, well or not, is waited for."""
    with pytest.raises(ChildFailure, match=expected), running(tmp_path, steps, code) as (turns, _):
        for _ in range(20):
            turns.take(0.1)


def test_a_deadline_ends_it(tmp_path: Path) -> None:
    """Fails if one that reports nothing is waited for without end."""
    (tmp_path / "log").touch()

    def start(children: list[Child]) -> None:
        argv = [sys.executable, "-c", "import time; time.sleep(60)"]
        children.append(CommandProcess(argv, tmp_path / "process-0.log"))

    job = TurnJob(tmp_path, start, [tmp_path / "log"], lambda children: None, list)
    with pytest.raises(ChildFailure, match="not over in time"):
        PausableJob(job, time.monotonic() + 0.2)


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    """Fails if the half of a number passes for a time."""
    path = tmp_path / "steps"
    path.write_text("10 1.5\n20 2.25\n30 2.")
    steps = read_steps(path)
    assert steps == [Logged(10, 1.5), Logged(20, 2.25)]
    assert steps_per_s(steps) == 10 / 0.75
