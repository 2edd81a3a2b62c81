"""`hvdtrain bench classic`: the multi-GPU table of textbooks, measured here and compared.

Three runs: one worker, two with the same global batch, and two with twice the batch and twice the
learning rate. Epoch times cover the training steps, as in the published table.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.data.builtin import FASHION_FOLDER, FILES
from hvdtrain.lab.bench.turns import HVDTRAIN, records, run_command, train_argv
from hvdtrain.log import counted

FASHION_MNIST, DIGITS = "fashion-mnist", "digits"


@dataclass(frozen=True)
class Setting:
    """A row of the table."""

    workers: int
    global_batch_size: int
    lr: float  # of SGD without momentum


SETTINGS = (Setting(1, 256, 0.1), Setting(2, 256, 0.1), Setting(2, 512, 0.2))


@dataclass(frozen=True)
class Published:
    """Published times, in seconds per epoch, in the order of SETTINGS."""

    name: str
    epoch_s: tuple[float, float, float]


# On Fashion-MNIST with one and two GPUs. These figures are quoted without a citable source. The
# nearest source found is d2l-ai/1day-notebooks of July 2019 (notebooks-3, two Tesla V100), with
# 13.2 s for the first setting and 7.3 s for the last one in Gluon.
PUBLISHED = (
    Published("Gluon, ResNet-18", (14.2, 10.2, 8.1)),
    Published("d2l, LeNet", (2.6, 2.6, 2.4)),
)


@dataclass(frozen=True)
class ClassicPlan:
    """Configuration of `hvdtrain bench classic`."""

    model: str
    data: str
    data_dir: str
    epochs: int
    rounds: int
    controller: str  # gloo or mpi
    time_limit_s: float  # of each run


@dataclass(frozen=True)
class ClassicResult:
    """The result of one run."""

    epoch_s: list[float]  # of each epoch
    accuracy: float  # on the validation data, at the end, from 0 to 1


Results = dict[Setting, list[ClassicResult]]


def data_that_is_there(data_dir: Path) -> str:
    """Return Fashion-MNIST where all of its files are present, else digits."""
    complete = all((data_dir / FASHION_FOLDER / name).is_file() for name in FILES)
    return FASHION_MNIST if complete else DIGITS


def measure(
    plan: ClassicPlan,
    run: Callable[[ClassicPlan, Setting, Path], ClassicResult],
    folder: Path,
    report: Callable[[str], None],
) -> Results:
    """Run all settings in turns; return results by setting and round. Raises ChildFailure."""
    results: Results = {setting: [] for setting in SETTINGS}
    for number in range(plan.rounds):
        order = list(enumerate(SETTINGS))
        for place, setting in order if number % 2 == 0 else reversed(order):
            own = folder / f"{number}-{place}"
            own.mkdir(mode=0o700)
            result = run(plan, setting, own)
            results[setting].append(result)
            report(
                f"round {number + 1}: {setting.workers} x {setting.global_batch_size}: "
                f"{epoch_time([result]):.3f} s an epoch, accuracy {result.accuracy:.4f}"
            )
    return results


def train(plan: ClassicPlan, setting: Setting, folder: Path) -> ClassicResult:
    """Run one setting under `hvdtrain launch`. Raises ChildFailure."""
    flags = ["--model", plan.model, "--data", plan.data, "--data-dir", plan.data_dir]
    flags += ["--global-batch-size", str(setting.global_batch_size), "--lr", str(setting.lr)]
    flags += ["--momentum", "0", "--epochs", str(plan.epochs), "--device", "cpu"]
    argv = [*HVDTRAIN, "launch", "-np", str(setting.workers), "--controller", plan.controller]
    argv += ["--", *train_argv(folder, flags)[len(HVDTRAIN) :]]
    run_command(argv, os.environ, folder, plan.time_limit_s)
    epochs = records(folder, "epoch")
    return ClassicResult(
        [epoch["samples"] / epoch["samples_per_s"] for epoch in epochs],
        epochs[-1]["valid_accuracy"],
    )


def epoch_time(results: list[ClassicResult]) -> float:
    """Return the median epoch in seconds, without the first of each run with several."""
    return statistics.median(
        seconds for result in results for seconds in result.epoch_s[1:] or result.epoch_s
    )


def table(plan: ClassicPlan, results: Results) -> str:
    """Return the table, one row per setting: our results and the published ones."""
    lines = [
        f"classic: {plan.model} on {plan.data}, {counted(plan.epochs, 'epoch')}, "
        f"{counted(plan.rounds, 'round')}, SGD "
        "without momentum, one compute thread each; seconds an epoch (median without the first), "
        "speed-up over one worker"
    ]
    before = f"{'workers':>9}{'batch':>7}{'lr':>6}"
    heads = [f"hvdtrain ({plan.controller})", *(found.name for found in PUBLISHED)]
    lines.append(before + f"{heads[0]:>26}" + "".join(f"{name:>22}" for name in heads[1:]))
    alone_s = epoch_time(results[SETTINGS[0]])
    for place, setting in enumerate(SETTINGS):
        own_s = epoch_time(results[setting])
        accuracy = statistics.median(result.accuracy for result in results[setting])
        line = f"{setting.workers:>9}{setting.global_batch_size:>7}{setting.lr:>6g}"
        line += f"{own_s:>10.3f}{alone_s / own_s:>6.2f}x{accuracy:>9.4f}"
        for found in PUBLISHED:
            line += f"{found.epoch_s[place]:>14.1f}{found.epoch_s[0] / found.epoch_s[place]:>7.2f}x"
        lines.append(line)
    lines.append(
        "  ours: seconds, speed-up, validation accuracy; the others' were published for GPUs, on "
        "Fashion-MNIST: compare speed-ups, not seconds"
    )
    return "\n".join(lines)


def as_json(plan: ClassicPlan, results: Results) -> dict[str, Any]:
    """Return all results, and the published ones."""
    alone_s = epoch_time(results[SETTINGS[0]])
    rows = [
        asdict(setting)
        | {
            "epoch_s": epoch_time(found),
            "speed_up": alone_s / epoch_time(found),
            "runs": [asdict(result) for result in found],
        }
        for setting, found in results.items()
    ]
    return {**asdict(plan), "rows": rows, "published": [asdict(found) for found in PUBLISHED]}
