"""`hvdtrain bench start`: the time from a command to the end of its first step.

Each command is timed from outside, up to the time at which it reports its first step. Where it
reports more (our script by itself, `train` through the pipe that an agent would read), the time is
broken down. For that `train` is started through one more interpreter (hvdtrain.lab.bench.stamp),
whose start of some hundredths of a second counts against it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.lab.bench import ddp_script, stamp
from hvdtrain.lab.bench.turns import (
    HVDTRAIN,
    Ratio,
    logged_steps,
    on_workers,
    run_command,
    spread,
    train_argv,
)
from hvdtrain.log import counted

LAUNCH, HOROVODRUN, TORCHRUN = "hvdtrain launch", "horovodrun hvdtrain train", "torchrun, DDP"
TRAIN, SCRIPT = "hvdtrain train, alone", "python script, alone"
CONTESTANTS = (LAUNCH, HOROVODRUN, TORCHRUN, TRAIN, SCRIPT)
PAIRS = ((LAUNCH, TORCHRUN), (HOROVODRUN, TORCHRUN), (TRAIN, SCRIPT))
PARTS = ("start", "imports", "join", "prepare", "first step")
END = "#"  # terminates the reading of a pipe; no worker writes it
TRAIN_FLAGS = (
    *("--model", "lenet", "--data", f"synthetic:1x28x28,samples={ddp_script.SAMPLES}"),
    *("--device", "cpu"),
    *("--batch-size", str(ddp_script.BATCH_SIZE), "--max-steps", "2", "--log-interval", "1"),
)


@dataclass(frozen=True)
class StartPlan:
    """Configuration of `hvdtrain bench start`."""

    workers: int
    rounds: int
    controller: str  # gloo or mpi
    time_limit_s: float  # of each command


@dataclass(frozen=True)
class Started:
    """The times of one start."""

    total_s: float  # from the command to the end of the first step
    parts_s: Mapping[str, float]  # they add up to the total; empty where unknown


Starts = dict[str, list[Started]]


def measure(
    plan: StartPlan,
    run: Callable[[str, Path], Started],
    folder: Path,
    report: Callable[[str], None],
) -> Starts:
    """Run all commands in turns; return their starts by name and round. Raises ChildFailure."""
    starts: Starts = {name: [] for name in CONTESTANTS}
    for number in range(plan.rounds):
        for name in CONTESTANTS if number % 2 == 0 else reversed(CONTESTANTS):
            own = folder / f"{number}-{CONTESTANTS.index(name)}"
            own.mkdir(mode=0o700)
            starts[name].append(run(name, own))
            report(f"round {number + 1}: {name}: {starts[name][-1].total_s:.2f} s")
    return starts


def ratios_of(starts: Starts) -> dict[str, Ratio]:
    """Return our times as multiples of the peers' in the same round."""
    return {
        f"{ours} / {other}": spread(
            [a.total_s / b.total_s for a, b in zip(starts[ours], starts[other], strict=True)]
        )
        for ours, other in PAIRS
    }


@dataclass(frozen=True)
class StartRunner:
    """A runner of single commands."""

    plan: StartPlan

    def __call__(self, name: str, folder: Path) -> Started:
        """Run the command of this name once. Raises ChildFailure."""
        if name in (TORCHRUN, SCRIPT):
            return self._script(name, folder)
        return self._launch(folder) if name == LAUNCH else self._train(name, folder)

    def _script(self, name: str, folder: Path) -> Started:
        times = folder / "times.json"
        argv = [sys.executable]
        if name == TORCHRUN:
            argv += ["-m", "torch.distributed.run", "--standalone"]
            argv += ["--nproc-per-node", str(self.plan.workers)]
        argv += [ddp_script.__file__, str(times)]
        began_s = time.monotonic()
        run_command(argv, os.environ, folder, self.plan.time_limit_s)
        return started([began_s, *json.loads(times.read_text("utf-8"))])

    def _launch(self, folder: Path) -> Started:
        """Run `hvdtrain launch`, whose agents read the workers' pipes: only the total is known."""
        argv = [*HVDTRAIN, "launch", "-np", str(self.plan.workers)]
        argv += ["--controller", self.plan.controller, "--"]
        argv += train_argv(folder, TRAIN_FLAGS)[len(HVDTRAIN) :]
        began_s = time.time()
        run_command(argv, os.environ, folder, self.plan.time_limit_s)
        return Started(logged_steps(folder)[0].at_s - began_s, {})

    def _train(self, name: str, folder: Path) -> Started:
        workers = self.plan.workers if name == HOROVODRUN else 1
        pipe = folder / "pulse"
        command = [sys.executable, "-m", stamp.__name__, str(pipe)]
        command += train_argv(folder, TRAIN_FLAGS)
        argv, environment = on_workers(command, workers, self.plan.controller)
        clock_offset_s = time.time() - time.monotonic()
        with PulseReader(pipe) as reader:
            began_s = time.monotonic()
            run_command(argv, environment, folder, self.plan.time_limit_s)
        first_step_s = logged_steps(folder)[0].at_s - clock_offset_s
        return started([began_s, *marks_of(reader.lines), first_step_s])


