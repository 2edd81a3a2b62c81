"""The trace of a run on disk: trace.jsonl, whose records form a hash chain.

Each record holds the SHA-256 of the record before it; the first one, that of the run's identity:
its learning options and the fingerprints of its data. The SHA-256 of the last record, the head, is
in the summary, and in the manifest and the state of each checkpoint. So a record that was changed,
removed or added shows, and so does a file that was cut, up to the newest head.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.audit.trace import StepConditions, TraceRecord
from hvdtrain.config.options import read_recorded, train_options
from hvdtrain.data.sketch import SKETCH
from hvdtrain.documents import FIELD, HEAD, parse_json, read_json, refuse_newer, stamped
from hvdtrain.errors import ReplayMismatch, UsageError
from hvdtrain.files import json_ready
from hvdtrain.log import counted, say
from hvdtrain.records.directory import RunDirectory
from hvdtrain.records.folders import CHECKPOINTS, CONFIG, SUMMARY, TRACE, record_lines
from hvdtrain.ring.orders import KnownOrder, order_named
from hvdtrain.train.checkpoint import Checkpoints, DamagedCheckpoint, read_manifest, step_of

Head = dict[str, Any]  # "step", "records" and "sha256" of the last record


class TraceFile:
    """The trace of a live run, on rank 0."""

    def __init__(self, directory: RunDirectory, origin: str, head: Head | None) -> None:
        """Continue after `head`, that of the checkpoint to resume from; None: begin.

        `origin`: see `origin_of`. Raises UsageError if the file does not end with `head`.
        """
        self._directory = directory
        self.head: Head = head or {"step": 0, "records": 0, "sha256": origin}
        digest = origin
        for record in read_trace(directory.path):
            digest = digest_of(record)
        if digest != self.head["sha256"]:
            raise UsageError(
                f"--resume: {directory.path / TRACE} does not end with the record of step "
                f"{self.head['step']}, as the checkpoint says: it was cut or changed. Restore it, "
                "or start another --experiment"
            )

    def append(self, record: TraceRecord) -> None:
        """Add a record to the chain."""
        chained = stamped(TRACE, json_ready(asdict(record) | {"previous": self.head["sha256"]}))
        self._directory.append(TRACE, chained)
        self.head = {
            "step": record.step,
            "records": self.head["records"] + 1,
            "sha256": digest_of(chained),
        }

    def sync(self) -> None:
        """Wait until all records are on disk, before a checkpoint names the last one."""
        self._directory.sync(TRACE)


def origin_of(config: Mapping[str, Any], fingerprints: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 of a run's identity: the options that decide what is learned, and data.

    Options with their default are left out, so that one that a later version adds changes nothing;
    so are sketches of samples, which are not the same to the bit everywhere.
    """
    learns = {name: option.default for name, option in train_options().items() if option.learns}
    learning = {n: v for n, v in config.items() if n in learns and v != learns[n]}
    data = [
        {
            part: {k: v for k, v in fingerprint.items() if k != SKETCH}
            for part, fingerprint in one.items()
        }
        for one in fingerprints
    ]
    return digest_of({"options": learning, "data": data})


def digest_of(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record, by which the next one refers to it."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_trace(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's trace; none without one. Raises UsageError, naming the line."""
    path, before = folder / TRACE, 0
    if not path.exists():
        return
    for number, line in enumerate(record_lines(path), start=1):
        if not line.endswith("\n"):
            say(
                f"{path}: its last line is not complete, as a run that is killed leaves it: ignored"
            )
            return
        try:
            record = parse_json(line)
            refuse_newer(path, record, number)
            before = _as_record(record, before).step
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{path}:{number}: is not a record of a trace ({error or type(error).__name__}): "
                "it was damaged, or is of another version of hvdtrain"
            ) from error
        yield record


class RecordedRun:
    """The folder of a run with a trace, to read."""

    def __init__(self, path: Path, needs_trace: bool = True) -> None:
        """Read configuration, summary and trace. Raises UsageError if a needed trace is missing."""
        self.path = path
        self.config, self.summary = (
            _read_document(path / CONFIG),
            _read_document(path / SUMMARY, needed=False),
        )
        self._chain = list(read_trace(path))
        if needs_trace and not self._chain:
            raise UsageError(f"{path}: has no trace: train with --trace-every")
        self.origin: str = self._chain[0]["previous"] if self._chain else ""
        self.records = [_as_record(record) for record in self._chain]
        self.by_step = {record.step: record for record in self.records}
        # Later ones than the last are of a run that was resumed from an earlier one.
        kept = Checkpoints(path / CHECKPOINTS, keep=1)
        newest = kept.last_step()
        by_step = {step_of(saved.name): saved for saved in reversed(kept.complete())}
        self.checkpoints = {
            step: saved for step, saved in by_step.items() if newest is None or step <= newest
        }

    def start_before(self, step: int) -> int:
        """Return the step of the nearest checkpoint before `step`, or 0 for the beginning."""
        return max(start for start in (0, *self.checkpoints) if start < step)

    def check(self) -> None:
        """Raise ReplayMismatch unless the chain is unbroken and contains every recorded head."""
        file = self.path / TRACE
        digests = [digest_of(record) for record in self._chain]
        for number, (before, record) in enumerate(zip(digests, self._chain[1:], strict=False), 1):
            if record["previous"] != before:
                raise ReplayMismatch(
                    f"{file}:{number}: is not the record that line {number + 1} refers to: a "
                    f"record of steps {self.records[number - 1].step} to "
                    f"{self.records[number].step} was changed, removed or added"
                )
        heads = {f"{self.path / SUMMARY}": self.summary.get("trace")}
        for path in self.checkpoints.values():
            try:
                heads[f"{path}"] = read_manifest(path)["takeaway"].get("trace")
            except DamagedCheckpoint as error:
                raise ReplayMismatch(str(error)) from error
        for owner, head in heads.items():
            if not head:
                continue
            if not (head.keys() >= HEAD.keys() and head["records"] > 0):
                raise ReplayMismatch(f"{owner}: its trace is not what a run writes: {head}")
            if head["records"] > len(digests):
                raise ReplayMismatch(
                    f"{file}: was cut: it has {counted(len(digests), 'record')}, but {owner} names "
                    f"{head['records']}, to step {head['step']}"
                )
            if digests[head["records"] - 1] != head["sha256"]:
                raise ReplayMismatch(
                    f"{file}:{head['records']}: is not the record of step {head['step']} that "
                    f"{owner} names: the trace was changed, or belongs to another run"
                )


