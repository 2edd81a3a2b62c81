"""The trace of a run on disk: trace.jsonl, whose records form a hash chain.

Each record holds the SHA-256 of the record before it; the first one, that of the run's identity:
its learning options and the fingerprints of its data. The SHA-256 of the last record, the head, is
in the summary, and in the manifest and the state of each checkpoint. So a record that was changed,
removed or added shows, and so does a file that was cut, up to the newest head.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.audit.trace import TraceRecord
from hvdtrain.config.options import train_options
from hvdtrain.errors import ReplayMismatch, UsageError
from hvdtrain.log import counted
from hvdtrain.run.directory import CONFIG, SUMMARY, TRACE, RunDirectory
from hvdtrain.train.checkpoint import Checkpoints, DamagedCheckpoint, read_manifest

Head = dict[str, Any]  # "step", "records" and "sha256" of the last record


class TraceFile:
    """The trace of a live run, on rank 0."""

    def __init__(self, directory: RunDirectory, origin: str, head: Head | None) -> None:
        """Continue after `head`, that of the checkpoint to resume from; None: begin.

        `origin`: see `origin_of`. Raises UsageError if the file does not end with `head`.
        """
        self._directory = directory
        self.head: Head = head or {"step": 0, "records": 0, "sha256": origin}
        found = origin
        for record in read_trace(directory.path):
            found = digest_of(record)
        if found != self.head["sha256"]:
            raise UsageError(
                f"--resume: {directory.path / TRACE} does not end with the record of step "
                f"{self.head['step']}, as the checkpoint says: it was cut or changed. Restore it, "
                "or start another --experiment"
            )

    def append(self, record: TraceRecord) -> None:
        """Add a record to the chain."""
        chained = asdict(record) | {"previous": self.head["sha256"]}
        self._directory.append(TRACE, chained)
        records = self.head["records"] + 1
        self.head = {"step": record.step, "records": records, "sha256": digest_of(chained)}

    def sync(self) -> None:
        """Wait until all records are on disk, before a checkpoint names the last one."""
        self._directory.sync(TRACE)


def origin_of(config: Mapping[str, Any], fingerprints: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 of a run's identity: the options that decide what is learned, and data."""
    options = train_options()
    learning = {n: v for n, v in config.items() if n in options and options[n].learns}
    return digest_of({"options": learning, "data": list(fingerprints)})


def digest_of(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record, by which the next one refers to it."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_trace(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's trace; none without one. Raises UsageError, naming the line."""
    path = folder / TRACE
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1):
        try:
            record = json.loads(line)
            _as_record(record)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path}:{number}: is not a record of a trace: {error}") from error
        yield record


class RecordedRun:
    """The folder of a run with a trace, to read."""

    def __init__(self, path: Path, needs_trace: bool = True) -> None:
        """Read configuration, summary and trace. Raises UsageError if a needed trace is missing."""
        self.path = path
        self.config, self.summary = _read(path / CONFIG), _read(path / SUMMARY, needed=False)
        self._chain = list(read_trace(path))
        if needs_trace and not self._chain:
            raise UsageError(f"{path}: has no trace: train with --trace-every")
        self.origin: str = self._chain[0]["previous"] if self._chain else ""
        self.records = [_as_record(record) for record in self._chain]
        found = Checkpoints(path / "checkpoints", keep=1).complete()
        self.checkpoints = {int(it.name.partition("-")[2]): it for it in reversed(found)}

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
        for place, head in heads.items():
            if not head:
                continue
            if head["records"] > len(digests):
                raise ReplayMismatch(
                    f"{file}: was cut: it has {counted(len(digests), 'record')}, but {place} names "
                    f"{head['records']}, to step {head['step']}"
                )
            if digests[head["records"] - 1] != head["sha256"]:
                raise ReplayMismatch(
                    f"{file}:{head['records']}: is not the record of step {head['step']} that "
                    f"{place} names: the trace was changed, or belongs to another run"
                )


def _as_record(record: Mapping[str, Any]) -> TraceRecord:
    return TraceRecord(**{name: value for name, value in record.items() if name != "previous"})


def _read(path: Path, needed: bool = True) -> dict[str, Any]:
    """Return the content of a YAML or JSON file. Raises UsageError."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError as error:
        if not needed:
            return {}
        raise UsageError(f"{path}: no such file: is this the folder of a run?") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} cannot be read: it is not what a run writes")
    return content
