"""The copy of a run in object storage, such as s3://bucket/runs/EXPERIMENT, by fsspec.

It has the files of the run's folder. The manifest of a checkpoint is uploaded last and removed
first, so that a checkpoint without one is none: it was cut off.
"""

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import AUTO, SCHEME
from hvdtrain.documents import parse_json, read_text
from hvdtrain.errors import HvdtrainError, UsageError, refuse
from hvdtrain.log import say
from hvdtrain.records.folders import (
    AUDITS,
    CHECKPOINTS,
    CONFIG,
    EVALUATION,
    JOB_FILE,
    LOCK,
    METRICS,
    SUMMARY,
    TRACE,
    folder_of_job,
    is_locked,
)

MANIFEST = "manifest.json"
# Before a checkpoint, which is not to be there without its records; and what tells of its end.
FIRST = (CONFIG, JOB_FILE, METRICS, AUDITS, TRACE, "mlflow.json", "wandb.json")
LAST = (EVALUATION, SUMMARY)
NAME = re.compile(r"step-[0-9]{8,}")
SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION", re.IGNORECASE)
SHORTEST_SECRET = 8


class StorageFailure(HvdtrainError):
    """A read or write of the storage that failed."""


class Storage:
    """The runs below an address."""

    def __init__(self, output: str) -> None:
        """Raises UsageError without the library for the address, or for one of no storage."""
        self.output, protocol = output.rstrip("/"), output.partition(SCHEME)[0]
        local = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        try:
            import fsspec

            if protocol == "memory":
                raise ValueError("memory is not shared between processes")
            self._fs, self._root = fsspec.url_to_fs(self.output, **local)
        except ImportError as error:
            raise UsageError(
                f"--output={output}: {protocol}:// needs a library: {error}. For s3:// run `pip "
                "install 'hvdtrain[storage]'`; for gs:// install gcsfs as well, for az:// adlfs"
            ) from error
        except Exception as error:  # of the address, or of what the library reads at its start
            raise UsageError(f"--output={output}: cannot be used: {_reason(error)}") from error

    def probe(self) -> None:
        """Write, read and remove a small object. Raises UsageError if that fails."""
        path, content = f"{self._root}/.hvdtrain-{secrets.token_hex(8)}", secrets.token_bytes(16)
        try:
            with _translated():
                self._fs.pipe_file(path, content)
                same = self._fs.cat_file(path) == content
                self._fs.rm_file(path)
        except StorageFailure as error:
            raise UsageError(
                f"--output={self.output}: a trial to write, read and remove a small object there "
                f"failed: {error}. Is the bucket there, and may these credentials do all three?"
            ) from error
        if not same:
            raise UsageError(f"--output={self.output}: what was written there is not what is read")

    def names(self) -> set[str]:
        """Return the names of all runs, complete or not. Raises StorageFailure."""
        with _translated(), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            paths = self._fs.ls(self._root, detail=False)
            return {path.rstrip("/").rpartition("/")[2] for path in paths}
        return set()

    def run_of_job(self, name: str, job: str) -> str | None:
        """Return the name, `name` or a numbered one, of the run that a job of the launcher has
        begun; None if there is none. Raises StorageFailure.
        """
        numbered = re.compile(rf"{re.escape(name)}(-\d+)?")
        for run in filter(numbered.fullmatch, sorted(self.names())):
            if (self._read(f"{run}/{JOB_FILE}") or b"").split() == [job.encode()]:
                return run
        return None

    def fetch(self, folder: Path, beat: Callable[[], object]) -> None:
        """Download the newest good checkpoint of a run, the best one and the records, unless the
        folder here has a checkpoint as new, or a live job. `beat`: called as parts arrive.

        Damaged checkpoints are skipped, with a notice. Raises UsageError if there are only those,
        or if the folder has another run; and StorageFailure.
        """
        from hvdtrain.train.checkpoint import Checkpoints, step_of  # imports torch

        run, here = folder.name, Checkpoints(folder / CHECKPOINTS, keep=1).complete()
        since = step_of(here[0].name) if here else -1
        stored = self._complete(self._checkpoints(run))
        newer = [name for name in stored if step_of(name) > since]
        if not newer or ((folder / LOCK).exists() and is_locked(folder)):
            return
        if here:
            self._refuse_another_run(folder, newer[0])
        say(f"resume: {self.output}/{run} has a newer checkpoint than {folder}: downloading")
        if not any(self._fetch_checkpoint(folder, name, beat) for name in newer):
            refuse(
                [f"--resume: no checkpoint in {self.output}/{run} can be read"] if not here else [],
                ". Restore one, or start another --experiment",
            )
            return
        best = (self._read(f"{run}/{CHECKPOINTS}/best") or b"").decode("utf-8", "replace").strip()
        if best in stored and not (folder / CHECKPOINTS / best).exists():
            self._fetch_checkpoint(folder, best, beat)
        for name in (*FIRST, *LAST):
            (folder / name).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                self._get(f"{run}/{name}", folder / name, beat)
        if not here:  # of a run that died without a checkpoint, or of none
            (folder / LOCK).unlink(missing_ok=True)

    def upload(self, folder: Path, keep: int, last: str, best: str) -> None:
        """Upload the records of a run and these checkpoints, unless they are there, and remove all
        but the newest, as many as to `keep`. Raises StorageFailure.

        `last`, `best`: names; empty if there is none.
        """
        run = folder.name
        self._put(folder, FIRST)
        for name in sorted({last, best} - {""}):
            self._put_checkpoint(folder, name)
        for pointer, name in (("last", last), ("best", best)):
            if name:
                self._write(f"{run}/{CHECKPOINTS}/{pointer}", f"{name}\n".encode())
        self._put(folder, LAST)
        stored = self._checkpoints(run)
        kept = {*self._complete(stored)[:keep], last, best}
        for name in stored.keys() - kept:
            for file in sorted(stored[name], key=MANIFEST.__ne__):
                self._remove(f"{run}/{CHECKPOINTS}/{name}/{file}")

    def _put_checkpoint(self, folder: Path, name: str) -> None:
        source, target = folder / CHECKPOINTS / name, f"{folder.name}/{CHECKPOINTS}/{name}"
        with _translated():
            manifest = (source / MANIFEST).read_bytes()
        stored = self._read(f"{target}/{MANIFEST}")
        if stored == manifest:
            return
        if stored is not None:  # a step that a resumed run has saved again
            self._remove(f"{target}/{MANIFEST}")
        with _translated():
            for path in source.iterdir():
                if path.name != MANIFEST:
                    self._fs.put_file(str(path), f"{self._root}/{target}/{path.name}")
        self._write(f"{target}/{MANIFEST}", manifest)

    def _fetch_checkpoint(self, folder: Path, name: str, beat: Callable[[], object]) -> bool:
        """Download a checkpoint and return whether it is good; print the problem of another."""
        from hvdtrain.train.checkpoint import FILES, DamagedCheckpoint, load_state

        partial = folder / CHECKPOINTS / f".{name}.partial"
        rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        source = f"{folder.name}/{CHECKPOINTS}/{name}"
        try:
            for file in FILES:
                self._get(f"{source}/{file}", partial / file, beat)
            load_state(partial)
        except (DamagedCheckpoint, FileNotFoundError) as error:
            say(f"resume: skipping a damaged checkpoint in {self.output}/{source}: {error}")
            rmtree(partial)
            return False
        partial.rename(folder / CHECKPOINTS / name)
        return True

    def _refuse_another_run(self, folder: Path, name: str) -> None:
        with suppress(OSError, ValueError):
            manifest = self._read(f"{folder.name}/{CHECKPOINTS}/{name}/{MANIFEST}") or b""
            stored = parse_json(manifest.decode("utf-8", "replace")).get("run")
            if stored != read_text(folder / LOCK).strip():
                raise UsageError(
                    f"--resume: {self.output}/{folder.name} is another run than {folder}, from "
                    "which it would be copied: move one of them away, or choose another "
                    "--experiment"
                )

    def _checkpoints(self, run: str) -> dict[str, set[str]]:
        """Return the names of the files of each checkpoint, also of those that are cut off."""
        checkpoints: dict[str, set[str]] = {}
        with _translated(), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            for path in self._fs.find(f"{self._root}/{run}/{CHECKPOINTS}"):
                name, file = path.split("/")[-2:]
                if NAME.fullmatch(name):
                    checkpoints.setdefault(name, set()).add(file)
        return checkpoints

    def _complete(self, checkpoints: dict[str, set[str]]) -> list[str]:
        """Return the names of those with a manifest, newest first."""
        names = [name for name, files in checkpoints.items() if MANIFEST in files]
        return sorted(names, key=lambda name: int(name.partition("-")[2]), reverse=True)

    def _put(self, folder: Path, names: Iterable[str]) -> None:
        with _translated():
            for name in names:
                if (folder / name).is_file():
                    self._fs.put_file(str(folder / name), f"{self._root}/{folder.name}/{name}")

    def _get(self, path: str, file: Path, beat: Callable[[], object]) -> None:
        """Download a file. Raises FileNotFoundError and StorageFailure."""
        from fsspec.callbacks import Callback

        heard = Callback(hooks={"beat": lambda size, value, **more: beat()})
        with _translated():
            self._fs.get_file(f"{self._root}/{path}", str(file), callback=heard)

    def _read(self, path: str) -> bytes | None:
        with _translated(), suppress(FileNotFoundError):
            content: bytes = self._fs.cat_file(f"{self._root}/{path}")
            return content
        return None

    def _write(self, path: str, content: bytes) -> None:
        with _translated():
            self._fs.pipe_file(f"{self._root}/{path}", content)

    def _remove(self, path: str) -> None:
        with _translated(), suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{path}")


