"""Reading of run directories: finished, killed and still running."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.config.options import read_recorded
from hvdtrain.documents import lines_of, parse_json, read_json, refuse_newer
from hvdtrain.errors import UsageError, refuse
from hvdtrain.log import shown
from hvdtrain.records.folders import AUDITS, CONFIG, EVALUATION, METRICS, SUMMARY

FILES = (CONFIG, SUMMARY, METRICS, AUDITS, EVALUATION)

MOST_RECORDS = 5000  # more than a plot has pixels

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
    steps: list[Record]  # of logged steps, thinned where there are very many
    epochs: list[Record]
    evaluations: list[Record]  # records with valid_*, of epochs and within them
    audits: list[Record]  # thinned alike
    audited: Record  # how many there were and failed, and the worst
    evaluation: Record
    notes: list[str]  # files that were missing, damaged or truncated

    @property
    def went_on(self) -> bool:
        """Whether the run was resumed after the end that its summary describes."""
        logged = (record["step"] for record in self.steps + self.epochs)
        return number(self.summary, "steps") < max(logged, default=0)  # False for NaN


def number(record: Record, name: str) -> float:
    """Return a value as a float; NaN where it is missing, no number or not finite."""
    value: Any = record.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else math.nan


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every run. Raises UsageError with the problems of all of them."""
    runs: list[Run] = []
    problems: list[str] = []
    folders: list[Path] = []
    for path in paths:
        try:
            folder = path.resolve()
            if folder in folders:
                raise UsageError(f"RUN={path}: given twice; name each run once")
            folders.append(folder)
            runs.append(_read_run(path))
        except UsageError as error:
            problems += error.problems
        except (OSError, RuntimeError) as error:  # circular links raise RuntimeError
            reason = getattr(error, "strerror", None) or error
            advice = "; check its permissions" if isinstance(error, PermissionError) else ""
            problems.append(f"RUN={path}: cannot be read: {reason}{advice}")
    refuse(problems)
    return [
        replace(run, name=shown(_distinct_name(folder, folders)))
        for run, folder in zip(runs, folders, strict=True)
    ]


def _distinct_name(folder: Path, folders: Sequence[Path]) -> str:
    """Return the name of a folder, with as many parents as make it unique among `folders`."""
    depth = 1
    while sum(other.parts[-depth:] == folder.parts[-depth:] for other in folders) > 1:
        depth += 1
    return "/".join(folder.parts[-depth:])


def _files_of(path: Path) -> set[str]:
    """Return the names of the files of a run in a folder. Raises UsageError without any."""
    if not path.exists():
        raise UsageError(f"RUN={path}: does not exist; give the folder of a run, runs/EXPERIMENT")
    if not path.is_dir():
        raise UsageError(f"RUN={path}: is not a folder; give the one that holds the run's files")
    if present := {name for name in FILES if (path / name).exists()}:
        return present
    raise UsageError(
        f"RUN={path}: is not a run: it holds none of {', '.join(FILES)}; "
        "give the folder of one run, runs/EXPERIMENT"
    )


def _read_run(path: Path) -> Run:
    present = _files_of(path)
    notes = [f"{name} is missing: {why}" for name, why in _MISSED.items() if name not in present]
    steps, audits = Thinned("train_loss"), Thinned("worst_error_over_bound")
    epochs: list[Record] = []
    evaluations: list[Record] = []
    for record in _records(path / METRICS, notes):
        kind = record.get("kind")
        if kind == "step":
            steps.add(record)
        if kind == "epoch":
            epochs.append(record)
        if kind in ("epoch", "evaluation") and "valid_loss" in record:
            evaluations.append(record)
    for record in _records(path / AUDITS, notes):
        audits.add(record, always=record.get("ok") is False)
    notes += [
        f"{name}: of {thinned.count:,} records those with the highest and the lowest "
        f"{thinned.figure} of each {thinned.stride:,} are shown"
        for name, thinned in ((METRICS, steps), (AUDITS, audits))
        if len(thinned.records) < thinned.count
    ]
    return Run(
        name=path.name,
        config=_read_mapping(path / CONFIG, notes),
        summary=_read_mapping(path / SUMMARY, notes),
        steps=steps.records,
        epochs=epochs,
        evaluations=evaluations,
        audits=audits.records,
        audited={
            "checked": audits.count,
            "failed": audits.marked,
            "worst_error_over_bound": audits.highest,
        },
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


class Thinned:
    """Records in order, of which the highest and the lowest of each stretch are kept once there are
    more than MOST_RECORDS: a curve of them has the same extremes.
    """

    def __init__(self, figure: str) -> None:
        """`figure`: the name of the value by which records are chosen."""
        self.figure, self.stride = figure, 1
        self.count, self.marked, self.highest = 0, 0, -math.inf
        self._kept: list[Record] = []
        self._always: list[Record] = []
        self._stretch: list[Record] = []
        self._last: Record = {}

    def add(self, record: Record, always: bool = False) -> None:
        """Add a record; one to keep `always` is also counted as marked."""
        self.count += 1
        self.marked += always
        self._last = record
        self.highest = max(self.highest, number(record, self.figure))  # NaN is never the larger
        if always and self.marked <= MOST_RECORDS:
            self._always.append(record)
            return
        self._stretch.append(record)
        if len(self._stretch) >= self.stride:
            self._kept += self._ends(self._stretch)
            self._stretch = []
        if len(self._kept) > 2 * MOST_RECORDS:
            self._kept = [
                record
                for start in range(0, len(self._kept), 4)
                for record in self._ends(self._kept[start : start + 4])
            ]
            self.stride *= 2 if self.stride > 1 else 4

    @property
    def records(self) -> list[Record]:
        """Return the records that were kept, with the last ones, in the order of their steps."""
        records = [*self._kept, *self._stretch, *self._always]
        records += [self._last] if records and self._last not in records else []
        return sorted(records, key=lambda record: number(record, "step"))

    def _ends(self, records: list[Record]) -> list[Record]:
        if len(records) <= 2:
            return list(records)
        values = [number(record, self.figure) for record in records]
        ranks = [math.inf if math.isnan(value) else value for value in values]
        indices = {ranks.index(min(ranks)), ranks.index(max(ranks))}
        return [records[index] for index in sorted(indices)]


def _records(path: Path, notes: list[str]) -> Iterator[Record]:
    """Yield the records of a `.jsonl` file; lines that are truncated or have no step are left out,
    with a note. Raises UsageError for a newer format.
    """
    if not path.exists():
        return
    bad, last = [], 0
    try:
        for last, line in enumerate(lines_of(path), start=1):
            record: Record = {}
            with suppress(ValueError):
                parsed = parse_json(line)
                refuse_newer(path, parsed, last)
                record = parsed
            if math.isnan(number(record, "step")):
                bad.append(last)
            else:
                yield record
    except ValueError as error:
        notes.append(f"{path.name} was read up to line {last:,} only: {error}")
    if bad == [last]:
        notes.append(f"{path.name}:{last}: the last line was cut short, and was left out")
    elif bad:
        numbers = ", ".join([*map(str, bad[:3]), *["..."] * (len(bad) > 3)])
        notes.append(f"{path.name}: {len(bad)} damaged lines were left out: {numbers}")
