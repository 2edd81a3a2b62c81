"""The results of one system as a row: merged over its processes and compared with `single`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from hvdtrain.lab.systems.contract import Spec, Strategy, Traffic
from hvdtrain.train.metering import PHASES

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


def make_row(
    spec: Spec,
    strategy: type[Strategy],
    results: Sequence[Mapping[str, object]],
    size: int,
    oracle: Weights | None,
    may_judge: bool,
) -> Row:
    """Return the row of one system from the results of its processes.

    `size`: bytes of all gradients. `oracle`: the parameters of `single`, None for `single` itself.
    """
    weights = read_weights(Path(spec.folder))
    difference = worst_difference(weights, oracle) if oracle else None
    formula = strategy.formula(spec, size)
    traffic = _traffic(results)
    return Row(
        system=spec.system,
        what=strategy.what,
        status=judge(difference, strategy.judged and may_judge),
        processes=strategy.processes(spec),
        difference=difference,
        samples_per_s=_rate(results),
        phases_s=_phases(results),
        traffic=traffic or dict(formula or {}),
        traffic_source=strategy.measured if traffic else "formula" if formula else "",
        formula=dict(formula) if formula else None,
        memory_bytes={str(r["name"]): int(str(r["peak_memory_bytes"])) for r in results},
        notes=list(dict.fromkeys(note for r in results for note in _texts(r["notes"]))),
        figures=_figures(results),
    )


def over_rounds(rows: Sequence[Row]) -> Row:
    """Merge the rows of all rounds: the row of median speed, with the worst result of any round."""
    for status in (DISAGREES, FAILED):
        if bad := next((row for row in rows if row.status == status), None):
            return bad
    in_order = sorted(rows, key=lambda row: row.samples_per_s or 0.0)
    worst = max((row.difference for row in rows if row.difference is not None), default=None)
    rates = [row.samples_per_s for row in rows if row.samples_per_s is not None]
    return replace(in_order[len(rows) // 2], difference=worst, rates=rates)


def judge(difference: float | None, judged: bool) -> str:
    """Return the status for a difference; NaN disagrees."""
    if difference is None:
        return ORACLE
    if not judged:
        return REPORTED
    return AGREES if difference <= TOLERANCE else DISAGREES


def read_weights(folder: Path) -> Weights:
    """Read the parameters that the processes of a system have saved."""
    found: Weights = {}
    for path in sorted(folder.glob("process-*.safetensors")):
        for name, value in load_file(path).items():
            found.setdefault(name, []).append(value)
    return found


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


def _rate(results: Sequence[Mapping[str, object]]) -> float:
    """Return samples/s from the earliest start of the measured steps to the latest end."""
    begun = min(_number(result, "begun_s") for result in results)
    ended = max(_number(result, "ended_s") for result in results)
    return _number(results[0], "samples") / (ended - begun)


def _phases(results: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Return the mean seconds of each phase over the processes that compute, not servers."""
    phases = [r["phases_s"] for r in results if isinstance(r["phases_s"], dict)]
    computing = [p for p in phases if p["compute"] > 0]
    return {name: statistics.fmean(p[name] for p in computing) for name in PHASES}


def _traffic(results: Sequence[Mapping[str, object]]) -> dict[str, Traffic]:
    """Return the traffic of all ranks; empty if that of any process is unknown."""
    found: dict[str, Traffic] = {}
    for result in results:
        own = result["traffic"]
        if not isinstance(own, dict):
            return {}
        found |= {name: Traffic(**values) for name, values in own.items()}
    return found


def _figures(results: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Merge figures over processes: maximum of names that end in _max, mean of the others."""
    figures = [r["figures"] for r in results if isinstance(r["figures"], dict)]
    names = dict.fromkeys(name for own in figures for name in own)
    return {
        name: (max if name.endswith("_max") else statistics.fmean)(
            own[name] for own in figures if name in own
        )
        for name in names
    }


def _number(result: Mapping[str, object], name: str) -> float:
    return float(str(result[name]))


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []
