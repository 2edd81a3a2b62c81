"""One system's results as a row: held against `single`, and put together from its processes."""

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

# "Exact by construction": relative to each tensor's largest value, in float64. One exchange rounds
# by some 1e-16; training may multiply that from step to step, and stays far below this, while a
# wrong weight or a sample left out shows from the first digits on.
TOLERANCE = 1e-9
SAME = 1.05  # ranks whose traffic differs by less are told as one

Weights = dict[str, list[NDArray[np.floating]]]  # by name, as each process holds them
ORACLE, AGREES, DISAGREES, REPORTED, FAILED = (
    "oracle",
    "agrees",
    "DISAGREES",
    "not judged",
    "failed",
)


@dataclass(frozen=True)
class Row:
    """One system."""

    system: str
    what: str
    status: str
    processes: list[str]
    problem: str = ""  # why it failed
    difference: float | None = None  # to `single`, relative to each tensor's largest value
    samples_per_s: float | None = None
    rates: list[float] = field(default_factory=list)  # the same of each round
    phases_s: dict[str, float] = field(default_factory=dict)  # a step, mean over ranks that compute
    traffic: dict[str, Traffic] = field(default_factory=dict)  # a step, by rank
    traffic_source: str = ""  # counted, sockets or formula
    formula: dict[str, Traffic] | None = None
    memory_bytes: dict[str, int] = field(default_factory=dict)  # the peak, by process
    notes: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def total_memory_bytes(self) -> int:
        """Of all processes; what they share is counted for each of them."""
        return sum(self.memory_bytes.values())

    @property
    def busiest(self) -> tuple[str, Traffic]:
        """The rank that sends and receives most, and how much; `each` where all do as much.

        No name where nothing is sent.
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
    """`size`: bytes of all gradients. `oracle`: the parameters of `single`; None for itself."""
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
    """One system's rows as one: that of the median speed, with the worst result of any round."""
    for status in (DISAGREES, FAILED):
        if bad := next((row for row in rows if row.status == status), None):
            return bad
    in_order = sorted(rows, key=lambda row: row.samples_per_s or 0.0)
    worst = max((row.difference for row in rows if row.difference is not None), default=None)
    rates = [row.samples_per_s for row in rows if row.samples_per_s is not None]
    return replace(in_order[len(rows) // 2], difference=worst, rates=rates)


def judge(difference: float | None, judged: bool) -> str:
    """A difference that is not a number is none that agrees."""
    if difference is None:
        return ORACLE
    if not judged:
        return REPORTED
    return AGREES if difference <= TOLERANCE else DISAGREES


def read_weights(folder: Path) -> Weights:
    """What the processes of a system have saved."""
    found: Weights = {}
    for path in sorted(folder.glob("process-*.safetensors")):
        for name, value in load_file(path).items():
            found.setdefault(name, []).append(value)
    return found


def worst_difference(weights: Weights, oracle: Weights) -> float:
    """max |difference| / max |w| over all tensors and processes.

    Infinite where a tensor is missing or of another shape, NaN where one holds NaN.
    """
    errors = [0.0]
    for name, (expected, *_) in oracle.items():
        values = weights.get(name, [])
        if not values or any(value.shape != expected.shape for value in values):
            return math.inf
        scale = float(np.abs(expected).max(initial=0.0)) or 1.0
        errors += [float(np.abs(value - expected).max(initial=0.0)) / scale for value in values]
    return float(np.max(errors))  # which hands on a NaN


def _rate(results: Sequence[Mapping[str, object]]) -> float:
    """From the first process's beginning of the measured steps to the last one's end."""
    begun = min(_number(result, "begun_s") for result in results)
    ended = max(_number(result, "ended_s") for result in results)
    return _number(results[0], "samples") / (ended - begun)


def _phases(results: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Servers, which compute nothing, are left out."""
    phases = [r["phases_s"] for r in results if isinstance(r["phases_s"], dict)]
    computing = [p for p in phases if p["compute"] > 0]
    return {name: statistics.fmean(p[name] for p in computing) for name in PHASES}


def _traffic(results: Sequence[Mapping[str, object]]) -> dict[str, Traffic]:
    """Of all ranks; empty where that of one is not known."""
    found: dict[str, Traffic] = {}
    for result in results:
        own = result["traffic"]
        if not isinstance(own, dict):
            return {}
        found |= {name: Traffic(**values) for name, values in own.items()}
    return found


def _figures(results: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """The largest of what is called ..._max, the mean of all else."""
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
