"""What a worker reports to its agent through a pipe, and the agent's record of it."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.errors import PeerFailure, TrainingError
from hvdtrain.pulse import PULSE_FD, STACKS_SIGNAL, STEPS_SHOWN, Pulse, WorkerPulse

pytestmark = pytest.mark.timeout(60)
PIPE_BUF = 4096  # written in one piece or not at all (POSIX has 512, Linux this)


class Pipe:
    """Both ends."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.agent = WorkerPulse(self.reading)

    def write(self, text: str) -> None:
        os.write(self.writing, text.encode())

    def hear(self) -> dict:
        """What the agent has received by now."""
        assert self.agent.read()
        return self.agent.report()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    faulthandler.unregister(STACKS_SIGNAL)
    for fd in (made.reading, made.writing):
        os.close(fd)


def start(pipe: Pipe) -> Pulse:
    return Pulse.from_environment({PULSE_FD: str(pipe.writing)})


def test_the_agent_reports_phase_and_step(pipe: Pipe) -> None:
    """Fails when phase, step, figures or the last error do not get from worker to agent."""
    assert pipe.agent.report()["speaks"] is False
    pulse = start(pipe)
    assert pipe.hear() | {"silent_s": 0} == {
        "step": 0,
        "phase": "start",
        "silent_s": 0,
        "busy_s": None,
        "speaks": True,
        "folder": "",
    }
    assert pipe.agent.speaker == os.getpid()
    pulse.beat("prepare")
    pulse.begin_run(Path("/runs/a b"))
    assert (pipe.hear()["phase"], pipe.agent.report()["folder"]) == ("prepare", "/runs/a b")
    pulse.step = 12
    pulse.beat("step")
    pulse.beat()
    pulse.show(loss=0.5, epoch=2)
    pulse.show(loss=0.25, samples_per_s=None)
    report = pipe.hear()
    assert (report["phase"], report["step"]) == ("step", 12)
    assert pipe.agent.take_figures() == {"epoch": 2, "loss": 0.25, "samples_per_s": None}
    assert pipe.agent.take_figures() == {}
    pulse.end(PeerFailure("rank 1 has gone"))
    assert pipe.hear()["peer"] is True
    pulse.end(TrainingError("not finite"))
    assert pipe.hear()["peer"] is False


def test_news_of_a_start_are_reported_at_once_and_once(pipe: Pipe) -> None:
    """Fails when the launcher is told late that a worker has come further than before, or each step
    is news.
    """
    pipe.agent = WorkerPulse(pipe.reading, furthest=7)

    def has_news(step: int, phase: str) -> bool:
        pulse.step = step
        pulse.beat(phase)
        pipe.hear()
        return pipe.agent.take_news()

    pulse = start(pipe)
    pipe.hear()
    assert pipe.agent.take_news() and not pipe.agent.take_news()
    assert has_news(0, "prepare") and has_news(6, "data") and has_news(6, "compute")
    assert not has_news(7, "data") and not has_news(7, "compute")
    assert has_news(8, "data") and not has_news(9, "data")


def test_a_worker_never_waits_for_its_agent(pipe: Pipe) -> None:
    """Fails when a full pipe blocks or ends the worker, or breaks the lines in it."""
    pulse = start(pipe)
    before_s = time.monotonic()
    for step in range(20_000):
        pulse.step = step
        pulse.beat("step")
    assert time.monotonic() - before_s < 20
    data = b""
    while part := _read(pipe.reading):
        data += part
    lines = data.decode().splitlines()
    assert data.endswith(b"\n") and 1000 < len(lines) < 20_000
    assert lines[0] == f"?{os.getpid()}" and all(line.startswith("+step ") for line in lines[1:])
    pulse.beat("save")
    assert pipe.hear()["phase"] == "save"


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""


def test_a_worker_outlives_its_agent() -> None:
    """Fails when the end of the agent ends the worker before it could save."""
    pipe = Pipe()
    pulse = start(pipe)
    os.close(pipe.reading)
    pulse.beat("save")
    faulthandler.unregister(STACKS_SIGNAL)
    os.close(pipe.writing)


@pytest.mark.parametrize("value", [None, "", "x", "-1", "987"])
def test_without_a_pipe_nothing_is_reported(value: str | None) -> None:
    """Fails when a worker without an agent, or with a variable that means nothing here, fails."""
    pulse = Pulse.from_environment({} if value is None else {PULSE_FD: value})
    pulse.beat("step")
    pulse.show(loss=1.0)
    pulse.end(TrainingError("x"))


