"""`hvdtrain bench peers`: one training by several systems, each in its usual form.

Each run is a start of its own: the systems follow one another, in rounds of alternating order, and
ratios are taken within a round. The scripts are in hvdtrain/lab/peers.
"""

import ast
import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.lines import Line2D

from hvdtrain.errors import Stopped
from hvdtrain.evidence.children import ChildFailure
from hvdtrain.lab.bench import rounds
from hvdtrain.lab.bench.peer_runs import (
    OURS,
    SAME,
    SYSTEMS,
    PeerRun,
    run_peer,
    write_images,
)
from hvdtrain.lab.bench.rounds import Ratio, ratio_within_rounds
from hvdtrain.lab.findings import Findings, publish
from hvdtrain.lab.peers.same_work import CHECKED_STEPS, PeerWork
from hvdtrain.log import counted, duration, say
from hvdtrain.report import charts
from hvdtrain.report.charts import Plot

IMAGES = "images"
WITHOUT_IMAGES = "gpt"
OPERATORS = "import torchvision_operators"
STEPS = {"lenet": 120, "mlp": 120, "resnet18-small": 24, "gpt": 60}
HEADINGS = ["", "samples/s", "first step, s", "peak, MiB", "lines", "weights"]
COLOURS = dict(zip(OURS, charts.PALETTE, strict=False))
TITLES = {name: system.title for name, system in SYSTEMS.items()}


@dataclass(frozen=True)
class PeersPlan:
    """Configuration of `hvdtrain bench peers`."""

    models: Mapping[str, int]  # samples per worker, by model
    data: tuple[str, ...]  # kinds: memory, images
    systems: tuple[str, ...]
    workers: int
    readers: int  # of images, for each worker
    steps: int | None  # None: by model
    rounds: int
    controller: str  # gloo or mpi, of those on Horovod
    time_limit_s: float  # of each run

    def cases(self) -> list[tuple[str, str]]:
        """Return the pairs of model and kind of data."""
        pairs = itertools.product(self.models, self.data)
        return [pair for pair in pairs if pair != (WITHOUT_IMAGES, IMAGES)]


@dataclass
class PeerCase:
    """A model on a kind of data, with the runs of each system; None: failed."""

    model: str
    data: str
    batch_size: int  # of a worker
    steps: int
    runs: dict[str, list[PeerRun | None]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model}, {self.data}"

    def speeds(self, name: str) -> list[float]:
        """Return the samples/s of a system by round; NaN: failed."""
        return [run.samples_per_s if run else nan for run in self.runs[name]]

    def ratios(self) -> dict[str, dict[str, Ratio | None]]:
        """Return our speeds over those of each peer, by our system and the peer."""
        return {
            ours: {
                name: ratio_within_rounds(self.speeds(ours), self.speeds(name))
                for name in self.runs
                if name not in OURS
            }
            for ours in OURS
            if ours in self.runs
        }


@dataclass
class PeerResults:
    """What was measured, until a signal ended it."""

    cases: list[PeerCase] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    stopped: Stopped | None = None

    def note(self, problem: str) -> None:
        """Report a problem at once, and in the end."""
        self.problems.append(problem)
        say(problem)


def run(arguments: dict[str, Any]) -> int:
    """Measure all cases; return the exit code, 1 where a run has failed or learned another thing.

    Systems that are not installed are named, and left out.
    """
    plan = rounds.plan_of(PeersPlan, arguments)
    systems = [name for name in plan.systems if SYSTEMS[name].is_installed]
    left_out = {name: SYSTEMS[name].package for name in plan.systems if name not in systems}
    for name, package in left_out.items():
        say(f"{TITLES[name]} is left out: {package} is not installed")
    for packages in [SYSTEMS[name].packages for name in systems]:
        if packages:
            packages()  # are built before anything is measured
    results = PeerResults()
    with rounds.scratch_folder("peers") as folder:
        try:
            for number, pair in enumerate(plan.cases()):
                measure_case(plan, pair, systems, folder / str(number), results)
        except Stopped as stopped:
            results.stopped = stopped
            results.note(f"{stopped}: {len(results.cases)} of {len(plan.cases())} cases are whole")
    tables = [_head(plan, left_out), *map(table, results.cases)]
    ratios = [case.ratios() for case in results.cases]
    tables += rounds.advice(
        r for of_case in ratios for each in of_case.values() for r in each.values()
    )
    content = {
        **asdict(plan),
        "left_out": left_out,
        "lines": {name: lines_of(SYSTEMS[name].path) for name in systems},
        "cases": [
            asdict(case) | {"ratios": {n: _plain(r) for n, r in of_case.items()}}
            for case, of_case in zip(results.cases, ratios, strict=True)
        ],
        "problems": results.problems,
    }
    plots = [draw(results.cases)] if any(map(any, ratios)) else []
    findings = Findings(tables, content, plots, results.problems, results.stopped)
    return publish(findings, arguments)


def _plain(ratios: Mapping[str, Ratio | None]) -> dict[str, Any]:
    return {name: over and asdict(over) for name, over in ratios.items()}


