"""The folder of a run: its lock, configuration, summary, evaluation and record files."""

from __future__ import annotations

import errno
import glob
import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

from hvdtrain.documents import lines_of, parse_json, read_json, read_text
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.files import (
    json_ready,
    open_kept,
    open_to_read,
    replace_file,
    why_not_written,
    write_new,
)
from hvdtrain.formats import FORMATS, refuse_newer, stamped
from hvdtrain.log import say

LOCK = ".lock"
LOCK_RETRY_S = 0.5
LOGS = "logs"  # the launcher writes there before the run starts
CONFIG, SUMMARY, EVALUATION = "config.yaml", "summary.json", "evaluation.json"
CHECKPOINTS, TENSORBOARD, PROFILE = "checkpoints", "tensorboard", "profile"
JOB_FILE = ".job"  # names the launcher's job that began the run
METRICS, AUDITS, TRACE = "metrics.jsonl", "audit.jsonl", "trace.jsonl"
# Folders, and the names of what a run writes there, as long as it has no checkpoint.
FOLDERS = {
    TENSORBOARD: re.compile(r"events\.out\.tfevents\..*"),
    PROFILE: re.compile(r"(rank-\d+|timeline)\.json"),
    CHECKPOINTS: re.compile(r"\.step-\d+\.partial"),
}
# Of a failed run without checkpoints: a folder with nothing else may be used again.
LEAVINGS = (
    *(CONFIG, SUMMARY, EVALUATION, METRICS, AUDITS, TRACE, *FOLDERS),
    *("mlflow.json", "wandb.json"),
)
KEPT = (LOGS, "wandb")  # may stay in a folder that is used again


class RunExists(UsageError):
    """The folder of a new run holds another run, or a live job is using it."""


