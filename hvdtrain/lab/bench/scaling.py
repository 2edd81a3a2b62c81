"""`hvdtrain bench scaling`: samples/s on N workers, compared with DDP and the machine's limit.

For each model and N the three run concurrently and compute in short turns (see
hvdtrain/lab/bench/turns.py); the ratios within a round of turns are compared.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, StrMethodFormatter

from hvdtrain.data.builtin import read_spec
from hvdtrain.errors import UsageError, refuse
from hvdtrain.lab.bench import contestants, rounds
from hvdtrain.lab.bench.contestants import CONTESTANTS, DDP, LIMIT, OURS, ScalingCase
from hvdtrain.lab.bench.rounds import Ratio, median, ratio_within_rounds
from hvdtrain.lab.bench.turns import cpu_table, measure_cases
from hvdtrain.lab.findings import publish
from hvdtrain.lab.systems.process import start_fork_server
from hvdtrain.log import counted, say
from hvdtrain.models import build_model
from hvdtrain.report import charts
from hvdtrain.report.charts import Plot

WEAK = "weak"
LEAST_SHARE = 2  # samples per worker, the fewest for batch norm statistics
LOG_INTERVALS = {"lenet": 10, "mlp": 10}  # steps, of a twentieth of a second
OTHER_LOG_INTERVAL = 2
LEAST_STEPS = 1000  # in the epoch that contains all turns
HEADINGS = (
    *("model", "N", "samples a step"),
    *(f"{name}/s" for name in CONTESTANTS),
    *(f"{OURS} / {name} (middle half)" for name in (DDP, LIMIT)),
    *("efficiency", f"{DDP}'s", f"{LIMIT}'s"),
)
PANEL_HEIGHT, PANEL_MARGIN = 2.7, 0.7  # inches
COLOURS = dict(zip(CONTESTANTS, (*charts.PALETTE[:2], charts.GREY), strict=True))
STYLES: dict[str, dict[str, Any]] = {
    name: {"color": COLOURS[name], "marker": marker, "linewidth": 1.8}
    for name, marker in zip(CONTESTANTS, ("o", "s", "^"), strict=True)
}
IDEAL: dict[str, Any] = {"color": charts.GREY, "linestyle": (0, (1, 1.5)), "linewidth": 1.2}


@dataclass(frozen=True)
class ScalingPlan:
    """Configuration of `hvdtrain bench scaling`."""

    models: Mapping[str, int]  # samples per worker, by model
    workers: tuple[int, ...]
    modes: tuple[str, ...]
    rounds: int
    turn_s: float
    controller: str  # gloo or mpi
    time_limit_s: float  # of each case

    def case(self, mode: str, model: str, workers: int) -> ScalingCase:
        """Return the case of a mode: weak scaling keeps the samples per worker, strong scaling the
        global batch, which is that of the most workers, so that both modes coincide there.
        """
        shares = workers if mode == WEAK else max(self.workers)
        log_interval = LOG_INTERVALS.get(model, OTHER_LOG_INTERVAL)
        return ScalingCase(model, workers, self.models[model] * shares, log_interval)

    def cases(self) -> list[ScalingCase]:
        """Return all cases without duplicates, in the order of running."""
        keys = itertools.product(self.models, self.modes, self.workers)
        return list(dict.fromkeys(self.case(mode, model, workers) for model, mode, workers in keys))


Rates = dict[ScalingCase, dict[str, list[float]]]  # samples/s by contestant and round; NaN: failed


def run(arguments: dict[str, Any]) -> int:
    """Measure all cases, in turns; return the exit code, 1 where some have failed."""
    plan = rounds.plan_of(ScalingPlan, arguments)
    with rounds.scratch_folder("scaling") as folder:
        examine(plan.models, plan.cases())
        start_fork_server()
        results = measure_cases(
            plan.cases(),
            CONTESTANTS,
            partial(contestants.start, controller=plan.controller, time_limit_s=plan.time_limit_s),
            rounds=plan.rounds,
            turn_s=plan.turn_s,
            folder=folder,
            report=say,
        )
    points = points_of(plan, results.rates)
    cpu = cpu_table(results, lambda case: (case.global_batch_size, case.workers))
    plots = draw_plots(plan, results.rates, points)
    return publish(results.findings([table(plan, points), cpu], plan, points, plots), arguments)


def examine(models: Iterable[str], cases: Sequence[ScalingCase]) -> None:
    """Raise UsageError for models that cannot be built, and batches too large or too small."""
    problems: list[str] = []
    shape, classes, _ = read_spec(contestants.DATA)
    for model in models:
        try:
            build_model(model, shape, classes, torch.float32)
        except UsageError as error:
            problems += [problem.replace("--model=", "--models=") for problem in error.problems]
    for case in cases:
        if case.steps < LEAST_STEPS:
            problems.append(f"{case}: too many. Lower --batch-size")
        if case.global_batch_size < case.workers * LEAST_SHARE:
            problems.append(f"{case}: less than {LEAST_SHARE} a worker. Raise --batch-size")
    refuse(problems)


@dataclass(frozen=True)
class ScalingPoint:
    """The results for one mode, model and number of workers."""

    mode: str
    case: ScalingCase
    samples_per_s: dict[str, float | None]  # medians by contestant; None: all failed
    over_ddp: Ratio | None  # our speed over theirs, within rounds
    over_limit: Ratio | None
    efficiency: dict[str, float | None]  # speed over N times that of one worker; None: unknown


def points_of(plan: ScalingPlan, rates: Rates) -> list[ScalingPoint]:
    """Return the points by mode, model and workers; a case may belong to both modes."""
    keys = itertools.product(plan.modes, plan.models, plan.workers)
    return [_point(plan, rates, *key) for key in keys if plan.case(*key) in rates]


def _point(plan: ScalingPlan, rates: Rates, mode: str, model: str, workers: int) -> ScalingPoint:
    case = plan.case(mode, model, workers)
    case_rates, alone = rates[case], rates.get(plan.case(mode, model, 1), {})
    speed = {name: median(case_rates[name]) for name in CONTESTANTS}
    bases = [median(alone.get(name, [])) for name in CONTESTANTS]
    return ScalingPoint(
        mode=mode,
        case=case,
        samples_per_s=speed,
        over_ddp=ratio_within_rounds(case_rates[OURS], case_rates[DDP]),
        over_limit=ratio_within_rounds(case_rates[OURS], case_rates[LIMIT]),
        efficiency={
            name: rate / (workers * base) if rate and base else None
            for (name, rate), base in zip(speed.items(), bases, strict=True)
        },
    )


def table(plan: ScalingPlan, points: Sequence[ScalingPoint]) -> str:
    """Return the table, in one part for each mode."""
    lines = [
        f"scaling: samples/s in the median of {counted(plan.rounds, 'round')} of turns; hvdtrain "
        f"on {plan.controller}, DDP on gloo, on CPUs, one compute thread each; limit: as many "
        "processes at once, without exchange"
    ]
    for mode in plan.modes:
        kept = "samples a worker" if mode == WEAK else "samples a step over all workers"
        lines.append(f"{mode} scaling, the same {kept}:")
        rows = [_cells(point) for point in points if point.mode == mode]
        lines += rounds.columns([HEADINGS, *rows])
    ratios = [over for point in points for over in (point.over_ddp, point.over_limit)]
    return "\n".join([*lines, *rounds.advice(ratios)])


def _cells(point: ScalingPoint) -> list[str]:
    rates = [point.samples_per_s[name] for name in CONTESTANTS]
    shares = [point.efficiency[name] for name in CONTESTANTS]
    return [
        *map(str, (point.case.model, point.case.workers, point.case.global_batch_size)),
        *("-" if rate is None else f"{rate:,.0f}" for rate in rates),
        *map(rounds.ratio_and_spread, (point.over_ddp, point.over_limit)),
        *("-" if share is None else f"{share:.2f}" for share in shares),
    ]


def draw_plots(plan: ScalingPlan, rates: Rates, points: Sequence[ScalingPoint]) -> list[Plot]:
    """Return the plots of all points that have results."""
    done = [point for point in points if point.samples_per_s[OURS]]
    return [_draw_speed(plan, done), _draw_ratios(plan, rates, done)] if done else []


def _draw_speed(plan: ScalingPlan, points: Sequence[ScalingPoint]) -> Plot:
    """Plot samples/s over N, one row per mode and one column per model."""
    models = list(dict.fromkeys(point.case.model for point in points))
    width = charts.WIDTH * max(1, len(models) / 2)
    figure = charts.new_figure(width, PANEL_MARGIN + PANEL_HEIGHT * len(plan.modes))
    panels = figure.subplots(len(plan.modes), len(models), squeeze=False)
    for row, mode in zip(panels, plan.modes, strict=True):
        for axes, model in zip(row, models, strict=True):
            panel_points = [
                point for point in points if (point.mode, point.case.model) == (mode, model)
            ]
            _draw_panel(axes, f"{model}, {mode}", panel_points)
    handles = [Line2D([], [], **style) for style in (*STYLES.values(), IDEAL)]
    labels = [OURS, DDP, f"{LIMIT} of this machine", "N times one process alone"]
    charts.legend_below(figure, handles, labels, fontsize=8)
    return Plot(
        name="scaling",
        title="Scaling",
        caption=(
            "Samples per second over all workers, medians. Weak: the same samples a worker; "
            "strong: the same global batch. The limit: as many processes at the same time, without "
            "exchange."
        ),
        figure=figure,
    )


def _draw_panel(axes: Axes, title: str, points: Sequence[ScalingPoint]) -> None:
    counts = [point.case.workers for point in points]
    charts.dress(axes, title, "samples/s", "workers")
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if alone := next((p.samples_per_s[LIMIT] for p in points if p.case.workers == 1), None):
        axes.plot(counts, [alone * count for count in counts], **IDEAL)
    for name, style in STYLES.items():
        axes.plot(counts, [point.samples_per_s[name] or math.nan for point in points], **style)
    axes.margins(x=0.12, y=0.1)
    axes.set_ylim(bottom=0)


def _draw_ratios(plan: ScalingPlan, rates: Rates, points: Sequence[ScalingPoint]) -> Plot:
    """Plot one row per point: the ratios of all rounds as dots, their medians as lines."""
    figure = charts.new_figure(charts.WIDTH, 1.3 + charts.ROW_HEIGHT * len(points))
    axes = figure.add_subplot()
    for row, point in enumerate(points):
        case_rates = rates[point.case]
        for other, over, at in (
            (DDP, point.over_ddp, row - 0.16),
            (LIMIT, point.over_limit, row + 0.16),
        ):
            values = [a / b for a, b in zip(case_rates[OURS], case_rates[other], strict=True)]
            ats = [at] * len(values)
            axes.scatter(values, ats, s=16, color=COLOURS[other], alpha=0.55, linewidth=0)
            if over:
                axes.vlines(over.median, at - 0.14, at + 0.14, COLOURS[other], linewidth=2.4)
    labels = [f"{p.case.model}, {p.mode}, N = {p.case.workers}" for p in points]
    axes.axvline(1, color="black", linewidth=0.8)
    x_label = "as a multiple of the other's, within rounds"
    charts.dress_rows(axes, "hvdtrain's speed", labels, x_label)
    handles = [Line2D([], [], color=COLOURS[name], linewidth=2.4) for name in (DDP, LIMIT)]
    charts.legend_below(figure, handles, [f"of {DDP}'s", f"of the {LIMIT}"])
    return Plot(
        name="ratios",
        title="Ratios",
        caption=f"Ratios of {counted(plan.rounds, 'round')}, and their medians.",
        figure=figure,
    )
