"""The folder of a live run: its lock, configuration, summary, evaluation and record files."""

import errno
import json
import math
import os
import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hvdtrain.documents import FORMATS, parse_json, read_json, read_text, refuse_newer, stamped
from hvdtrain.errors import PeerFailure, TrainingError, UsageError
from hvdtrain.files import (
    candidates,
    hold,
    json_ready,
    open_kept,
    replace_file,
    why_not_written,
    write_new,
)
from hvdtrain.log import say
from hvdtrain.records.folders import (
    CHECKPOINTS,
    CONFIG,
    EVALUATION,
    JOB_FILE,
    LEAVINGS,
    LOCK,
    SUMMARY,
    numbering,
    occupants,
    record_lines,
)

LOCK_RETRY_S = 0.5


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
                raise RunExists(f"--experiment={path.name}: a live job is using {path}") from None
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"--output={path.parent}: {path} cannot be written: "
                    f"{why_not_written(path, error)}"
                ) from error
            if not reopen:
                # The job that held the lock may have ended just now.
                self._refuse_occupied(holds_lock=True)
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
        steps = (_step_of(line) for path in self._records() for line in record_lines(path))
        return int(max((step for step in steps if step < math.inf), default=0))

    def tracked_as(self, tracker: str) -> str | None:
        """Return the id of the run in a tracker, if an earlier start has stored one."""
        run_id: str | None = None
        with suppress(OSError, ValueError):
            run_id = parse_json(read_text(self.path / f"{tracker}.json")).get("run_id")
        return run_id

    def track_as(self, tracker: str, run_id: str) -> None:
        """Store the id of the run in a tracker, by which a later start continues its record."""
        self._write(f"{tracker}.json", [json.dumps({"run_id": run_id}), "\n"])

    def reopen_summary(self, head: dict[str, Any] | None) -> None:
        """Let the summary of an earlier start name `head`, with which the trace now ends, and not
        say that the run has finished: it is being made longer, and may be killed.
        """
        with suppress(OSError, ValueError):
            summary = read_json(self.path / SUMMARY) | {"trace": head}
            status = summary.get("status")
            self.write_summary(summary | {"status": "stopped" if status == "finished" else status})

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
        if run_id := self._lock.read(64).strip():
            return run_id
        run_id = self._id_of_checkpoints() or secrets.token_hex(16)
        print(run_id, file=self._lock, flush=True)
        return run_id

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
        print(self.run_id, file=lock, flush=True)
        self._lock.close()
        self._lock = lock

    def _refuse_occupied(self, holds_lock: bool = False) -> None:
        if held := occupants(self.path, holds_lock):
            what = "a run" if CONFIG in held else f"files ({', '.join(held[:3])}, ...)"
            kind = RunExists if CONFIG in held else UsageError
            raise kind(
                f"--experiment={self.path.name}: {self.path} already holds {what}; "
                "nothing was changed. Choose another --experiment or --output, or remove it"
            )

    def _clear_leavings(self) -> None:
        from hvdtrain.train.checkpoint import Checkpoints

        held = [leaving for name in LEAVINGS if os.path.lexists(leaving := self.path / name)]
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


def new_directory(folder: Path, numbered: bool, taken: Collection[str] = ()) -> RunDirectory:
    """Return the locked folder of a new run.

    `numbered`: where `folder` holds another run, or its name is one of `taken`, take the next free
    one of NAME-2, NAME-3, ..., and print so. Raises RunExists otherwise, and UsageError for files
    that are no run. The lock decides between jobs that start at the same time.
    """
    for path in candidates(folder):
        if path.name in taken or (path != folder and occupants(path)):
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


def complete_summary(
    folder: Path, start: dict[str, Any], ending: dict[str, Any], since_s: float
) -> None:
    """Write the end of a run into its summary, unless the run, which began after `since_s`, has
    written its own cause, or has not come as far as its configuration.

    `start`: what the summary of a run that has written none begins with. Raises HvdtrainError,
    OSError and ValueError.
    """
    path, config = folder / SUMMARY, folder / CONFIG
    if not config.exists() or config.stat().st_mtime < since_s:
        return
    held = read_json(path) if path.exists() else {}
    is_current = path.exists() and path.stat().st_mtime >= since_s
    if is_current and not str(held.get("error")).startswith(PeerFailure.__name__):
        return
    if not is_current:
        held.pop("started", None)
    with closing(RunDirectory(folder, reopen=True)) as directory:
        directory.write_summary({**start, **held, **ending})


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
    deadline = time.monotonic() + wait_s
    while True:
        try:
            hold(lock)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOCK_RETRY_S)


def _step_of(line: str) -> float:
    """Return the step of a record; infinity for an incomplete line."""
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return math.inf
