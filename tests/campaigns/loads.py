"""Loads far larger than the examples: their time and memory beside a limit.

python -m tests.campaigns.loads [--only NAME ...] [--folder DIR]

many-tensors      `train` a model of 20,000 small tensors, in turns with a plain loop of torch
many-tensors-own  the same by `hvdtrain.Loop`
many-tensors-two  the same by `hvdtrain.Loop` on two workers
folders           start on 200,000 class folders, beside 20,000
3gb               two steps of plain SGD on 3 GiB of parameters, and their checkpoint
classes           train and evaluate 22,000 classes, beside 10
report-300k, report-1m    `report` of a run with so many lines of metrics

Prints a line for each: seconds, peak MiB of the largest process, the limit, right or wrong. Exits
with 1 if any is wrong. Takes 17 GiB of memory, 15 GiB of disk and half an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain
from hvdtrain.data import Dataset
from hvdtrain.data.splits import Splits, TensorSplit

MIB = 1 << 20
TENSORS, WIDTH, BATCH, STEPS, WARM_UP = 20_000, 8, 16, 16, 4
STEP_RATIO = 1.2  # of a step of plain torch
FOLDERS, GROWTH = 20_000, 10
MACHINE_MIB = 23 * 1024
CLASSES = 22_000
ABOVE_DATA_MIB = 1024
REPORT_S, REPORT_MIB = 30.0, 500.0
END_S = 3600.0
MOST_MIB = 17 * 1024  # a process that takes more is killed, as others may use the machine
HVDTRAIN = [sys.executable, "-m", "hvdtrain"]
HERE = "tests.campaigns.loads"


class Layers(nn.Module):
    """A network whose parameters are 20,000 small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(TENSORS // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 1e-4 * torch.relu(layer(x))
        return x


class Turns:
    """Steps of hvdtrain in turns with those of a plain loop on a copy of the model."""

    def __init__(self) -> None:
        self._model = Layers()
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.01, momentum=0.9, fused=True)
        self._plain: list[float] = []
        self._own: list[float] = []
        self._since: float | None = None

    def plain(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Make a plain step; all since the last one was a step of hvdtrain."""
        start = time.perf_counter()
        if self._since is not None:
            self._own.append(start - self._since)
        self._optimizer.zero_grad()
        cross_entropy(self._model(x), y).backward()
        self._optimizer.step()
        self._since = time.perf_counter()
        self._plain.append(self._since - start)
        if len(self._plain) == STEPS:
            self._print()

    def _print(self) -> None:
        """Print the median ratio of steps that are not logged, and of those that are: even ones."""
        ratios = [own / plain for own, plain in zip(self._own, self._plain, strict=False)]
        unlogged, logged = (statistics.median(ratios[WARM_UP + part :: 2]) for part in (0, 1))
        print(f"RATIOS {unlogged:.3f} {logged:.3f}", flush=True)


class Beside(hvdtrain.Task):
    """A task whose loss first makes a plain step beside it."""

    def build_data(self) -> Splits:
        count = BATCH * STEPS
        split = TensorSplit(torch.rand(count, WIDTH), torch.arange(count) % WIDTH)
        return Splits("made up", split, TensorSplit(split.inputs[:1], split.labels[:1]))

    def build_model(self) -> nn.Module:
        self._turns = Turns()
        return Layers()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> hvdtrain.Sums:
        x, y = batch
        if torch.is_grad_enabled():
            self._turns.plain(x, y)
        return hvdtrain.Sums(cross_entropy(model(x), y, reduction="sum"), len(y))


def own_loop() -> None:
    """Train as a script of one's own; each step after a plain one."""
    torch.manual_seed(0)  # the workers compare their data
    turns, model = Turns(), Layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
    data = TensorDataset(torch.rand(BATCH * STEPS, WIDTH), torch.arange(BATCH * STEPS) % WIDTH)
    with hvdtrain.Loop(model, optimizer, DataLoader(data, BATCH), epochs=1, log_interval=2) as loop:
        for step in loop:
            for x, y in step.batches():
                turns.plain(x, y)
                step.backward(mean=cross_entropy(model(x), y), count=len(y))
            step.update()


def large(_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return a network of 3 GiB: 12 layers of 256 MiB."""
    layers = [nn.Linear(8192, 8192, bias=False) for _ in range(12)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8192), *layers, nn.Linear(8192, classes))


def classifier(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return a network with few inputs for each class."""
    inputs = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.Linear(16, classes))


def samples_of(classes: int, count: int) -> Dataset:
    labels = torch.arange(count) % classes
    train, valid = (TensorSplit(torch.rand(count, 1, 8, 8), labels) for _ in range(2))
    return Dataset("made up", (1, 8, 8), classes, train, valid)


def many_classes(*_: object) -> Dataset:
    return samples_of(CLASSES, 2 * CLASSES)


def few_classes(*_: object) -> Dataset:
    return samples_of(10, 2 * CLASSES)


def few_samples(*_: object) -> Dataset:
    return samples_of(10, 8)


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    seconds: float
    peak_mib: float  # of the largest process that it started, or of itself
    exit_code: int
    output: str


@dataclass(frozen=True)
class Result:
    """The outcome of a load."""

    seconds: float
    peak_mib: float
    limit: str
    found: str  # beside the limit
    is_right: bool


def run(command: list[str], folder: Path, until: Path | None = None) -> Ended:
    """Run a command in `folder`. `until`: kill it once this file has text."""
    root = str(Path(__file__).resolve().parents[2])
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    variables |= {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
    output = folder / "output.txt"
    start = time.perf_counter()
    with output.open("w") as to:
        child = subprocess.Popen(command, env=variables, cwd=folder, stdout=to, stderr=to)
    ended, status, usage = os.wait4(child.pid, os.WNOHANG)
    while not ended:
        seconds = time.perf_counter() - start
        is_there = until is not None and until.exists() and until.stat().st_size > 0
        if seconds > END_S or is_there or resident_mib(child.pid) > MOST_MIB:
            os.kill(child.pid, signal.SIGKILL)
        time.sleep(0.05)
        ended, status, usage = os.wait4(child.pid, os.WNOHANG)
    seconds, child.returncode = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
    return Ended(seconds, usage.ru_maxrss / 1024, child.returncode, output.read_text())


def resident_mib(process: int) -> float:
    """Return the memory that a process has now; 0 if it has just ended."""
    pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / MIB


def many_tensors(command: list[str]) -> Callable[[Path], Result]:
    def measure(folder: Path) -> Result:
        ended = run(command, folder)
        found = next((it for it in ended.output.splitlines() if "RATIOS" in it), "")
        ratios = [float(it) for it in found.partition("RATIOS")[2].split()]
        return Result(
            ended.seconds,
            ended.peak_mib,
            f"{STEP_RATIO} of plain torch's step",
            f"{' logged '.join(map(str, ratios)) or ended.output}",
            not ended.exit_code and bool(ratios) and max(ratios) <= STEP_RATIO,
        )

    return measure


def start_on(classes: int, folder: Path) -> Ended:
    """Train one step on so many class folders, each with one or two pictures."""
    picture = folder / "picture.png"
    Image.new("RGB", (4, 4), (200, 30, 90)).save(picture)
    for number in range(classes):
        for part, count in (("train", 1 + number % 2), ("valid", 1)):
            place = folder / "images" / part / f"class-{number:06}"
            place.mkdir(parents=True)
            for name in range(count):
                shutil.copyfile(picture, place / f"{name}.png")
    data = [f"--data=imagefolder:{folder}/images", "--image-size=8", "--crop-scale=1", "-j", "0"]
    steps = ["--max-steps=2", "--log-interval=1", "--global-batch-size=8"]
    command = [*HVDTRAIN, "train", f"--model={HERE}:classifier", *data, *steps, *run_in(folder)]
    return run(command, folder, until=folder / "run" / "metrics.jsonl")


def folders(folder: Path) -> Result:
    """Start on few folders and on ten times as many: time and memory grow tenfold at most."""
    ended = []
    for classes in (FOLDERS, FOLDERS * GROWTH):
        place = folder / str(classes)
        place.mkdir()
        ended.append(start_on(classes, place))
        shutil.rmtree(place / "images")
    few, many = ended
    return Result(
        many.seconds,
        many.peak_mib,
        f"{GROWTH} times {few.seconds:.0f} s and {few.peak_mib:.0f} MiB",
        "" if many.exit_code == -signal.SIGKILL else many.output,
        many.exit_code == few.exit_code == -signal.SIGKILL
        and many.seconds <= GROWTH * few.seconds
        and many.peak_mib <= GROWTH * few.peak_mib,
    )


def run_in(folder: Path) -> list[str]:
    return ["--output", str(folder), "--experiment", "run"]


def three_gb(folder: Path) -> Result:
    flags = [f"--data={HERE}:few_samples", f"--model={HERE}:large", "--opt=sgd", "--momentum=0"]
    flags += ["--lr=1e-3", "--max-steps=2", "--global-batch-size=4"]
    ended = run([*HVDTRAIN, "train", *flags, *run_in(folder)], folder)
    saved = list((folder / "run" / "checkpoints").glob("step-00000002/*.safetensors"))
    is_right = not ended.exit_code and bool(saved) and ended.peak_mib <= MACHINE_MIB
    found = "" if is_right else ended.output
    return Result(ended.seconds, ended.peak_mib, f"{MACHINE_MIB} MiB", found, is_right)


def classes(folder: Path) -> Result:
    ended = []
    for name in ("few_classes", "many_classes"):
        place = folder / name
        place.mkdir()
        flags = [f"--model={HERE}:classifier", f"--data={HERE}:{name}", "--epochs=1"]
        ended.append(run([*HVDTRAIN, "train", *flags, *run_in(place)], place))
    few, many = ended
    limit_mib = few.peak_mib + ABOVE_DATA_MIB
    return Result(
        many.seconds,
        many.peak_mib,
        f"{limit_mib:.0f} MiB: {ABOVE_DATA_MIB} more than with 10 classes",
        many.output if many.exit_code else "",
        many.exit_code == few.exit_code == 0 and many.peak_mib <= limit_mib,
    )


def report(lines: int) -> Callable[[Path], Result]:
    def measure(folder: Path) -> Result:
        flags = ["--data=digits", "--max-steps=4", "--log-interval=1"]
        made = run([*HVDTRAIN, "train", *flags, *run_in(folder)], folder)
        metrics = folder / "run" / "metrics.jsonl"
        kept = [json.loads(line) for line in metrics.read_text().splitlines()]
        step, others = kept[0], [it for it in kept if it["kind"] != "step"]
        losses = 2 + np.random.default_rng(0).normal(size=lines) / 10
        with metrics.open("w") as to:
            for number, loss in enumerate(losses.tolist(), 1):
                own = {"step": number, "samples_seen": number, "train_loss": loss}
                to.write(json.dumps(step | own) + "\n")
            to.writelines(json.dumps(it | {"step": lines}) + "\n" for it in others)
        ended = run([*HVDTRAIN, "report", str(folder / "run")], folder)
        return Result(
            ended.seconds,
            ended.peak_mib,
            f"{REPORT_S:.0f} s and {REPORT_MIB:.0f} MiB",
            ended.output if ended.exit_code else "",
            made.exit_code == ended.exit_code == 0
            and ended.seconds <= REPORT_S
            and ended.peak_mib <= REPORT_MIB,
        )

    return measure


OWN_LOOP = [sys.executable, "-m", HERE, "--own-loop"]
BESIDE = [*HVDTRAIN, "train", f"--task={HERE}:Beside", f"--global-batch-size={BATCH}"]
BESIDE += ["--log-interval=2", "--epochs=1", "--output=.", "--experiment=run"]

LOADS: dict[str, Callable[[Path], Result]] = {
    "many-tensors": many_tensors(BESIDE),
    "many-tensors-own": many_tensors(OWN_LOOP),
    "many-tensors-two": many_tensors([*HVDTRAIN, "launch", "-np", "2", "--", *OWN_LOOP]),
    "folders": folders,
    "3gb": three_gb,
    "classes": classes,
    "report-300k": report(300_000),
    "report-1m": report(1_000_000),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=LOADS, default=list(LOADS), metavar="NAME")
    parser.add_argument("--folder", help="make the data here (default: that of temporary files)")
    parser.add_argument("--own-loop", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.own_loop:
        torch.set_num_threads(1)
        own_loop()
        return 0
    wrong = 0
    for name in asked.only:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-loads-", dir=asked.folder) as scratch:
            it = LOADS[name](Path(scratch))
        wrong += not it.is_right
        verdict = "right" if it.is_right else "wrong"
        print(
            f"{name:16} {it.seconds:6.0f} s {it.peak_mib:6.0f} MiB  {verdict}  "
            f"limit: {it.limit}  {it.found[-500:]}",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