def test_nothing_but_a_pipe_is_written_to(tmp_path: Path) -> None:
    """Fails when a process that inherited the variable, but not the pipe, writes into the file that
    has the number now.
    """
    with (tmp_path / "samples").open("wb") as file:
        Pulse.from_environment({PULSE_FD: str(file.fileno())}).beat("step")
    assert (tmp_path / "samples").read_bytes() == b""


def test_silence_is_measured(pipe: Pipe) -> None:
    """Fails when silence is not measured from the last beat, or figures end it: they come from
    rank 0 for all.
    """
    pulse = start(pipe)
    pulse.beat("step")
    assert pipe.hear()["silent_s"] < 5
    time.sleep(0.3)
    pulse.show(loss=1.0)
    assert 0.3 <= pipe.hear()["silent_s"] < 20
    began_s = time.monotonic()
    pulse.beat()
    assert pipe.hear()["silent_s"] < time.monotonic() - began_s + 0.1


def test_own_time_is_time_without_the_exchange(pipe: Pipe) -> None:
    """Fails when waiting for others counts as a rank's own time (then all are as slow as the
    slowest), when a step's time is given to another, or more than the last steps are averaged.
    """
    at_s = 100.0

    def beat(phase: str, step: int, seconds: float) -> None:
        nonlocal at_s
        pipe.write(f"+{phase} {step} {at_s}\n")
        at_s += seconds

    beat("data", 1, 1.0)
    beat("compute", 1, 2.0)
    beat("exchange", 1, 50.0)
    beat("update", 1, 0.5)
    assert pipe.hear()["busy_s"] is None  # the first step is not over
    beat("data", 2, 1.5)
    assert pipe.hear()["busy_s"] == pytest.approx(3.5)
    beat("exchange", 2, 50.0)
    beat("data", 3, 0.0)
    assert pipe.hear()["busy_s"] == pytest.approx((3.5 + 1.5) / 2)
    for step in range(4, 5 + STEPS_SHOWN):
        beat("data", step, 4.0)
        beat("exchange", step, 9.0)
    assert pipe.hear()["busy_s"] == pytest.approx(4.0)


def test_lines_come_in_pieces_and_some_are_nonsense(pipe: Pipe) -> None:
    """Fails when a line must come in one piece, or when one that is none ends the agent."""
    for piece in ("+st", "ep 4 1", "1.5\n+exchange", " 4 12\n"):
        pipe.write(piece)
        report = pipe.hear()
    assert (report["phase"], report["step"]) == ("exchange", 4)
    nonsense = ("+", "+a b c", "+a 1", "=", "={", "=[1]", "=7", "!null", "!", "?", "", "@", "\x00ä")
    for line in nonsense:
        pipe.write(line + "\n")
    os.write(pipe.writing, b"\xff\xfe\n+save 5 13\n")
    report = pipe.hear()
    assert (report["phase"], report["step"]) == ("save", 5)
    assert "peer" not in report and pipe.agent.take_figures() == {}


def test_the_end_of_the_pipe_is_noticed(pipe: Pipe) -> None:
    """Fails when the agent reads for ever from a worker that has closed its end, or takes an empty
    pipe for a closed one.
    """
    assert pipe.agent.read()
    other_reading, other_writing = os.pipe()
    pulse = WorkerPulse(other_reading)
    os.close(other_writing)
    assert not pulse.read()
    os.close(other_reading)
    start(pipe)


WORKER = """
import os, subprocess, sys, threading, time
from hvdtrain.pulse import PULSE_FD, Pulse
Pulse.from_environment().beat("step")
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
inherited = subprocess.run(["test", "-e", f"/proc/self/fd/{os.environ[PULSE_FD]}"]).returncode == 0
def waits_for_a_line():
    print("inherited" if inherited else "ready", flush=True)
    return sys.stdin.readline()
print(waits_for_a_line(), flush=True)
"""


def test_stacks_are_given_on_demand() -> None:
    """Fails when the signal ends the worker, or one thread's Python stack is missing on standard
    error; or when the processes that a worker starts keep its pipe open.
    """
    reading, writing = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env=os.environ | {PULSE_FD: str(writing)},
        pass_fds=(writing,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        pulse = WorkerPulse(reading)
        assert pulse.read() and pulse.speaker == worker.pid
        worker.send_signal(signal.SIGUSR2)
        time.sleep(0.5)
        output, errors = worker.communicate("go on\n", timeout=20)
    finally:
        worker.kill()
        worker.wait()
        os.close(reading)
    assert worker.returncode == 0 and output == "go on\n\n"
    assert "in waits_for_a_line" in errors and errors.count("(most recent call first)") == 2