def open_storage(config: TrainConfig, beat: Callable[[], object]) -> None:
    """Check the storage of a run, if it has one, before anything is begun, and fetch what is to be
    resumed. `beat`: called as parts arrive.

    Raises UsageError, also for a failure of the storage: nothing was started.
    """
    output, resume = config.run.output, config.run.resume
    if not config.is_stored:
        return
    from hvdtrain.data.drawing import kept  # imports torch

    storage = Storage(output)
    with kept():  # libraries of storage may draw random numbers
        storage.probe()
        say(f"storage: {storage.output}/{config.experiment}, copied from {config.folder}")
        if resume == AUTO:
            try:
                storage.fetch(config.folder, beat)
            except StorageFailure as error:
                raise UsageError(f"--resume={resume}: {output}: {error}") from error


def taken_names(config: TrainConfig) -> set[str]:
    """Return the names in the storage, if any, that a new run cannot have."""
    is_new = config.run.resume is None
    return Storage(config.run.output).names() if config.is_stored and is_new else set()


def name_of_job(config: TrainConfig, job: str) -> str | None:
    """Return the name of the run that a job of the launcher has begun, here or on another host."""
    if folder := folder_of_job(config.folder, job):
        return folder.name
    if not config.is_stored:
        return None
    with suppress(HvdtrainError):  # which `open_storage` reports
        return Storage(config.run.output).run_of_job(config.experiment, job)
    return None


@contextmanager
def _translated() -> Iterator[None]:
    """Raise StorageFailure for any error of the storage's library, except FileNotFoundError."""
    try:
        yield
    except (StorageFailure, FileNotFoundError):
        raise
    except Exception as error:  # of several libraries, with no base in common
        raise StorageFailure(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return the text of an error, without what is secret in the environment."""
    text = " ".join(str(error).split()) or type(error).__name__
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text
