"""`hvdtrain bench start`: the time from a command to the end of its first step.

Each command is timed from outside, up to the time at which it reports its first step. Where it
reports more (our script by itself, `train` through the pipe that an agent would read), the time is
broken down. For that `train` is started through one more interpreter (hvdtrain.lab.bench.stamp),
whose start of some hundredths of a second counts against it.
"""

import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.evidence.children import run_command
from hvdtrain.interpreter import module_argv
from hvdtrain.lab.bench import ddp_script, jobs, rounds, stamp
from hvdtrain.lab.bench.rounds import Ratio
from hvdtrain.lab.findings import Findings, publish
from hvdtrain.log import counted, say
from hvdtrain.report import charts
from hvdtrain.report.charts import Plot

LAUNCH, HOROVODRUN, TORCHRUN = "hvdtrain launch", "horovodrun hvdtrain train", "torchrun, DDP"
TRAIN, SCRIPT = "hvdtrain train, alone", "python script, alone"
CONTESTANTS = (LAUNCH, HOROVODRUN, TORCHRUN, TRAIN, SCRIPT)
PAIRS = ((LAUNCH, TORCHRUN), (HOROVODRUN, TORCHRUN), (TRAIN, SCRIPT))
PARTS = ("start", "imports", "join", "prepare", "first step")
HEADINGS = ("", "total", *PARTS)
WHOLE = "not taken apart"
COLOURS = dict(zip(PARTS, (charts.PALETTE[4], *charts.PALETTE[:4]), strict=True))
COLOURS[WHOLE] = "#999999"
BAR = 0.62  # share of a row
END = b"#\n"  # terminates the reading of a pipe; no worker writes it
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

    def __str__(self) -> str:
        return f"{self.total_s:.2f} s"


Starts = dict[str, list[Started]]


def run(arguments: dict[str, Any]) -> int:
    """Measure all starts, one after the other; return the exit code. Raises TrainingError."""
    plan = rounds.plan_of(StartPlan, arguments)
    with rounds.scratch_folder("start") as folder:
        starts = rounds.measure(CONTESTANTS, plan.rounds, partial(start, plan), folder, say)
    seconds = {name: [asdict(one) for one in runs] for name, runs in starts.items()}
    ratios = {name: asdict(ratio) for name, ratio in ratios_of(starts).items()}
    content = {**asdict(plan), "starts": seconds, "ratios": ratios}
    return publish(Findings([table(plan, starts)], content, [draw_start(starts)]), arguments)


def ratios_of(starts: Starts) -> dict[str, Ratio]:
    """Return our times as multiples of the peers' in the same round."""
    totals = {name: [one.total_s for one in runs] for name, runs in starts.items()}
    return rounds.paired(totals, {f"{ours} / {other}": (ours, other) for ours, other in PAIRS})


def start(plan: StartPlan, name: str, folder: Path) -> Started:
    """Run the command of this name once. Raises ChildFailure."""
    if name in (TORCHRUN, SCRIPT):
        return _script(plan, name, folder)
    if name != LAUNCH:
        return _train(plan, name, folder)
    argv = jobs.launch_argv(plan.workers, plan.controller, jobs.train_argv(folder, TRAIN_FLAGS))
    began_s = time.time()
    run_command(argv, os.environ, folder, plan.time_limit_s)
    # Only the total is known, as agents read the workers' pipes.
    return Started(jobs.logged_steps(folder)[0].at_s - began_s, {})


def _script(plan: StartPlan, name: str, folder: Path) -> Started:
    times = folder / "times.json"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    launcher = [*torchrun, str(plan.workers)] if name == TORCHRUN else []
    argv = [sys.executable, *launcher, ddp_script.__file__, str(times)]
    began_s = time.monotonic()
    jobs.run_peer_command(argv, os.environ, folder, plan.time_limit_s, times.exists)
    return started([began_s, *json.loads(times.read_text("utf-8"))])


def _train(plan: StartPlan, name: str, folder: Path) -> Started:
    pipe = folder / "pulse"
    stamped = [*module_argv(stamp.__name__), str(pipe), *jobs.train_argv(folder, TRAIN_FLAGS)]
    workers = plan.workers if name == HOROVODRUN else 1
    argv, environment = jobs.on_workers(stamped, workers, plan.controller)
    clock_offset_s = time.time() - time.monotonic()
    with pulse_lines(pipe) as lines:
        began_s = time.monotonic()
        run_command(argv, environment, folder, plan.time_limit_s)
    first_step_s = jobs.logged_steps(folder)[0].at_s - clock_offset_s
    return started([began_s, *marks_of(lines), first_step_s])


