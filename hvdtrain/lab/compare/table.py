"""The rows as text: a heading, one line per system, notes and a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.lab.compare.comparing import Comparison
from hvdtrain.lab.compare.rows import (
    AGREES,
    DISAGREES,
    FAILED,
    REPORTED,
    TOLERANCE,
    Row,
)
from hvdtrain.lab.systems import ORACLE as SINGLE
from hvdtrain.log import counted
from hvdtrain.train.metering import PHASES

COLUMNS = (  # heading and width; the name of the system precedes them
    ("result", 17),
    ("samples/s", 10),
    ("x single", 9),
    *((phase, 9) for phase in PHASES),
    ("sent", 9),
    ("received", 9),
    ("  rank, source", 22),
    ("memory", 9),
)
MB = 1e6


def describe(setting: Comparison) -> str:
    """Return one line on the work that all rows share."""
    plan, work = setting.plan, setting.plan.work
    shape = "x".join(map(str, setting.shape))
    rounds = f"median of {plan.rounds} rounds of " if plan.rounds > 1 else ""
    return (
        f"compare: {work.model} ({setting.parameters:,} parameters) on {work.data} ({shape}), "
        f"{work.dtype}, {rounds}{counted(work.steps, 'step')} of {work.global_batch_size} samples, "
        f"N = {plan.workers}, one compute thread each; "
        f"gradients S = {setting.gradient_bytes / MB:.3f} MB"
    )


def heading(names: Sequence[str]) -> str:
    """Return the two lines above the rows."""
    width = _width(names)
    titles = f"{'system':{width}}" + "".join(_place(title, w) for title, w in COLUMNS)
    before = width + sum(w for _, w in COLUMNS[:3])
    phases = f"{'ms a step:':>{10}}".ljust(9 * len(PHASES))
    above = " " * before + phases + f"{'MB a step:':>10}".ljust(18 + 22) + f"{'MB':>9}"
    return f"{above.rstrip()}\n{titles.rstrip()}"


def line(row: Row, names: Sequence[str], single: Row | None) -> str:
    """Return the line of one system; `single`: the row that speed is relative to."""
    start = f"{row.system:{_width(names)}}"
    if row.status == FAILED:
        return f"{start}{result_of(row):>17}  {row.problem.splitlines()[0]}"
    rank, traffic = row.busiest
    cells = [
        result_of(row),
        f"{row.samples_per_s:,.0f}",
        speedup(row, single),
        *(f"{1000 * row.phases_s[phase]:.2f}" for phase in PHASES),
        f"{traffic.sent / MB:.3f}",
        f"{traffic.received / MB:.3f}",
        f"  {rank}, {row.traffic_source}" if rank else "  nothing",
        f"{row.total_memory_bytes / MB:,.0f}",
    ]
    return start + "".join(
        _place(cell, width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)
    )


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
    lines = [f"  {row.system}: {'; '.join(explain(row))}" for row in rows]
    lines.append(
        "  memory is the sum of the peaks of all processes; shared memory counts for each of them"
    )
    if setting.why_not:
        lines.append(f"  results are reported, not judged: {setting.why_not}")
    return lines


def explain(row: Row) -> list[str]:
    """Return the details of a row: its processes, staleness, spread and notes."""
    details = [row.what, _runs_as(row.processes)]
    if row.status == FAILED:
        return [*details, row.problem]
    if {"staleness_mean", "staleness_max"} <= row.figures.keys():
        mean, most = row.figures["staleness_mean"], row.figures["staleness_max"]
        details.append(f"staleness {mean:.2f} updates on average, {most:.0f} at most")
    if len(row.rates) > 1:
        details.append(f"{min(row.rates):,.0f} to {max(row.rates):,.0f} samples/s over the rounds")
    return [*details, *row.notes]


def verdict(rows: Sequence[Row]) -> str:
    """Return one line that summarises all rows."""
    by_status = {
        status: [row.system for row in rows if row.status == status]
        for status in (AGREES, DISAGREES, REPORTED, FAILED)
    }
    parts = []
    if by_status[AGREES]:
        parts.append(f"{len(by_status[AGREES])} agree with {SINGLE} within {TOLERANCE:g}")
    if by_status[REPORTED]:
        parts.append(f"{', '.join(by_status[REPORTED])} reported, not judged")
    if by_status[DISAGREES]:
        parts.append(f"{', '.join(by_status[DISAGREES])} DISAGREE")
    if by_status[FAILED]:
        parts.append(f"{', '.join(by_status[FAILED])} failed")
    return f"compare: {'; '.join(parts) or f'only {SINGLE} was run'}"


def _runs_as(processes: Sequence[str]) -> str:
    """Count process names, as in '2 worker processes, 1 server process'."""
    kinds: dict[str, int] = {}
    for name in processes:
        kind = name.rpartition(" ")[0] if name[-1].isdigit() else name
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(
        f"one {kind}"
        if kind in processes
        else f"{number} {kind} process{'' if number == 1 else 'es'}"
        for kind, number in kinds.items()
    )


def _width(names: Sequence[str]) -> int:
    return max(map(len, ["system", *names]))


def _place(text: str, width: int) -> str:
    """Align `text` to the left if it starts with two spaces, else to the right."""
    return f"{text:{width}}" if text.startswith("  ") else f"{text:>{width}}"
