"""Reading of run directories: finished, killed and still running."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.config.options import read_recorded
from hvdtrain.documents import lines_of, parse_json, read_json
from hvdtrain.errors import UsageError
from hvdtrain.formats import refuse_newer
from hvdtrain.log import shown

CONFIG = "config.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
AUDITS = "audit.jsonl"
EVALUATION = "evaluation.json"
FILES = (CONFIG, SUMMARY, METRICS, AUDITS, EVALUATION)

# A run is complete without audits and evaluation; each of these files is expected.
_MISSED = {
    CONFIG: "its options are unknown",
    SUMMARY: "the run was killed, or is still going on; its figures are those last logged",
    METRICS: "nothing was logged",
}

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The content of a run directory; fields of missing files are empty."""

    name: str  # unique within a report
    config: Record
    summary: Record
    steps: list[Record]  # a record per logged step
    epochs: list[Record]
    evaluations: list[Record]  # records with valid_*, of epochs and within them
    audits: list[Record]
    evaluation: Record
    notes: list[str]  # files that were missing, damaged or truncated

    @property
    def went_on(self) -> bool:
        """Whether the run was resumed after the end that its summary describes."""
        last_step = max((record["step"] for record in self.steps + self.epochs), default=0)
        return number(self.summary, "steps") < last_step  # False for NaN


def number(record: Record, name: str) -> float:
    """Return a value as a float; NaN where it is missing, no number or not finite."""
    value = record.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    return float(value) if abs(value) <= sys.float_info.max else math.nan


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every run. Raises UsageError with the problems of all of them."""
    runs: list[Run] = []
    problems: list[str] = []
    places: list[Path] = []
    for path in paths:
        try:
            place = path.resolve()
            if place in places:
                raise UsageError(f"RUN={path}: given twice; name each run once")
            places.append(place)
            runs.append(_read_run(path))
        except UsageError as error:
            problems += error.problems
        except (OSError, RuntimeError) as error:  # circular links raise RuntimeError
            reason = getattr(error, "strerror", None) or error
            problems.append(f"RUN={path}: cannot be read: {reason}; check its permissions")
    if problems:
        raise UsageError(*problems)
    return [
        replace(run, name=shown(_distinct_name(place, places)))
        for run, place in zip(runs, places, strict=True)
    ]


def _distinct_name(place: Path, places: Sequence[Path]) -> str:
    """Return the name of a folder, with as many parents as make it unique among `places`."""
    depth = 1
    while sum(other.parts[-depth:] == place.parts[-depth:] for other in places) > 1:
        depth += 1
    return "/".join(place.parts[-depth:])


def _read_run(path: Path) -> Run:
    if not path.exists():
        raise UsageError(f"RUN={path}: does not exist; give the folder of a run, runs/EXPERIMENT")
    if not path.is_dir():
        raise UsageError(f"RUN={path}: is not a folder; give the one that holds the run's files")
    present = {name for name in FILES if (path / name).exists()}
    if not present:
        raise UsageError(
            f"RUN={path}: is not a run: it holds none of {', '.join(FILES)}; "
            "give the folder of one run, runs/EXPERIMENT"
        )
    notes = [f"{name} is missing: {why}" for name, why in _MISSED.items() if name not in present]
    metrics = _read_records(path / METRICS, notes)
    return Run(
        name=path.name,
        config=_read_mapping(path / CONFIG, notes),
        summary=_read_mapping(path / SUMMARY, notes),
        steps=[record for record in metrics if record.get("kind") == "step"],
        epochs=[record for record in metrics if record.get("kind") == "epoch"],
        evaluations=[
            record
            for record in metrics
            if record.get("kind") in ("epoch", "evaluation") and "valid_loss" in record
        ],
        audits=_read_records(path / AUDITS, notes),
        evaluation=_read_mapping(path / EVALUATION, notes),
        notes=notes,
    )


def _read_mapping(path: Path, notes: list[str]) -> Record:
    """Return the mapping in a JSON or YAML file; an empty one, with a note, where it holds none."""
    if not path.exists():
        return {}
    try:
        return read_recorded(path) if path.name == CONFIG else read_json(path)
    except ValueError as error:
        notes.append(f"{path.name} is damaged or was cut short, and was left out: it {error}")
        return {}


def _read_records(path: Path, notes: list[str]) -> list[Record]:
    """Return the records of a `.jsonl` file; invalid lines are left out, with a note."""
    if not path.exists():
        return []
    records, bad, last = [], [], 0
    try:
        for last, line in enumerate(lines_of(path), start=1):
            record = _parse_record(path, last, line)
            if record is None:
                bad.append(last)
            else:
                records.append(record)
    except ValueError as error:
        notes.append(f"{path.name} was read up to line {last:,} only: {error}")
    if bad == [last]:
        notes.append(f"{path.name}:{last}: the last line was cut short, and was left out")
    elif bad:
        places = ", ".join(map(str, bad[:3])) + (", ..." if len(bad) > 3 else "")
        notes.append(f"{path.name}: {len(bad)} damaged lines were left out: {places}")
    return records


def _parse_record(path: Path, place: int, line: str) -> Record | None:
    """Return the object of a line; None where it is truncated or has no step. Raises UsageError for
    a newer format.
    """
    try:
        record = parse_json(line)
        refuse_newer(path, record, place)
    except ValueError:
        return None
    return None if math.isnan(number(record, "step")) else record
