"""Stops of jobs with reader processes, by each signal and to each set of processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from hvdtrain.models import LeNet
from hvdtrain.pulse import STOP_WITHIN
from hvdtrain.train.checkpoint import load_checkpoint, name_of
from tests.parallel.launching import (
    BIN,
    CHECKOUT,
    environment_of,
    hvdtrain,
    kill_all,
    marked,
    wait_until_gone,
)
from tests.parallel.plugins import FailingLeNet
from tests.unit.folders import make_folder

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# To the process group of the command, as timeout(1) and `kill -- -PGID` do; to its session; to each
# process of the job, as systemd and Slurm do.
SCOPES = ("group", "session", "each")
READERS = (0, 2)
STARTERS = ("train", "horovodrun gloo", "horovodrun mpi", "launch gloo", "launch mpi")
WITHIN_S, LEAVING_S = 6, 15.0  # of a stop with a deadline
STUCK = "it takes long from here on"  # printed then
STEP, EVALUATION = (
    f"tests.parallel.stops:{name}" for name in ("step_without_end", "evaluation_without_end")
)
KEPT = {STEP: 2, EVALUATION: 4}  # the last checkpoint before
BEGUN_S, ENDED_S = 240.0, 90.0  # a busy machine; usually some seconds


@dataclass(frozen=True)
class Stop:
    """One way to stop a job."""

    starter: str
    number: signal.Signals
    scope: str
    readers: int
    model: str = "lenet"  # another one has a step or an evaluation that does not end

    def __str__(self) -> str:
        parts = self.starter, self.number.name, self.scope, f"{self.readers} readers", self.model
        return ", ".join(parts[: 4 if self.model == "lenet" else 5])


@dataclass(frozen=True)
class Stopped:
    """How a stopped job ended."""

    exit_code: int
    output: str
    checkpoints: list[str]
    left: list[psutil.Process]
    seconds: float  # from the first signal to the end

    def problem(self, stop: Stop) -> str:
        """Return what is wrong about the end; empty if it is right."""
        right = {128 + stop.number}
        if stop.starter.startswith("horovodrun"):  # whose own end hides that of the workers
            right |= {1, -stop.number}
        wrong = []
        if not self.checkpoints:
            wrong.append("no checkpoint")
        if self.exit_code not in right:
            wrong.append(f"exit code {self.exit_code}")
        if stop.model != "lenet":
            wrong += self._problems_of_a_late_one(stop)
        if self.left:
            wrong.append(f"processes left: {self.left}")
        if "Traceback" in self.output and not stop.starter.startswith("horovodrun"):
            wrong.append("a traceback")
        return ", ".join(wrong)

    def _problems_of_a_late_one(self, stop: Stop) -> Iterator[str]:
        """Yield what is wrong about the end of a job that could not save in time."""
        if not WITHIN_S / 2 < self.seconds < WITHIN_S + LEAVING_S:
            yield f"ended after {self.seconds:.1f} s"
        kept = KEPT[stop.model]
        if self.checkpoints != [name_of(step) for step in range(2, kept + 1, 2)]:
            yield f"checkpoints {self.checkpoints}"
        texts = [f"saved at step {kept}: "]
        if stop.starter.startswith("launch"):  # rank 1 cannot leave by itself
            texts += [f"rank 1 had not ended within {WITHIN_S} s", f"of step {kept} is kept"]
        yield from (f"no {text!r}" for text in texts if text not in self.output)


def stop_job(stop: Stop, folder: Path) -> Stopped:
    """Start a job in an empty folder, stop it once it has shown a step, and return how it ended."""
    pictures = make_folder(folder / "pictures", train=20)
    mark = uuid.uuid4().hex
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            _command(stop, pictures, folder),
            cwd=CHECKOUT,
            env=environment_of(mark) | {"OMP_NUM_THREADS": "1", **_deadline(stop)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_heed_all,
        )
        shown = lambda: (folder / "output").read_text(errors="replace")  # noqa: E731
        try:
            word, times = ("step ", 3) if stop.model == "lenet" else (STUCK, 1)
            _wait(lambda: shown().count(word) >= times or process.poll() is not None, BEGUN_S)
            began_s = time.monotonic()
            for pid in _receivers(stop.scope, process.pid, mark):
                try:
                    os.kill(pid, stop.number)
                except ProcessLookupError:
                    continue
            _wait(lambda: process.poll() is not None, ENDED_S)
            seconds = time.monotonic() - began_s
            left = wait_until_gone(mark)
        finally:
            kill_all(marked(mark))
            process.wait()
    saved = [*(folder / "run" / "checkpoints").glob("*step*")]  # hidden ones too
    for path in saved:
        load_checkpoint(path)
    names = sorted(path.name for path in saved)
    return Stopped(process.returncode, shown(), names, left, seconds)


def _deadline(stop: Stop) -> dict[str, str]:
    return {} if stop.model == "lenet" else {STOP_WITHIN: str(WITHIN_S)}


def _heed_all() -> None:
    """Let a job be stopped by SIGHUP also where the tests are run under nohup."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _command(stop: Stop, pictures: Path, folder: Path) -> list[str]:
    train = ["train", f"--model={stop.model}", f"--data=imagefolder:{pictures}", "--image-size=28"]
    train += ["--global-batch-size=8", "--max-steps=100000"]
    train += ["--log-interval=5"] if stop.model == "lenet" else ["--checkpoint-interval=2"]
    train += [f"--output={folder}", "--experiment=run", f"-j{stop.readers}"]
    starter, _, controller = stop.starter.partition(" ")
    if starter == "train":
        return hvdtrain(*train)
    if starter == "launch":
        return hvdtrain("launch", "-np", "2", "--controller", controller, "--", *train)
    return [str(BIN / "horovodrun"), "-np", "2", f"--{controller}", *hvdtrain(*train)]


def _receivers(scope: str, leader: int, mark: str) -> list[int]:
    if scope == "leader":
        return [leader]
    if scope == "workers":
        return [process.pid for process in marked(mark) if "train" in process.cmdline()[1:4]]
    pids = [process.pid for process in marked(mark)]
    if scope == "group":
        return [pid for pid in pids if os.getpgid(pid) == leader]
    if scope == "session":
        return [pid for pid in pids if os.getsid(pid) == leader]
    return pids


def _wait(done: Callable[[], bool], limit_s: float) -> None:
    """Wait until something is so. Raises AssertionError after the limit."""
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, f"waited {limit_s} s"
        time.sleep(0.1)


def step_without_end(shape: tuple[int, int, int], classes: int) -> FailingLeNet:
    """A network with a pass during which no thread of rank 1 can run."""

    def fault() -> None:
        print(STUCK, flush=True)
        while True:
            ctypes.PyDLL(None).sleep(600)  # holds Python's lock; a signal interrupts it

    return FailingLeNet(shape[0], classes, fault)


class EvaluationWithoutEnd(LeNet):
    """LeNet whose evaluation takes very long on every rank, but not before it is trained."""

    is_trained = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.is_trained = self.is_trained or self.training
        if self.is_trained and not self.training:
            print(STUCK, flush=True)
            time.sleep(600)
        result: torch.Tensor = super().forward(images)
        return result


def evaluation_without_end(shape: tuple[int, int, int], classes: int) -> EvaluationWithoutEnd:
    return EvaluationWithoutEnd(shape[0], classes)