def started(times_s: Sequence[float]) -> Started:
    """Return a start, from the times of the command and of the ends of all parts."""
    parts = {
        name: end - begin for name, begin, end in zip(PARTS, times_s[:-1], times_s[1:], strict=True)
    }
    return Started(times_s[-1] - times_s[0], parts)


def marks_of(lines: Sequence[tuple[float, str]]) -> list[float]:
    """Return when rank 0 started, had imported, had joined, and began its first step.

    `lines`: time of arrival and text of each line from the pipe. All times in monotonic seconds.
    """
    begun = next(float(line[1:]) for _, line in lines if line.startswith(stamp.STARTED))
    joined = next(_beat_s(line) for _, line in lines if line.startswith("+prepare "))
    # This line has no time stamp: it may have been read slightly after it was written.
    imported = min(joined, next(at_s for at_s, line in lines if line.startswith("?")))
    prepared = next(_beat_s(line) for _, line in lines if line.startswith("+data 1 "))
    return [begun, imported, joined, prepared]


def _beat_s(line: str) -> float:
    return float(line.split()[2])


class PulseReader:
    """A thread that reads a named pipe, with the time of arrival of each line."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path, 0o600)
        # For reading and writing, so that it can be opened before the worker does, and stays open
        # after the worker has ended.
        self._fd = os.open(path, os.O_RDWR)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.lines: list[tuple[float, str]] = []

    def __enter__(self) -> PulseReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._fd, f"{END}\n".encode())
        self._thread.join()
        os.close(self._fd)

    def _read(self) -> None:
        pending = b""
        while True:
            pending += os.read(self._fd, 1 << 16)
            now_s = time.monotonic()
            *whole, pending = pending.split(b"\n")
            self.lines += [(now_s, line.decode()) for line in whole]
            if END.encode() in whole:
                return


def table(plan: StartPlan, starts: Starts) -> str:
    """Return the table of medians, in seconds, and ratios."""
    rounds = counted(plan.rounds, "round")
    lines = [
        f"start: seconds from the command to the end of the first step, LeNet, {plan.workers} "
        f"workers ({plan.controller}; DDP: gloo) or alone; median of {rounds} in turns"
    ]
    width = max(map(len, CONTESTANTS))
    lines.append(f"  {'':{width}}  {'total':>10}" + "".join(f"{part:>12}" for part in PARTS))
    for name, found in starts.items():
        total_s = statistics.median(start.total_s for start in found)
        parts_s = medians_of_parts(found)
        cells = [f"{parts_s[part]:12.2f}" if parts_s else f"{'-':>12}" for part in PARTS]
        lines.append(f"  {name:{width}}  {total_s:10.2f}" + "".join(cells))
    width = max(map(len, ratios_of(starts)))
    for name, ratio in ratios_of(starts).items():
        lines.append(
            f"  ratio, {name:{width}} {ratio.median:6.3f}  (middle half: "
            f"{ratio.lower_quartile:.3f} to {ratio.upper_quartile:.3f})"
        )
    return "\n".join(lines)


def medians_of_parts(found: Sequence[Started]) -> dict[str, float]:
    """Return the median seconds of each part; empty where parts are unknown."""
    if not all(start.parts_s for start in found):
        return {}
    return {part: statistics.median(start.parts_s[part] for start in found) for part in PARTS}