class RunDirectory:
    """The folder of a live run, locked until `close`."""

    def __init__(self, path: Path, reopen: bool = False, wait_s: float = 0.0) -> None:
        """Create the folder, or `reopen` that of an existing run, and lock it.

        `wait_s`: seconds to wait for another job to release the lock. A folder whose run has died
        without a checkpoint is emptied and used again, with a notice. Raises UsageError, and
        changes nothing, if a new folder holds other files, is in use, or cannot be written.
        """
        self.path = path
        if not reopen:
            self._refuse_occupied()
        with ExitStack() as undo:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = undo.enter_context(open_kept(self.path / LOCK))
                _take(self._lock, wait_s)
            except BlockingIOError:
                text = f"--experiment={path.name}: a live job is using {path}"
                raise RunExists(text) from None
            except (OSError, ValueError) as error:
                reason = why_not_written(path, error)
                raise UsageError(
                    f"--output={path.parent}: {path} cannot be written: {reason}"
                ) from error
            if not reopen:
                # The job that held the lock may have ended just now.
                self._refuse_occupied(own_lock=True)
                self._clear_leavings()
            undo.pop_all()
        self._streams: dict[str, IO[str]] = {}
        self.run_id = self._take_id()

    def write_job(self, job: str) -> None:
        """Record the launcher's job, whose restarts find the run by it."""
        with self._naming_failures(JOB_FILE):
            write_new(self.path / JOB_FILE, f"{job}\n")

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the resolved configuration, as `--config` reads it."""
        import yaml

        self._write(CONFIG, [yaml.safe_dump(config, sort_keys=False)])

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the summary of the run."""
        self._write(SUMMARY, [json.dumps(stamped(SUMMARY, json_ready(summary)), indent=2), "\n"])

    def write_evaluation(self, evaluation: dict[str, Any]) -> None:
        """Write the newest evaluation in full, replacing the previous one."""
        self._write(EVALUATION, [json.dumps(stamped(EVALUATION, json_ready(evaluation))), "\n"])

    def append(self, name: str, record: dict[str, Any]) -> None:
        """Add one JSON object, on a line of its own, to a `.jsonl` file.

        A file that was removed or replaced begins again, with a notice.
        """
        with self._naming_failures(name):
            stream = self._streams.get(name)
            if stream is not None and not _is_at(stream, self.path / name):
                say(f"{self.path / name} was removed or replaced: it begins again with this line")
                stream.close()
                stream = None
            if stream is None:
                stream = self._streams[name] = open_kept(self.path / name)
            stream.write(json.dumps(stamped(name, json_ready(record))) + "\n")
            stream.flush()

    def sync(self, name: str) -> None:
        """Wait until the records of a `.jsonl` file are on disk."""
        with self._naming_failures(name):
            if stream := self._streams.get(name):
                os.fsync(stream.fileno())

    def refuse_newer(self) -> None:
        """Raise UsageError if a newer version of hvdtrain has written any of the records."""
        for path in self._records():
            for number, line in enumerate(record_lines(path), start=1):
                with suppress(ValueError):  # a line that is cut is no record
                    refuse_newer(path, parse_json(line), number)

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps, which the resumed run will repeat."""
        for path in filter(os.path.lexists, self._records()):
            self._write(path.name, (line for line in record_lines(path) if _step_of(line) <= step))

    def last_step(self) -> int:
        """Return the last step with a complete record, or 0."""
        lines = (line for path in self._records() for line in record_lines(path))
        steps = (_step_of(line) for line in lines)
        return int(max((step for step in steps if step < math.inf), default=0))

    def read_tracker(self, name: str) -> dict[str, Any]:
        """Return what an earlier start of the run has stored for a tracker; empty if nothing."""
        with suppress(OSError, ValueError):
            return parse_json(read_text(self.path / f"{name}.json"))
        return {}

    def write_tracker(self, name: str, content: dict[str, Any]) -> None:
        """Store what a later start of the run needs to continue its record in a tracker."""
        self._write(f"{name}.json", [json.dumps(content), "\n"])

    def restart_trace(self, head: dict[str, Any] | None) -> None:
        """Let the summary of an earlier start name `head`, with which the trace now ends."""
        with suppress(OSError, ValueError):
            summary = read_json(self.path / SUMMARY)
            self.write_summary(summary | {"trace": head})

    def close(self) -> None:
        """Close the files and release the lock."""
        for stream in self._streams.values():
            with suppress(OSError):  # a full disk, which the failed write has already reported
                stream.close()
        self._lock.close()

    def _take_id(self) -> str:
        """Return the id of the run, which the lock's file holds from the first start on. Where that
        was removed, its checkpoints have it.
        """
        self._lock.seek(0)
        if found := self._lock.read(64).strip():
            return found
        found = self._id_of_checkpoints() or secrets.token_hex(16)
        self._lock.write(found + "\n")
        self._lock.flush()
        return found

    def _id_of_checkpoints(self) -> str | None:
        # Imports torch, which the launcher does without.
        from hvdtrain.train.checkpoint import Checkpoints, DamagedCheckpoint, read_manifest

        folder = self.path / CHECKPOINTS
        if not folder.is_symlink():  # where other runs may have theirs
            for path in Checkpoints(folder, keep=1).complete():
                with suppress(DamagedCheckpoint):
                    return read_manifest(path).get("run")
        return None

    def _keep_lock(self) -> None:
        """Lock again if the lock's file was removed. Raises TrainingError if another job has."""
        if _is_at(self._lock, self.path / LOCK):
            return
        lock = open_kept(self.path / LOCK)
        try:
            _take(lock, wait_s=0.0)
            lock.seek(0)
            taken = bool(lock.read(1))
        except BlockingIOError:
            taken = True
        if taken:
            lock.close()
            raise TrainingError(
                f"{self.path / LOCK} was replaced, and another job has used the folder since: this "
                "one ends, so that they do not mix"
            )
        say(f"{self.path / LOCK} was removed: it is made again")
        lock.write(self.run_id + "\n")
        lock.flush()
        self._lock.close()
        self._lock = lock

    def _refuse_occupied(self, own_lock: bool = False) -> None:
        held = occupants(self.path, own_lock)
        if held:
            what = "a run" if CONFIG in held else f"files ({', '.join(held[:3])}, ...)"
            kind = RunExists if CONFIG in held else UsageError
            raise kind(
                f"--experiment={self.path.name}: {self.path} already holds {what}; "
                "nothing was changed. Choose another --experiment or --output, or remove it"
            )

    def _clear_leavings(self) -> None:
        from hvdtrain.train.checkpoint import Checkpoints

        held = [it for name in LEAVINGS if os.path.lexists(it := self.path / name)]
        if held:
            say(f"{self.path} holds a run that ended without a checkpoint: starting it again")
        with self._naming_failures():
            for path in held:
                if path.is_symlink() or not path.is_dir():
                    path.unlink()
                    continue
                if path.name == CHECKPOINTS:
                    Checkpoints(path, keep=1).remove_leftovers()
                for inner in path.iterdir():
                    inner.unlink()
                path.rmdir()

    def _records(self) -> list[Path]:
        return [self.path / name for name in FORMATS if (self.path / name).suffix == ".jsonl"]

    def _write(self, name: str, parts: Iterable[str]) -> None:
        with self._naming_failures(name):
            replace_file(self.path / name, parts)

    @contextmanager
    def _naming_failures(self, name: str = "") -> Iterator[None]:
        try:
            self._keep_lock()
            yield
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TrainingError(f"{self.path / name} cannot be written: {reason}") from error


