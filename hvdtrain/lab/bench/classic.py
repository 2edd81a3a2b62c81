"""`hvdtrain bench classic`: the multi-GPU table of textbooks, measured here and compared.

For each model: one worker, and two with the same global batch; for LeNet also two with twice the
batch and twice the learning rate. Epoch times cover the training steps, as in the published tables.
"""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.data.builtin import fashion_files
from hvdtrain.evidence.children import run_command
from hvdtrain.lab.bench import jobs, rounds
from hvdtrain.lab.findings import Findings, publish
from hvdtrain.log import counted, say
from hvdtrain.report import charts
from hvdtrain.report.charts import Plot


@dataclass(frozen=True)
class ClassicCase:
    """A row of the table."""

    model: str
    workers: int
    global_batch_size: int
    lr: float  # of SGD without momentum
    epochs: int

    @property
    def key(self) -> tuple[str, int, int]:
        """Return the key of published results."""
        return self.model, self.workers, self.global_batch_size

    def __str__(self) -> str:
        return f"{self.model}, {self.workers} x {self.global_batch_size}"


SETTINGS = (
    ClassicCase("lenet", 1, 256, 0.2, epochs=5),
    ClassicCase("lenet", 2, 256, 0.2, epochs=5),
    ClassicCase("lenet", 2, 512, 0.4, epochs=5),
    ClassicCase("resnet18-small", 1, 256, 0.1, epochs=1),
    ClassicCase("resnet18-small", 2, 256, 0.1, epochs=1),
)


class Published(NamedTuple):
    """A published result on Fashion-MNIST with one or two GPUs."""

    epoch_s: float
    accuracy: float | None = None  # at the end; None: not published

    def __str__(self) -> str:
        return f"{self.epoch_s:.1f}" + ("" if self.accuracy is None else f", {self.accuracy:.2f}")


# d2l-ai/1day-notebooks, of July 2019, notebooks-3/2-multiple-gpus.ipynb (LeNet from scratch,
# learning rate 0.2) and 3-multiple-gpus-gluon.ipynb (ResNet-18): 10 epochs on Tesla V100, whose
# last test accuracy and mean seconds per epoch are printed there.
NOTEBOOKS = {
    ("lenet", 1, 256): Published(1.8, 0.80),
    ("lenet", 2, 256): Published(2.5, 0.84),
    ("resnet18-small", 1, 256): Published(13.2, 0.93),
    ("resnet18-small", 2, 512): Published(7.3, 0.92),
}
# Quoted without a source that could be found: d2l's LeNet and Gluon's ResNet-18.
QUOTED = {
    ("lenet", 1, 256): Published(2.6),
    ("lenet", 2, 256): Published(2.6),
    ("lenet", 2, 512): Published(2.4),
    ("resnet18-small", 1, 256): Published(14.2),
    ("resnet18-small", 2, 256): Published(10.2),
    ("resnet18-small", 2, 512): Published(8.1),
}
QUOTED_ACCURACIES = "0.893 to 0.917"  # of Gluon's ResNet-18, after 5 epochs


@dataclass(frozen=True)
class ClassicPlan:
    """Configuration of `hvdtrain bench classic`."""

    model: str | None  # None: all
    data: str
    data_dir: str
    epochs: int | None  # None: those of each setting
    rounds: int
    controller: str  # gloo or mpi
    time_limit_s: float  # of each run

    @property
    def settings(self) -> list[ClassicCase]:
        """Return the rows to measure."""
        return [
            replace(case, epochs=self.epochs or case.epochs)
            for case in SETTINGS
            if self.model in (None, case.model)
        ]


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
        results = rounds.measure(plan.settings, plan.rounds, partial(train, plan), folder, say)
    return publish(
        Findings([table(plan, results)], as_json(plan, results), [draw_classic(plan, results)]),
        arguments,
    )


def data_that_is_there(data_dir: Path) -> str:
    """Return Fashion-MNIST where all of its files are present, else digits."""
    return "digits" if fashion_files(data_dir)[1] else "fashion-mnist"


