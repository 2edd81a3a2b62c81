"""The setting of a comparison, and its rows: the results of each system, also as text.

A row is merged over the processes of its system, and compared with the row of `single`.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from hvdtrain.evidence.children import Result
from hvdtrain.lab.systems import ORACLE as SINGLE
from hvdtrain.lab.systems.contract import Spec, Strategy, SystemOptions, Traffic
from hvdtrain.log import counted
from hvdtrain.train.clock import PHASES

# Relative to each tensor's largest value, in float64. One exchange rounds by about 1e-16; training
# may amplify that from step to step and stays far below this tolerance, while a wrong weight or a
# missing sample changes the leading digits.
TOLERANCE = 1e-9
SAME = 1.05  # ratio up to which the traffic of ranks counts as equal

Weights = dict[str, list[NDArray[np.floating]]]  # by name, one array per process that holds it

# Values of `Row.status`.
ORACLE = "oracle"
AGREES = "agrees"
DISAGREES = "DISAGREES"
REPORTED = "not judged"
FAILED = "failed"

MB = 1e6
# Heading, and format of the cells below; the name of the system precedes them.
COLUMNS = {"result": ">17", "samples/s": ">10", "x single": ">9", **dict.fromkeys(PHASES, ">9")}
COLUMNS |= {"sent": ">9", "received": ">9", "  rank, source": "<22", "memory": ">9"}


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan(SystemOptions):
    """The checked options of `hvdtrain compare`."""

    systems: tuple[str, ...]
    controller: str
    rounds: int


@dataclass(frozen=True)
class Comparison:
    """The plan, and the properties of the work that all rows share."""

    plan: ComparisonPlan
    shape: tuple[int, ...]
    parameters: int
    gradient_bytes: int
    why_not: str  # reason why results are only reported; empty where they are judged


@dataclass(frozen=True)
class Row:
    """The results of one system."""

    system: str
    what: str
    status: str
    processes: list[str]
    problem: str = ""  # reason of the failure
    difference: float | None = None  # to `single`, relative to each tensor's largest value
    samples_per_s: float | None = None
    rates: list[float] = field(default_factory=list)  # samples_per_s of each round
    phases_s: dict[str, float] = field(default_factory=dict)  # per step, mean of computing ranks
    traffic: dict[str, Traffic] = field(default_factory=dict)  # per step, by rank
    traffic_source: str = ""  # "counted", "sockets" or "formula"
    formula: dict[str, Traffic] | None = None
    memory_bytes: dict[str, int] = field(default_factory=dict)  # peak, by process
    notes: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def total_memory_bytes(self) -> int:
        """Sum of the peaks of all processes; shared memory is counted for each of them."""
        return sum(self.memory_bytes.values())

    @property
    def busiest(self) -> tuple[str, Traffic]:
        """Name and traffic of the rank with the most traffic.

        The name is "each" where all ranks have the same traffic, and empty where nothing is sent.
        """
        totals = {name: t.sent + t.received for name, t in self.traffic.items()}
        if not any(totals.values()):
            return "", Traffic()
        name = max(totals, key=lambda rank: totals[rank])
        alike = len(totals) > 1 and totals[name] <= SAME * min(totals.values())
        return "each" if alike else name, self.traffic[name]

    @property
    def where(self) -> str:
        """Busiest rank and source of its traffic."""
        rank, _ = self.busiest
        return f"{rank}, {self.traffic_source}" if rank else "nothing"


def make_row(
    spec: Spec,
    strategy: type[Strategy],
    results: Sequence[Result],
    size: int,
    oracle: Weights | None,
    may_judge: bool,
) -> Row:
    """Return the row of one system from the results of its processes.

    `size`: bytes of all gradients. `oracle`: the parameters of `single`, None for `single` itself.
    Speed is measured from the earliest start of the measured steps to the latest end.
    """
    difference = worst_difference(read_weights(Path(spec.folder)), oracle) if oracle else None
    formula = strategy.formula(spec, size)
    traffic = _traffic(results)
    seconds = max(r["ended_s"] for r in results) - min(r["begun_s"] for r in results)
    computing = [r["phases_s"] for r in results if r["phases_s"]["compute"] > 0]  # not servers
    return Row(
        system=spec.system,
        what=strategy.what,
        status=judge(difference, strategy.judged and may_judge),
        processes=strategy.processes(spec),
        difference=difference,
        samples_per_s=results[0]["samples"] / seconds,
        phases_s={p: statistics.fmean(phases[p] for phases in computing) for p in PHASES},
        traffic=traffic or dict(formula or {}),
        traffic_source=strategy.measured if traffic else "formula" if formula else "",
        formula=dict(formula) if formula else None,
        memory_bytes={result["name"]: result["peak_memory_bytes"] for result in results},
        notes=list(dict.fromkeys(note for result in results for note in result["notes"])),
        figures=_figures(results),
    )


def _traffic(results: Sequence[Result]) -> dict[str, Traffic]:
    """Return the traffic of all ranks; empty if that of any process is unknown."""
    measured = [result["traffic"] for result in results]
    if None in measured:
        return {}
    return {rank: Traffic(**total) for by_rank in measured for rank, total in by_rank.items()}


def _figures(results: Sequence[Result]) -> dict[str, float]:
    """Merge figures over processes: maximum of names that end in _max, mean of the others."""
    each = [result["figures"] for result in results]
    return {
        name: (max if name.endswith("_max") else statistics.fmean)(
            [figures[name] for figures in each if name in figures]
        )
        for name in dict.fromkeys(itertools.chain(*each))
    }


def over_rounds(rows: Sequence[Row]) -> Row:
    """Merge the rows of all rounds: the row of median speed, with the worst result of any round."""
    for status in (DISAGREES, FAILED):
        if bad := next((row for row in rows if row.status == status), None):
            return bad
    worst = max((row.difference for row in rows if row.difference is not None), default=None)
    rates = [row.samples_per_s for row in rows if row.samples_per_s is not None]
    middle = sorted(rows, key=lambda row: row.samples_per_s or 0.0)[len(rows) // 2]
    return replace(middle, difference=worst, rates=rates)


def judge(difference: float | None, judged: bool) -> str:
    """Return the status for a difference; NaN disagrees."""
    if difference is None:
        return ORACLE
    if not judged:
        return REPORTED
    return AGREES if difference <= TOLERANCE else DISAGREES


def read_weights(folder: Path) -> Weights:
    """Read the parameters that the processes of a system have saved."""
    weights: Weights = {}
    for path in sorted(folder.glob("process-*.safetensors")):
        for name, value in load_file(path).items():
            weights.setdefault(name, []).append(value)
    return weights


def worst_difference(weights: Weights, oracle: Weights) -> float:
    """Return max |difference| / max |w|, the largest over all tensors and processes.

    It is infinite where a tensor is missing or of another shape, NaN where one contains NaN.
    """
    errors = [0.0]
    for name, (expected, *_) in oracle.items():
        values = weights.get(name, [])
        if not values or any(value.shape != expected.shape for value in values):
            return math.inf
        scale = float(np.abs(expected).max(initial=0.0)) or 1.0
        errors += [float(np.abs(value - expected).max(initial=0.0)) / scale for value in values]
    return float(np.max(errors))  # np.max propagates NaN


def describe(setting: Comparison) -> str:
    """Return one line on the work that all rows share."""
    plan, work = setting.plan, setting.plan.work
    rounds = f"median of {plan.rounds} rounds of " if plan.rounds > 1 else ""
    return (
        f"compare: {work.model} ({setting.parameters:,} parameters) on {work.data} "
        f"({'x'.join(map(str, setting.shape))}), {work.dtype}, "
        f"{rounds}{counted(work.steps, 'step')} of {work.global_batch_size} samples, "
        f"N = {plan.workers}, one compute thread each; "
        f"gradients S = {setting.gradient_bytes / MB:.3f} MB"
    )


def heading(names: Sequence[str]) -> str:
    """Return the two lines above the rows."""
    width = max(map(len, ["system", *names]))
    titles = f"{'system':{width}}" + "".join(map(format, COLUMNS, COLUMNS.values()))
    phases = f"{'ms a step:':>10}".ljust(9 * len(PHASES))
    above = (
        " " * (width + 17 + 10 + 9) + phases + f"{'MB a step:':>10}".ljust(18 + 22) + f"{'MB':>9}"
    )
    return f"{above}\n{titles}"


def line(row: Row, names: Sequence[str], single: Row | None) -> str:
    """Return the line of one system; `single`: the row that speed is relative to."""
    start = f"{row.system:{max(map(len, ['system', *names]))}}"
    if row.status == FAILED:
        return f"{start}{FAILED:>17}  {row.problem.splitlines()[0]}"
    *cells, _, _, memory = cells_of(row, single)
    return start + "".join(map(format, [*cells, f"  {row.where}", memory], COLUMNS.values()))


def cells_of(row: Row, single: Row | None) -> list[str]:
    """Return the figures of a row in the order of COLUMNS, rank and source in two cells.

    A cell is empty where its value is unknown or nothing is sent.
    """
    if row.status == FAILED:
        return [FAILED] + [""] * len(COLUMNS)
    rank, traffic = row.busiest
    return [
        result_of(row),
        f"{row.samples_per_s:,.0f}",
        speedup(row, single),
        *(f"{1000 * row.phases_s[phase]:.2f}" for phase in PHASES),
        *in_megabytes(traffic),
        rank,
        row.traffic_source if rank else "",
        f"{row.total_memory_bytes / MB:,.0f}",
    ]


def in_megabytes(traffic: Traffic) -> list[str]:
    """Return what is sent and received."""
    return [f"{traffic.sent / MB:.3f}", f"{traffic.received / MB:.3f}"]


def result_of(row: Row) -> str:
    """Return status and difference, such as 'agrees 5e-16', 'oracle' or 'failed'."""
    if row.difference is None:
        return row.status
    figure = f"{row.difference:.0e}" if row.difference else "0"
    return figure if row.status == REPORTED else f"{row.status} {figure}"


def speedup(row: Row, single: Row | None) -> str:
    """Return the speed relative to `single`, empty where one of them is unknown."""
    if not (single and single.samples_per_s and row.samples_per_s):
        return ""
    return f"{row.samples_per_s / single.samples_per_s:.2f}"


def notes_of(rows: Sequence[Row], setting: Comparison) -> list[str]:
    """Return the lines below the rows: details of each system, and how to read the figures."""
    why_not = setting.why_not
    return [
        *(f"  {row.system}: {'; '.join(explain(row))}" for row in rows),
        "  memory is the sum of the peaks of all processes; shared memory counts for each of them",
        *([f"  results are reported, not judged: {why_not}"] if why_not else []),
    ]


def explain(row: Row) -> list[str]:
    """Return the details of a row: its processes, staleness, spread and notes."""
    kinds = Counter(name.rstrip("0123456789 ") for name in row.processes)
    runs_as = (
        f"one {kind}"
        if kind in row.processes
        else f"{number} {kind} process{'' if number == 1 else 'es'}"
        for kind, number in kinds.items()
    )
    details = [row.what, ", ".join(runs_as)]
    if row.status == FAILED:
        return [*details, row.problem]
    if {"staleness_mean", "staleness_max"} <= row.figures.keys():
        mean, most = row.figures["staleness_mean"], row.figures["staleness_max"]
        details.append(f"staleness {mean:.2f} updates on average, {most:.0f} at most")
    if len(row.rates) > 1:
        details.append(f"{min(row.rates):,.0f} to {max(row.rates):,.0f} samples/s over the rounds")
    return [*details, *row.notes]


def summary_line(rows: Sequence[Row]) -> str:
    """Return one line that summarises all rows."""
    agreeing = sum(row.status == AGREES for row in rows)
    parts = [f"{agreeing} agree with {SINGLE} within {TOLERANCE:g}"] if agreeing else []
    endings = {REPORTED: "reported, not judged", DISAGREES: "DISAGREE", FAILED: "failed"}
    for status, ending in endings.items():
        if names := [row.system for row in rows if row.status == status]:
            parts.append(f"{', '.join(names)} {ending}")
    return f"compare: {'; '.join(parts) or f'only {SINGLE} was run'}"
