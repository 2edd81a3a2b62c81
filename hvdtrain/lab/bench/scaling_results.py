"""Results of `hvdtrain bench scaling`: medians, ratios and efficiencies, as table and JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.lab.bench.scaling import (
    CONTESTANTS,
    DDP,
    LIMIT,
    OURS,
    WEAK,
    Rates,
    ScalingCase,
    ScalingPlan,
)
from hvdtrain.lab.bench.turns import Ratio, spread
from hvdtrain.log import counted

NOTHING = "-"
HEADINGS = (
    *("model", "N", "samples a step"),
    *(f"{name}/s" for name in CONTESTANTS),
    *(f"{OURS} / {name} (middle half)" for name in (DDP, LIMIT)),
    *("efficiency", f"{DDP}'s", f"{LIMIT}'s"),
)


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
    return [
        _point(plan, rates, mode, model, workers)
        for mode in plan.modes
        for model in plan.models
        for workers in plan.workers
    ]


def _point(plan: ScalingPlan, rates: Rates, mode: str, model: str, workers: int) -> ScalingPoint:
    case = plan.case(mode, model, workers)
    found = rates[case]
    speed = {name: median(found[name]) for name in CONTESTANTS}
    efficiency: dict[str, float | None] = dict.fromkeys(CONTESTANTS)
    if 1 in plan.workers:
        for name, alone in rates[plan.case(mode, model, 1)].items():
            own, base = speed[name], median(alone)
            efficiency[name] = own / (workers * base) if own and base else None
    return ScalingPoint(
        mode=mode,
        case=case,
        samples_per_s=speed,
        over_ddp=ratio_within_rounds(found[OURS], found[DDP]),
        over_limit=ratio_within_rounds(found[OURS], found[LIMIT]),
        efficiency=efficiency,
    )


def ratio_within_rounds(rates: Sequence[float], to: Sequence[float]) -> Ratio | None:
    """Return the ratio over rounds in which neither failed; None without such a round."""
    ratios = [a / b for a, b in zip(rates, to, strict=True)]
    ended = [ratio for ratio in ratios if not math.isnan(ratio)]
    return spread(ended) if ended else None


def median(rates: Sequence[float]) -> float | None:
    """Return the median without failed rounds; None where all failed."""
    ended = [rate for rate in rates if not math.isnan(rate)]
    return statistics.median(ended) if ended else None


def table(plan: ScalingPlan, points: Sequence[ScalingPoint]) -> str:
    """Return the table, in one part for each mode."""
    rounds = counted(plan.rounds, "round")
    lines = [
        f"scaling: samples/s in the median of {rounds} of turns; hvdtrain on {plan.controller}, "
        "DDP on gloo, one compute thread each; limit: as many processes at once, without exchange"
    ]
    for mode in plan.modes:
        rows = [HEADINGS, *(_cells(point) for point in points if point.mode == mode)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        kept = "samples a worker" if mode == WEAK else "samples a step over all workers"
        lines.append(f"{mode} scaling, the same {kept}:")
        for row in rows:
            cells = [
                f"{cell:{width}}" if number == 0 else f"{cell:>{width}}"
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _cells(point: ScalingPoint) -> tuple[str, ...]:
    case = point.case
    return (
        case.model,
        str(case.workers),
        str(case.global_batch_size),
        *(_cell(point.samples_per_s[name], ",.0f") for name in CONTESTANTS),
        _with_spread(point.over_ddp),
        _with_spread(point.over_limit),
        *(_cell(point.efficiency[name], ".2f") for name in CONTESTANTS),
    )


def _cell(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _with_spread(ratio: Ratio | None) -> str:
    if ratio is None:
        return NOTHING
    return f"{ratio.median:.3f} ({ratio.lower_quartile:.3f} to {ratio.upper_quartile:.3f})"


def as_json(
    plan: ScalingPlan, rates: Rates, points: Sequence[ScalingPoint], problems: Sequence[str]
) -> dict[str, Any]:
    """Return all results; null stands for a failed round."""
    return {
        **asdict(plan),
        "runs": [
            asdict(case) | {"samples_per_s": {n: _finite(r) for n, r in found.items()}}
            for case, found in rates.items()
        ],
        "points": [asdict(point) for point in points],
        "problems": list(problems),
    }


def _finite(rates: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(rate) else rate for rate in rates]
