"""One run's folder: who may write it, and the files of design and record in it."""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.files import json_ready, open_kept, open_to_read, write_new
from hvdtrain.log import say

LOCK = ".lock"
LOCK_RETRY_S = 0.5
LOGS = "logs"  # the launcher writes there before there is a run
CONFIG, SUMMARY = "config.yaml", "summary.json"
# What a run leaves that has come to nothing: all that its folder may hold to be used again.
LEAVINGS = (
    *(CONFIG, SUMMARY, "evaluation.json", "metrics.jsonl", "audit.jsonl", "trace.jsonl"),
    *("tensorboard", "profile", "checkpoints"),
)


class RunDirectory:
    """The folder of a live run, held under a lock until `close`."""

    def __init__(self, path: Path, reopen: bool = False, wait_s: float = 0.0) -> None:
        """Make the folder, or `reopen` the one that holds a run; `wait_s` for a job to leave it.

        A folder whose run has died without a checkpoint is emptied and used again, with a notice.
        Raises UsageError, touching nothing, when a new one holds anything else already, when
        another job is using it, or when it cannot be written.
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
                raise UsageError(f"--experiment={path.name}: a live job is using {path}") from None
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise UsageError(
                    f"--output={path.parent}: {path} cannot be written: {reason}"
                ) from error
            if not reopen:
                # The job that held the lock may have ended just now.
                self._refuse_occupied(own_lock=True)
                self._clear_leavings()
            undo.pop_all()
        self._streams: dict[str, IO[str]] = {}

    def write_config(self, config: dict[str, Any]) -> None:
        """The resolved configuration, as `--config` reads it."""
        import yaml

        self._write(CONFIG, yaml.safe_dump(config, sort_keys=False))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """How the run ended."""
        self._write(SUMMARY, json.dumps(json_ready(summary), indent=2) + "\n")

    def write_evaluation(self, evaluation: dict[str, Any]) -> None:
        """The newest evaluation in full; of earlier ones only the figures stay (metrics)."""
        self._write("evaluation.json", json.dumps(json_ready(evaluation)) + "\n")

    def append(self, name: str, record: dict[str, Any]) -> None:
        """Add one JSON object, on a line of its own, to a `.jsonl` file."""
        with self._telling_failures():
            stream = self._streams.get(name)
            if stream is None:
                stream = self._streams[name] = open_kept(self.path / name)
            stream.write(json.dumps(json_ready(record)) + "\n")
            stream.flush()

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps: the run will come to them again."""
        for path in self.path.glob("*.jsonl"):
            lines = path.read_text("utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            self._write(path.name, "".join(line + "\n" for line in kept))

    def close(self) -> None:
        """Let go of the lock; the folder stays."""
        for stream in self._streams.values():
            with suppress(OSError):  # a full disk: the write that failed has told of it
                stream.close()
        self._lock.close()

    def _refuse_occupied(self, own_lock: bool = False) -> None:
        held = occupants(self.path, own_lock)
        if held:
            what = "a run" if CONFIG in held else f"files ({', '.join(held[:3])}, ...)"
            raise UsageError(
                f"--experiment={self.path.name}: {self.path} already holds {what}; "
                "nothing was changed. Choose another --experiment or --output, or remove it"
            )

    def _clear_leavings(self) -> None:
        held = [self.path / name for name in LEAVINGS if (self.path / name).exists()]
        if held:
            say(f"{self.path} holds a run that ended without a checkpoint: it is started anew")
        with self._telling_failures():
            for path in held:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _write(self, name: str, text: str) -> None:
        """Complete or absent: written beside, then renamed."""
        with self._telling_failures():
            partial = self.path / f".{name}.partial"
            write_new(partial, text)
            partial.replace(self.path / name)

    @contextmanager
    def _telling_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise TrainingError(f"{self.path} cannot be written: {reason}") from error


def occupants(folder: Path, own_lock: bool = False) -> list[str]:
    """Return what keeps a folder from being a new run's: nothing where a run died too early.

    That is a run that is not live, without checkpoint and result. Logs and hidden files do not
    count. `own_lock`: this process holds the folder's.
    """
    try:
        names = {entry.name for entry in folder.iterdir()}
    except (OSError, ValueError):  # not there, or not readable: making it will tell
        return []
    held = {name for name in names if name[0] != "." and name != LOGS}
    died = {LOCK, CONFIG} <= names and held <= set(LEAVINGS) and not _keeps_anything(folder)
    return [] if died and (own_lock or not _is_live(folder)) else sorted(held)


def _is_live(run: Path) -> bool:
    """Whether a job holds its lock, or one that cannot be looked at."""
    try:
        with open_to_read(run / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _keeps_anything(run: Path) -> bool:
    """Whether there is a checkpoint, whole or damaged, or a run that ended otherwise than dead."""
    saved = (run / "checkpoints").glob("*step-*")  # also those that a kill has left set aside
    if any(not path.name.endswith(".partial") for path in saved):
        return True
    try:
        status = json.loads((run / SUMMARY).read_text("utf-8")).get("status")
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):
        return True
    return status not in ("failed", "stopped")


def _take(lock: IO[str], wait_s: float) -> None:
    """Raises BlockingIOError when a live job holds it for longer."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOCK_RETRY_S)


def _step_of(line: str) -> float:
    """The step of a record; infinite for a line that was cut short."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
