"""Trials of faults in a job of four workers on three hosts under `hvdtrain launch`.

The job keeps a checkpoint every few steps. It must end bit for bit with the result of the same job
undisturbed. This shows that no sample was lost, and none was counted twice.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import psutil

from hvdtrain.lab.hosts.node import HostProcess
from hvdtrain.launcher.timeline import BACK as BACK_AFTER
from tests.hosts.namespaces import Cluster
from tests.parallel.launching import hvdtrain, kill_all, rank_of

SLOTS = (1, 2, 1)
CHECKPOINT_EVERY = 5
EXPERIMENT = ["--model=lenet", "--data=synthetic:1x28x28,samples=256", "--global-batch-size=30"]
EXPERIMENT += [f"--checkpoint-interval={CHECKPOINT_EVERY}", "--log-interval=1"]
EXPERIMENT += ["--eval-interval=4", "--audit-every=10", "--virtual-workers=4"]
WATCHDOG_S = 8
END_S = 240.0
NOTICED_S = 120.0  # from a fault to the launcher's restart, on a busy machine
MOST_STEPS_BETWEEN = 12  # from a checkpoint to a fault
RESTART = "hvdtrain launch: restart "
BACK = f"hvdtrain launch: {BACK_AFTER} "
ANSWERS = "hvdtrain launch: answers again: "
BREAK_SSH, KILL_LAUNCHER = "break an ssh connection", "SIGKILL the launcher"
CUT_OFF, TAKEN_BACK = "cut off a host", "that host answers again"


@dataclass
class Lines:
    """The output of a command, with the time of each line."""

    process: HostProcess
    seen: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def first(self, part: str, after_s: float = 0.0) -> float | None:
        """Return the time of the first line at or after `after_s` that begins with `part`."""
        found = (at for at, line in list(self.seen) if at >= after_s and line.startswith(part))
        return next(found, None)

    def parts(self, began_s: float) -> dict[str, float]:
        """Wait for the launcher's line on a recovery; return the seconds of its parts, the first
        from the fault at `began_s`. Empty if the job ends before it makes new steps.
        """
        try:
            at_s = self.wait_for(BACK, END_S, began_s)
        except AssertionError:
            return {}
        line = next(line for at, line in self.seen if at == at_s and line.startswith(BACK))
        total, _, text = line.removeprefix(BACK).strip().partition(" s: ")
        words = [part.rpartition(" ") for part in text.split(", ")]
        seconds = {name: float(number) for name, _, number in words}
        seconds[next(iter(seconds))] += at_s - began_s - float(total)
        return seconds

    def wait_for(self, part: str, limit_s: float, after_s: float = 0.0) -> float:
        """Wait for a line that begins with `part`; return its time. Raises AssertionError."""
        deadline = time.monotonic() + limit_s
        while (at := self.first(part, after_s)) is None:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            assert not ended and time.monotonic() < deadline, f"no {part!r} in:\n{self.text}"
            time.sleep(0.05)
        return at

    def wait_for_steps(self, count: int) -> None:
        """Wait for `count` more steps, or the end of the command.

        A wait of fixed time would outlast the job on a fast machine.
        """
        enough = self._steps() + count
        deadline = time.monotonic() + END_S
        while self._steps() < enough and self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def _steps(self) -> int:
        return sum(line.startswith("step ") for _, line in list(self.seen))

    def wait(self, limit_s: float) -> int:
        """Wait for the end of the command, and return its exit code."""
        code = self.process.wait(limit_s)
        self._reader.join(10)
        return code

    @property
    def text(self) -> str:
        return "".join(line for _, line in list(self.seen))

    def _read(self) -> None:
        assert self.process.stdout
        with suppress(ValueError):  # the pipe is closed with the cluster
            for line in self.process.stdout:
                self.seen.append((time.monotonic(), line))


@dataclass(frozen=True)
class Recovery:
    """The recovery from one fault."""

    fault: str
    detected_s: float  # after the fault
    recovered_s: float  # after the fault, until the first step
    parts: dict[str, float] = field(default_factory=dict)  # of the time until the first new step


@dataclass(frozen=True)
class Ended:
    """The result of a disturbed job."""

    recoveries: list[Recovery]
    summary: dict[str, object]
    left: int  # number of processes left on all hosts
    output: str


@dataclass
class Scene:
    """The job and the cluster that a fault is injected into."""

    cluster: Cluster
    output: Path
    lines: Lines
    dice: random.Random

    def worker(self, rank: int | None = None) -> psutil.Process:
        """Return the `hvdtrain train` process of a rank (None: of a random rank)."""
        workers = {}
        for process in self.cluster.processes():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                words = process.cmdline()
                if "hvdtrain.cli" in words and "train" in words and "launch" not in words:
                    workers[rank_of(process)] = process
        chosen = self.dice.choice(sorted(workers)) if rank is None else rank
        return workers[chosen]


def _signal_worker(number: signal.Signals) -> Callable[[Scene], None]:
    return lambda scene: scene.worker().send_signal(number)


def _cut_off(scene: Scene) -> None:
    """Cut off a host until the job goes on without it."""
    host, began_s = scene.dice.choice([1, 2]), time.monotonic()
    scene.cluster.cut(host)
    scene.lines.wait_for(BACK, NOTICED_S, began_s)
    scene.cluster.mend(host)
    scene.lines.wait_for(ANSWERS, NOTICED_S, began_s)


def _fill_disk(scene: Scene) -> None:
    """Fill the disk until the launcher has reacted by a restart."""
    began_s = time.monotonic()
    scene.cluster.fill(0, scene.output)
    scene.lines.wait_for(RESTART, NOTICED_S, began_s)
    scene.cluster.drain(0, scene.output)


FAULTS: dict[str, Callable[[Scene], None]] = {
    "SIGKILL a worker": _signal_worker(signal.SIGKILL),
    "SIGSTOP a worker": _signal_worker(signal.SIGSTOP),
    "abort in native code": _signal_worker(signal.SIGABRT),
    BREAK_SSH: lambda scene: kill_all(scene.cluster.break_ssh(scene.dice.choice([1, 2]))),
    CUT_OFF: _cut_off,
    "fill the disk of rank 0": _fill_disk,
    KILL_LAUNCHER: lambda scene: scene.cluster.kill(scene.lines.process),
}


def launch(
    cluster: Cluster,
    controller: str,
    output: Path,
    steps: int,
    *more: str,
    train: Sequence[str] = (),
) -> Lines:
    """Start the job from the first host. `more`: flags of launch; `train`: those of train."""
    command = hvdtrain("launch", "--hostfile", str(cluster.hostfile), f"--controller={controller}")
    command += ["--restarts=9", "--min-np=2", f"--watchdog-timeout-s={WATCHDOG_S}", *more]
    command += ["--", "train", *EXPERIMENT, f"--max-steps={steps}", *train]
    command += [f"--output={output}", "--experiment=run", "--resume=auto"]
    return Lines(cluster.start(command, variables={"OMP_NUM_THREADS": "1"}))


def undisturbed(cluster: Cluster, controller: str, output: Path, steps: int) -> dict[str, object]:
    """Run the same job without faults, and return its summary."""
    lines = launch(cluster, controller, output, steps)
    assert lines.wait(END_S) == 0, lines.text
    return read_summary(cluster, output)


def read_summary(cluster: Cluster, output: Path) -> dict[str, object]:
    """Return the summary of the run on rank 0's host."""
    text = cluster.path(0, output / "run" / "summary.json").read_text()
    found: dict[str, object] = json.loads(text)
    return found