def measure_case(
    plan: PeersPlan,
    pair: tuple[str, str],
    systems: Sequence[str],
    folder: Path,
    results: PeerResults,
) -> None:
    """Run all systems in rounds, and add the case to the results once it is whole.

    A system that fails is left out from then on.
    """
    model, kind = pair
    case = PeerCase(model, kind, plan.models[model], plan.steps or STEPS[model])
    images = folder / IMAGES if kind == IMAGES else None
    work = PeerWork(
        model=model,
        images=str(images or ""),
        readers=plan.readers if images else 0,
        batch_size=case.batch_size,
        workers=plan.workers,
        steps=case.steps,
        folder=str(folder / "run"),
    )
    folder.mkdir(mode=0o700)
    if images:
        write_images(images, work.samples)
    case.runs = {name: [] for name in systems}
    began_s = time.monotonic()
    for number in range(plan.rounds):
        for name in rounds.in_turn(systems, number):
            case.runs[name].append(_run(plan, case, name, work, results))
    results.cases.append(case)
    say(f"{case}: {counted(plan.rounds, 'round')} in {duration(time.monotonic() - began_s)}")
    shutil.rmtree(folder)


def _run(
    plan: PeersPlan, case: PeerCase, name: str, work: PeerWork, results: PeerResults
) -> PeerRun | None:
    """Return a run; None if it fails, as the one before did."""
    if None in case.runs[name]:
        return None
    folder = Path(work.folder)
    folder.mkdir(mode=0o700)
    try:
        done = run_peer(SYSTEMS[name], work, plan.controller, plan.time_limit_s)
    except ChildFailure as failure:
        results.note(f"{case}: {TITLES[name]}: {failure}")
        return None
    finally:
        shutil.rmtree(folder)
    say(f"{case}: {TITLES[name]}: {done}")
    if done.difference is not None and not done.difference <= SAME:
        results.note(
            f"{case}: {TITLES[name]}: after {CHECKED_STEPS} steps its weights differ from those of "
            f"one process by {done.difference:.1e} of what they have learned"
        )
    return done


def lines_of(script: Path) -> int:
    """Return the lines of a script without empty ones, comments, docstrings, and the import that
    only some environments need.
    """
    text = script.read_text("utf-8")
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = [line.strip() for n, line in enumerate(text.splitlines(), 1) if n not in left_out]
    return sum(bool(line) and line[0] != "#" and OPERATORS not in line for line in lines)


def _head(plan: PeersPlan, left_out: Mapping[str, str]) -> str:
    """Return what the tables are of."""
    lines = [
        f"peers: {counted(plan.workers, 'worker')} on CPUs, one compute thread each; those on "
        f"Horovod over {plan.controller}, others over gloo; medians of "
        f"{counted(plan.rounds, 'round')} in turns. weights: largest difference from one process "
        f"after {CHECKED_STEPS} steps, as a part of what they have learned"
    ]
    names = ", ".join(f"{TITLES[name]} ({package})" for name, package in left_out.items())
    return "\n".join([*lines, *([f"  not installed, and left out: {names}"] if names else [])])


def table(case: PeerCase) -> str:
    """Return the table of a case: a row for each system, with our speeds over its own."""
    ratios = case.ratios()
    over = [f"{TITLES[ours]} / it (middle half)" for ours in ratios]
    rows = [[*HEADINGS, *over]]
    for name, every in case.runs.items():
        runs = [run for run in every if run]
        cells = _cells(runs) if runs else ["failed", "-", "-"]
        apart = [run.difference for run in runs if run.difference is not None]
        rows.append(
            [
                *(TITLES[name], *cells, str(lines_of(SYSTEMS[name].path))),
                f"{max(apart):.0e}" if apart else "-",
                *(rounds.ratio_and_spread(each.get(name)) for each in ratios.values()),
            ]
        )
    what = f"{case}: {counted(case.batch_size, 'sample')} a worker, {counted(case.steps, 'step')}"
    return "\n".join([what, *rounds.columns(rows)])


def _cells(runs: Sequence[PeerRun]) -> list[str]:
    return [
        f"{median(run.samples_per_s for run in runs):,.0f}",
        f"{median(run.first_step_s for run in runs):.1f}",
        f"{median(run.peak_bytes for run in runs) / 2**20:,.0f}",
    ]


def draw(cases: Sequence[PeerCase]) -> Plot:
    """Plot a row for each peer in each case: our speeds over its own, as dots and medians."""
    rows = [(case, name) for case in cases for name in case.runs if name not in OURS]
    figure = charts.new_figure(charts.WIDTH, 1.3 + charts.ROW_HEIGHT * len(rows))
    axes = figure.add_subplot()
    shown = [ours for ours in OURS if ours in cases[0].runs]
    for row, (case, name) in enumerate(rows):
        for ours, offset in zip(shown, (-0.16, 0.16), strict=False):
            pairs = zip(case.speeds(ours), case.speeds(name), strict=True)
            values = [speed / theirs for speed, theirs in pairs]
            at, colour = row + offset, COLOURS[ours]
            axes.scatter(values, [at] * len(values), s=16, color=colour, alpha=0.55, linewidth=0)
            if over := case.ratios()[ours][name]:
                axes.vlines(over.median, at - 0.14, at + 0.14, colour, linewidth=2.4)
    axes.axvline(1, color="black", linewidth=0.8)
    labels = [f"{case}: {TITLES[name]}" for case, name in rows]
    charts.dress_rows(axes, "Our speed", labels, "as a multiple of theirs, within rounds")
    handles = [Line2D([], [], color=COLOURS[ours], linewidth=2.4) for ours in shown]
    charts.legend_below(figure, handles, [TITLES[ours] for ours in shown])
    return Plot(
        name="peers",
        title="Peers",
        caption="Ratios of all rounds, and their medians.",
        figure=figure,
    )
