"""`hvdtrain bench classic`: the multi-GPU table of textbooks, measured here and compared.

Three runs: one worker, two with the same global batch, and two with twice the batch and twice the
learning rate. Epoch times cover the training steps, as in the published table.
"""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.data.builtin import FASHION_FOLDER, FILES
from hvdtrain.evidence.children import run_command
from hvdtrain.lab.bench import jobs, rounds
from hvdtrain.lab.findings import Findings, publish
from hvdtrain.log import counted, say
from hvdtrain.report import charts
from hvdtrain.report.charts import Plot


@dataclass(frozen=True)
class ClassicCase:
    """A row of the table."""

    workers: int
    global_batch_size: int
    lr: float  # of SGD without momentum

    def __str__(self) -> str:
        return f"{self.workers} x {self.global_batch_size}"


SETTINGS = (ClassicCase(1, 256, 0.1), ClassicCase(2, 256, 0.1), ClassicCase(2, 512, 0.2))
# Published seconds per epoch, in the order of SETTINGS, on Fashion-MNIST with one and two GPUs.
# These figures are quoted without a citable source. The nearest source found is
# d2l-ai/1day-notebooks of July 2019 (notebooks-3, two Tesla V100), with 13.2 s for the first
# setting and 7.3 s for the last one in Gluon.
PUBLISHED = {"Gluon, ResNet-18": (14.2, 10.2, 8.1), "d2l, LeNet": (2.6, 2.6, 2.4)}


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

    def __str__(self) -> str:
        return f"{epoch_time([self]):.3f} s an epoch, accuracy {self.accuracy:.4f}"


Results = dict[ClassicCase, list[ClassicResult]]


def run(arguments: dict[str, Any]) -> int:
    """Run all settings, one after the other; return the exit code. Raises TrainingError."""
    data = arguments["data"] or data_that_is_there(Path(arguments["data_dir"]))
    plan = rounds.plan_of(ClassicPlan, arguments | {"data": data})
    with rounds.scratch_folder("classic") as folder:
        results = rounds.measure(SETTINGS, plan.rounds, partial(train, plan), folder, say)
    return publish(
        Findings([table(plan, results)], as_json(plan, results), [draw_classic(plan, results)]),
        arguments,
    )


def data_that_is_there(data_dir: Path) -> str:
    """Return Fashion-MNIST where all of its files are present, else digits."""
    complete = all((data_dir / FASHION_FOLDER / name).is_file() for name in FILES)
    return "fashion-mnist" if complete else "digits"


def train(plan: ClassicPlan, setting: ClassicCase, folder: Path) -> ClassicResult:
    """Run one setting under `hvdtrain launch`. Raises ChildFailure."""
    downloaded = plan.data == "fashion-mnist"
    flags = (
        *("--model", plan.model, "--data", plan.data),
        *(("--data-dir", plan.data_dir) if downloaded else ()),
        *("--global-batch-size", str(setting.global_batch_size), "--lr", str(setting.lr)),
        *("--momentum", "0", "--epochs", str(plan.epochs), "--device", "cpu"),
    )
    argv = jobs.launch_argv(setting.workers, plan.controller, jobs.train_argv(folder, flags))
    run_command(argv, os.environ, folder, plan.time_limit_s)
    records = map(json.loads, jobs.log_of(folder).read_text("utf-8").splitlines())
    epochs = [record for record in records if record["kind"] == "epoch"]
    return ClassicResult(
        [epoch["samples"] / epoch["samples_per_s"] for epoch in epochs],
        epochs[-1]["valid_accuracy"],
    )


def epoch_time(results: Sequence[ClassicResult]) -> float:
    """Return the median epoch in seconds, without the first of each run with several."""
    return statistics.median(
        seconds for result in results for seconds in result.epoch_s[1:] or result.epoch_s
    )


def table(plan: ClassicPlan, results: Results) -> str:
    """Return the table, one row per setting: our results and the published ones."""
    ours_s = [epoch_time(results[setting]) for setting in SETTINGS]
    rows = [["workers", "batch", "lr", f"hvdtrain ({plan.controller})", "speed-up", "accuracy"]]
    rows[0] += [heading for name in PUBLISHED for heading in (name, "speed-up")]
    for index, setting in enumerate(SETTINGS):
        accuracy = statistics.median(result.accuracy for result in results[setting])
        row = [str(setting.workers), str(setting.global_batch_size), f"{setting.lr:g}"]
        row += [f"{ours_s[index]:.3f}", f"{ours_s[0] / ours_s[index]:.2f}x", f"{accuracy:.4f}"]
        for epoch_s in PUBLISHED.values():
            row += [f"{epoch_s[index]:.1f}", f"{epoch_s[0] / epoch_s[index]:.2f}x"]
        rows.append(row)
    head = (
        f"classic: {plan.model} on {plan.data}, {counted(plan.epochs, 'epoch')}, "
        f"{counted(plan.rounds, 'round')}, SGD without momentum, on CPUs, one compute thread each; "
        "seconds an epoch (median without the first), speed-up over one worker"
    )
    foot = (
        "  ours: seconds, speed-up, validation accuracy; the others' were published for GPUs, on "
        "Fashion-MNIST: compare speed-ups, not seconds"
    )
    return "\n".join([head, *rounds.columns(rows), foot])


def as_json(plan: ClassicPlan, results: Results) -> dict[str, Any]:
    """Return all results, and the published ones."""
    alone_s = epoch_time(results[SETTINGS[0]])
    rows = [
        asdict(setting)
        | {
            "epoch_s": epoch_time(runs),
            "speed_up": alone_s / epoch_time(runs),
            "runs": [asdict(result) for result in runs],
        }
        for setting, runs in results.items()
    ]
    return {
        **asdict(plan),
        "rows": rows,
        "published": [{"name": name, "epoch_s": epoch_s} for name, epoch_s in PUBLISHED.items()],
    }


def draw_classic(plan: ClassicPlan, results: Results) -> Plot:
    """Plot our speed-ups over one worker and the published ones."""
    ours_s = tuple(epoch_time(results[setting]) for setting in SETTINGS)
    series = {f"hvdtrain, {plan.model} on {plan.data}": ours_s}
    series |= {f"{name}, published": epoch_s for name, epoch_s in PUBLISHED.items()}
    figure = charts.new_figure()
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    for number, (seconds, colour) in enumerate(zip(series.values(), charts.PALETTE, strict=False)):
        first = (number - (len(series) - 1) / 2) * width
        factors = [seconds[0] / value for value in seconds]
        x = [first + index for index in range(len(seconds))]
        axes.bar_label(axes.bar(x, factors, width * 0.9, color=colour), fmt="%.2f", fontsize=8)
    titles = [
        f"{counted(s.workers, 'worker')}\nbatch {s.global_batch_size}, lr {s.lr}" for s in SETTINGS
    ]
    axes.set_xticks(range(len(SETTINGS)), titles)
    charts.set_title(axes, "Speed-up")
    axes.set_ylabel("epoch time of one worker / epoch time")
    axes.spines[["top", "right"]].set_visible(False)
    charts.name_colours(figure, dict(zip(series, charts.PALETTE, strict=False)), fontsize=8)
    return Plot(
        name="classic",
        title="Classic table",
        caption="Epoch time of one worker over that of each setting; the published ones on GPUs.",
        figure=figure,
    )