@dataclass(frozen=True)
class RecordedSegment:
    """Recorded steps that were computed with one setting, by the same number of ranks."""

    setting: StepConditions
    ranks: int  # that one process must compute as they did; 1: as a single one does
    steps: Sequence[int]

    @property
    def order(self) -> KnownOrder | None:
        """Return the order in which the ranks were added, if it is known."""
        return order_named(self.setting.order or "")

    @property
    def add_alike(self) -> bool:
        """Return whether one process can add the gradients to the same bits."""
        return self.ranks == 1 or self.order is not None

    def computable(self, checkpoints: Iterable[int]) -> list[int]:
        """Return the steps that can be computed again from these checkpoints, or the beginning."""
        starts = {start for start in (0, *checkpoints) if start >= self.setting.since}
        if not self.add_alike:
            return [step for step in self.steps if step - 1 in starts]
        return [step for step in self.steps if any(start < step for start in starts)]


def segments(run: RecordedRun) -> list[RecordedSegment]:
    """Return the stretches of a run, in order; a resume may begin another one."""
    is_virtual = run.config.get("virtual_workers") is not None
    result: list[RecordedSegment] = []
    for record in run.records:
        ranks = 1 if is_virtual else len(record.batches)
        if result and (result[-1].setting, result[-1].ranks) == (record.setting, ranks):
            result[-1] = replace(result[-1], steps=[*result[-1].steps, record.step])
        else:
            result.append(RecordedSegment(record.setting, ranks, [record.step]))
    return result


def segment_of(run: RecordedRun, first: int, last: int) -> RecordedSegment:
    """Return the stretch of all steps from `first` to `last`. Raises UsageError if one process
    cannot compute them again.
    """
    recorded = segments(run)
    held = [
        stretch for stretch in recorded if any(first <= step <= last for step in stretch.steps)
    ] or recorded[-1:]
    start = run.start_before(first)
    reason = ""
    if len(held) > 1 or start < held[0].setting.since:
        reason = "it was resumed with another setting on the way"
    elif not held[0].add_alike:
        reason = "the order is not known in which its workers were added"
    if reason:
        raise UsageError(f"{run.path}: steps {first} to {last} cannot be computed again: {reason}")
    return held[0]


def _as_record(values: Any, after: int = 0) -> TraceRecord:
    """Return a record from JSON. Raises ValueError, TypeError or KeyError unless it is one, of a
    later step than `after`.
    """
    if not isinstance(values, dict) or not isinstance(values["previous"], str):
        raise TypeError("not an object with the SHA-256 of the previous record")
    fields = {name: value for name, value in values.items() if name not in ("previous", FIELD)}
    record = TraceRecord(**fields | {"setting": StepConditions(**fields["setting"])})
    setting = record.setting
    if not isinstance(setting.order, str | None):
        raise TypeError(f"its order of additions is {setting.order!r}")
    whole = (record.step, setting.total_steps, setting.threads, setting.since, setting.bucket_bytes)
    if not all(type(number) is int and number >= 0 for number in whole) or setting.threads < 1:
        raise ValueError(f"step and setting: {whole}")
    if not after < record.step <= setting.total_steps:
        raise ValueError(f"step {record.step} after step {after}, of {setting.total_steps}")
    rows = [record.reduced, record.parameters, *record.gradients]
    texts = [record.samples, *record.batches, *(text for row in rows for text in row)]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a digest is not a text")
    if len(record.gradients) != len(record.batches) or len({len(row) for row in rows}) != 1:
        raise ValueError("the numbers of its shares, or of its parameters, do not agree")
    if record.sums and len(record.sums) != len(record.reduced):
        raise ValueError("the numbers of its sums and of its parameters do not agree")
    for number in (record.lr, record.loss, *record.sums, *setting.weights):
        if number is not None and not isinstance(number, float | int):
            raise TypeError(f"{number!r} is not a number")
    return record


def _read_document(path: Path, needed: bool = True) -> dict[str, Any]:
    """Return the configuration or the summary of a run. Raises UsageError."""
    try:
        return read_recorded(path) if path.name == CONFIG else read_json(path)
    except FileNotFoundError as error:
        if not needed:
            return {}
        raise UsageError(f"{path}: no such file: is this the folder of a run?") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