def train(plan: ClassicPlan, setting: ClassicCase, folder: Path) -> ClassicResult:
    """Run one setting under `hvdtrain launch`. Raises ChildFailure."""
    downloaded = plan.data == "fashion-mnist"
    flags = (
        *("--model", setting.model, "--data", plan.data),
        *(("--data-dir", plan.data_dir) if downloaded else ()),
        *("--global-batch-size", str(setting.global_batch_size), "--lr", str(setting.lr)),
        *("--momentum", "0", "--epochs", str(setting.epochs), "--device", "cpu"),
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


def speed_ups(results: Results) -> dict[ClassicCase, float]:
    """Return the epoch time of one worker with the same model over that of each setting."""
    alone_s = {case.model: epoch_time(runs) for case, runs in results.items() if case.workers == 1}
    return {case: alone_s[case.model] / epoch_time(runs) for case, runs in results.items()}


def table(plan: ClassicPlan, results: Results) -> str:
    """Return the table, one row per setting: our results and the published ones."""
    rows = [["model", "workers", "batch", "lr", "epochs", "seconds", "speed-up", "accuracy"]]
    rows[0] += ["notebooks", "quoted"]
    factors = speed_ups(results)
    for case, runs in results.items():
        accuracy = statistics.median(result.accuracy for result in runs)
        row = [case.model, str(case.workers), str(case.global_batch_size), f"{case.lr:g}"]
        row += [str(case.epochs), f"{epoch_time(runs):.3f}", f"{factors[case]:.2f}x"]
        row += [f"{accuracy:.4f}", *(str(one.get(case.key, "-")) for one in (NOTEBOOKS, QUOTED))]
        rows.append(row)
    head = (
        f"classic: {plan.data}, {counted(plan.rounds, 'round')}, {plan.controller}, SGD without "
        "momentum, on CPUs, one compute thread each; seconds an epoch (median, without the first "
        "where there are several), speed-up over one worker, validation accuracy at the end"
    )
    on_two = NOTEBOOKS["resnet18-small", 2, 512]
    foot = (
        "  published for GPUs, on Fashion-MNIST: seconds an epoch, and accuracy after 10 epochs "
        "(compare speed-ups, not seconds)\n"
        "  notebooks: github.com/d2l-ai/1day-notebooks, LeNet from scratch and Gluon's ResNet-18; "
        f"its two GPUs with batch 512: {on_two}\n"
        "  quoted: d2l's LeNet and Gluon's ResNet-18, without a source that could be found; the "
        f"accuracies quoted for Gluon are {QUOTED_ACCURACIES}"
    )
    return "\n".join([head, *rounds.columns(rows), foot])


def as_json(plan: ClassicPlan, results: Results) -> dict[str, Any]:
    """Return all results, and the published ones."""
    factors = speed_ups(results)
    rows = [
        asdict(setting)
        | {
            "epoch_s": epoch_time(runs),
            "speed_up": factors[setting],
            "runs": [asdict(result) for result in runs],
        }
        for setting, runs in results.items()
    ]
    published = [
        {"name": name, "model": model, "workers": workers, "global_batch_size": batch}
        | one._asdict()
        for name, others in (("notebooks", NOTEBOOKS), ("quoted", QUOTED))
        for (model, workers, batch), one in others.items()
    ]
    return {**asdict(plan), "rows": rows, "published": published}


def draw_classic(plan: ClassicPlan, results: Results) -> Plot:
    """Plot our speed-ups over one worker and the published ones."""
    cases = list(results)
    ours: list[float | None] = [*speed_ups(results).values()]
    series = {f"hvdtrain, {plan.data}": ours}
    for name, others in (("notebooks, two GPUs", NOTEBOOKS), ("quoted, two GPUs", QUOTED)):
        series[name] = [
            others[case.model, 1, 256].epoch_s / others[case.key].epoch_s
            if case.key in others
            else None
            for case in cases
        ]
    figure = charts.new_figure()
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    for number, (factors, colour) in enumerate(zip(series.values(), charts.PALETTE, strict=False)):
        first = (number - (len(series) - 1) / 2) * width
        there = {first + i: factor for i, factor in enumerate(factors) if factor is not None}
        bars = axes.bar(list(there), list(there.values()), width * 0.9, color=colour)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    titles = [
        f"{case.model}\n{counted(case.workers, 'worker')}\nbatch {case.global_batch_size}"
        for case in cases
    ]
    axes.set_xticks(range(len(cases)), titles, fontsize=8)
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