def disturb(
    cluster: Cluster,
    faults: Sequence[str],
    controller: str,
    output: Path,
    steps: int,
    dice: random.Random,
) -> Ended:
    """Run a job with faults at random moments, each after recovery from the previous one."""
    cluster.make_private(0, output, mib=96)
    before = cluster.processes()
    lines = launch(cluster, controller, output, steps)
    lines.wait_for(f"step {CHECKPOINT_EVERY}/", END_S)
    output_before, recoveries = "", []
    for fault in faults:
        # After a new checkpoint: a job that fails repeatedly without one is given up.
        lines.wait_for_steps(CHECKPOINT_EVERY + dice.randint(1, MOST_STEPS_BETWEEN))
        began_s = time.monotonic()
        FAULTS[fault](Scene(cluster, output, lines, dice))
        if fault == KILL_LAUNCHER:
            lines.wait(30)
            left = cluster.wait_until_gone(before, 45)
            assert not left, f"left behind by a launcher that was killed: {left}"
            detected_s, output_before = time.monotonic(), output_before + lines.text
            lines = launch(cluster, controller, output, steps)
        else:
            detected_s = _noticed(lines, fault, controller, began_s)
        recovered_s = lines.wait_for("step ", END_S, detected_s)
        parts = lines.parts(began_s) if lines.first(RESTART, began_s) else {}
        recoveries.append(Recovery(fault, detected_s - began_s, recovered_s - began_s, parts))
        if fault == CUT_OFF:
            answered_s = lines.wait_for(ANSWERS, END_S, began_s)
            parts = lines.parts(answered_s)
            recoveries.append(Recovery(TAKEN_BACK, 0.0, sum(parts.values()), parts))
    code = lines.wait(END_S)
    assert code == 0, f"{faults}, {controller}: ended with {code}:\n{output_before}{lines.text}"
    left = cluster.wait_until_gone(before)
    return Ended(recoveries, read_summary(cluster, output), len(left), output_before + lines.text)


def _noticed(lines: Lines, fault: str, controller: str, began_s: float) -> float:
    """Return the time at which the launcher reported a restart.

    mpirun does not need ssh after the start: under MPI a broken connection has no effect.
    """
    if fault == BREAK_SSH and controller == "mpi":
        return lines.wait_for("step ", END_S, began_s)
    return lines.wait_for(RESTART, NOTICED_S, began_s)