def started(times_s: Sequence[float]) -> Started:
    """Return a start, from the times of the command and of the ends of all parts."""
    seconds = [end - begin for begin, end in itertools.pairwise(times_s)]
    return Started(times_s[-1] - times_s[0], dict(zip(PARTS, seconds, strict=True)))


@contextmanager
def pulse_lines(path: Path) -> Iterator[list[tuple[float, str]]]:
    """Yield a list that a thread extends by each line from a new named pipe, with its time of
    arrival in monotonic seconds. It is complete when the context ends.
    """
    os.mkfifo(path, 0o600)
    lines: list[tuple[float, str]] = []
    # For reading and writing, so that it can be opened before the worker does, and stays open
    # after the worker has ended.
    with os.fdopen(os.open(path, os.O_RDWR), "rb") as stream:

        def read() -> None:
            for line in stream:
                lines.append((time.monotonic(), line.decode().strip()))
                if line == END:
                    return

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield lines
        finally:
            os.write(stream.fileno(), END)
            thread.join()


def marks_of(lines: Sequence[tuple[float, str]]) -> list[float]:
    """Return when rank 0 started, had imported, had joined, and began its first step.

    `lines`: time of arrival and text of each line from the pipe. All times in monotonic seconds.
    """
    begun = next(float(line[1:]) for _, line in lines if line.startswith(stamp.STARTED))
    joined, prepared = (
        next(float(line.split()[2]) for _, line in lines if line.startswith(phase))
        for phase in ("+prepare ", "+data 1 ")
    )
    # This line has no time stamp: it may have been read slightly after it was written.
    imported = min(joined, next(at_s for at_s, line in lines if line.startswith("?")))
    return [begun, imported, joined, prepared]


def medians_of(runs: Sequence[Started]) -> tuple[float, dict[str, float]]:
    """Return the median seconds of the total and of each part; no parts where unknown."""
    shown = PARTS if all(one.parts_s for one in runs) else ()
    parts_s = {part: statistics.median(one.parts_s[part] for one in runs) for part in shown}
    return statistics.median(one.total_s for one in runs), parts_s


def table(plan: StartPlan, starts: Starts) -> str:
    """Return the table of medians, in seconds, and ratios."""
    rows = [
        (name, f"{total_s:.2f}", *(f"{parts_s[p]:.2f}" if parts_s else "-" for p in PARTS))
        for name, (total_s, parts_s) in zip(starts, map(medians_of, starts.values()), strict=True)
    ]
    head = (
        f"start: seconds from the command to the end of the first step, LeNet, {plan.workers} "
        f"workers ({plan.controller}; DDP: gloo) or alone, on CPUs; median of "
        f"{counted(plan.rounds, 'round')} in turns"
    )
    return "\n".join(
        [head, *rounds.columns([HEADINGS, *rows]), *rounds.ratio_lines(ratios_of(starts))]
    )


def draw_start(starts: Starts) -> Plot:
    """Plot one bar per command, divided into its parts where they are known."""
    figure = charts.new_figure(charts.WIDTH, 1.2 + charts.ROW_HEIGHT * len(starts))
    axes = figure.add_subplot()
    medians = [medians_of(runs) for runs in starts.values()]
    for row, (total_s, parts_s) in enumerate(medians):
        parts = parts_s or {WHOLE: total_s}
        colours = [COLOURS[part] for part in parts]
        starts_s = [0.0, *itertools.accumulate(parts.values())][:-1]
        axes.barh([row] * len(parts), [*parts.values()], BAR, left=starts_s, color=colours)
    ends = [max(total_s, sum(parts_s.values())) for total_s, parts_s in medians]
    charts.label_rows(axes, ends, [f"{total_s:.2f}" for total_s, _ in medians], 8)
    axes.set_xlim(0, max(ends) * 1.12)
    charts.dress_rows(axes, "From the command to the first step", [*starts], "seconds, medians")
    charts.name_colours(figure, COLOURS, fontsize=8)
    return Plot(
        name="start",
        title="Start",
        caption="Medians, of each part by itself: they need not add up to that of the total.",
        figure=figure,
    )
