"""Folders of runs: the names of their files, and which folder a new run may take."""

import glob
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hvdtrain.documents import lines_of, parse_json, read_json, read_text
from hvdtrain.errors import UsageError
from hvdtrain.files import candidates, open_to_read

LOCK = ".lock"
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


def free_folder(folder: Path) -> Path:
    """Return the folder that `new_directory` would take now; it may hold files that are no run."""
    return next(
        path
        for path in candidates(folder)
        if not (CONFIG in occupants(path) if path == folder else occupants(path))
        and not ((path / LOCK).exists() and is_locked(path))
    )


def folder_of_job(folder: Path, job: str) -> Path | None:
    """Return the folder, `folder` or a numbered one, of the run that a job has begun; or None."""
    pattern = re.compile(rf"{re.escape(folder.name)}(-\d+)?")
    for path in folder.parent.glob(f"{glob.escape(folder.name)}*"):
        with suppress(OSError, ValueError):
            if pattern.fullmatch(path.name) and read_text(path / JOB_FILE).split() == [job]:
                return path
    return None


def run_id_of(folder: Path) -> str:
    """Return the id of the run in a folder, from its lock or a checkpoint; empty without one."""
    with suppress(OSError, ValueError):
        if run_id := read_text(folder / LOCK).strip():
            return run_id
    checkpoints = folder / CHECKPOINTS
    if not checkpoints.is_symlink():  # where other runs may have theirs
        for path in sorted(checkpoints.glob("step-*/manifest.json"), reverse=True):
            with suppress(OSError, ValueError):
                if saved_by := parse_json(read_text(path)).get("run"):
                    return str(saved_by)
    return ""


def problem_of(checkpoint: Path, run_id: str) -> str:
    """Return why a checkpoint that was copied here is not a good one of the run, or an empty text.
    Of a run without an id, as early ones are, any good one is.
    """
    # Imports torch, which the launcher does without.
    from hvdtrain.train.checkpoint import DamagedCheckpoint, load_state, read_manifest

    try:
        load_state(checkpoint)
        other = run_id and read_manifest(checkpoint).get("run") not in (None, run_id)
    except DamagedCheckpoint as error:
        return f"damaged: {error}"
    return "of another run" if other else ""


def put_in_place(new: Path, final: Path) -> None:
    """Give a checkpoint that was copied here its name. Raises OSError."""
    from hvdtrain.train.checkpoint import REPLACED, Checkpoints

    if final.exists():  # a damaged one
        final.rename(final.with_name(f".{final.name}{REPLACED}"))
    new.rename(final)
    Checkpoints(final.parent, keep=1).put_back()


def numbering(folder: Path, path: Path) -> str:
    """Return the line that reports the folder taken instead of `folder`."""
    return f"{folder} holds another run: this one is {path} (to continue the other: resume auto)"


def occupants(folder: Path, holds_lock: bool = False) -> list[str]:
    """Return the names in a folder that prevent its use for a new run.

    There are none if its run has died, without checkpoint and result. Logs and hidden files do not
    count. `holds_lock`: this process holds the lock of the folder.
    """
    try:
        names = {entry.name for entry in folder.iterdir()}
    except (OSError, ValueError):  # missing or unreadable: creating it will report the error
        return []
    held = {name for name in names if name[0] != "." and name not in KEPT}
    died = {LOCK, CONFIG} <= names and held <= set(LEAVINGS) and not _keeps_anything(folder)
    return [] if died and (holds_lock or not is_locked(folder)) else sorted(held)


def is_locked(run: Path) -> bool:
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
        entries = folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ()
        if any(not written.fullmatch(path.name) for path in entries):
            return True
    try:
        return read_json(run / SUMMARY).get("status") not in ("failed", "stopped")
    except FileNotFoundError:
        return False
    except (OSError, ValueError, UsageError):
        return True


def record_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file of records; none if it is missing. Raises UsageError."""
    try:
        yield from lines_of(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