def new_directory(folder: Path, numbered: bool) -> RunDirectory:
    """Return the locked folder of a new run.

    `numbered`: where `folder` holds another run, take the next free one of NAME-2, NAME-3, ..., and
    print so. Raises RunExists otherwise, and UsageError for files that are no run. The lock decides
    between jobs that start at the same time.
    """
    for path in _names(folder):
        if path != folder and occupants(path):
            continue
        try:
            directory = RunDirectory(path)
        except RunExists:
            if not numbered:
                raise
            continue
        if path != folder:
            say(numbering(folder, path))
        return directory
    raise AssertionError("an endless series")


def free_folder(folder: Path) -> Path:
    """Return the folder that `new_directory` would take now; it may hold files that are no run."""
    return next(
        path
        for path in _names(folder)
        if not (CONFIG in occupants(path) if path == folder else occupants(path))
        and not ((path / LOCK).exists() and _is_live(path))
    )


def folder_of_job(folder: Path, job: str) -> Path | None:
    """Return the folder, `folder` or a numbered one, of the run that a job has begun; or None."""
    pattern = re.compile(rf"{re.escape(folder.name)}(-\d+)?")
    for path in folder.parent.glob(f"{glob.escape(folder.name)}*"):
        own = path / JOB_FILE
        with suppress(OSError, ValueError):
            if pattern.fullmatch(path.name) and read_text(own).split() == [job]:
                return path
    return None


def numbering(folder: Path, path: Path) -> str:
    """Return the line that reports the folder taken instead of `folder`."""
    return f"{folder} holds another run: this one is {path} (to continue the other: resume auto)"


def _names(folder: Path) -> Iterator[Path]:
    yield folder
    for number in count(2):
        yield folder.with_name(f"{folder.name}-{number}")


def occupants(folder: Path, own_lock: bool = False) -> list[str]:
    """Return the names in a folder that prevent its use for a new run.

    There are none if its run has died, without checkpoint and result. Logs and hidden files do not
    count. `own_lock`: this process holds the lock of the folder.
    """
    try:
        names = {entry.name for entry in folder.iterdir()}
    except (OSError, ValueError):  # missing or unreadable: creating it will report the error
        return []
    held = {name for name in names if name[0] != "." and name not in KEPT}
    died = {LOCK, CONFIG} <= names and held <= set(LEAVINGS) and not _keeps_anything(folder)
    return [] if died and (own_lock or not _is_live(folder)) else sorted(held)


def _is_live(run: Path) -> bool:
    """Return whether a job holds the lock, or the lock cannot be examined."""
    import fcntl  # not on Windows, where `--help` imports this module

    try:
        with open_to_read(run / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _keeps_anything(run: Path) -> bool:
    """Return whether there is a checkpoint, even damaged, a file that no run writes, or a summary
    of a run that has not died: with another status than failed or stopped, or not to be read.
    """
    saved = (run / CHECKPOINTS).glob("*step-*")  # includes those that a killed save set aside
    if any(not path.name.endswith(".partial") for path in saved):
        return True
    for name, written in FOLDERS.items():
        folder = run / name
        found = folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ()
        if any(not written.fullmatch(path.name) for path in found):
            return True
    try:
        status = read_json(run / SUMMARY).get("status")
    except FileNotFoundError:
        return False
    except (OSError, ValueError, UsageError):
        return True
    return status not in ("failed", "stopped")


def _is_at(stream: IO[str], path: Path) -> bool:
    """Return whether an open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.lstat())
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):  # another host has removed it
            raise
        return False


def _take(lock: IO[str], wait_s: float) -> None:
    """Take the lock. Raises BlockingIOError if a live job holds it for longer than `wait_s`."""
    import fcntl

    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOCK_RETRY_S)


def record_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file of records; none if it is missing. Raises UsageError."""
    try:
        yield from lines_of(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _step_of(line: str) -> float:
    """Return the step of a record; infinity for an incomplete line."""
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return math.inf
