"""The copy of a run in object storage, such as s3://bucket/runs/EXPERIMENT, by fsspec.

It has the files of the run's folder. The manifest of a checkpoint is uploaded last and removed
first, so that a checkpoint without one is none: it was cut off.
"""

import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

from hvdtrain.config.fields import AUTO, OUTPUT, SCHEME, is_output
from hvdtrain.documents import parse_json, read_text
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.files import replace_file
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
# Uploaded before a checkpoint, which is not to be there without them.
RECORDS = (JOB_FILE, METRICS, AUDITS, TRACE, EVALUATION, "mlflow.json", "wandb.json")
NAME = re.compile(r"step-[0-9]{8,}")
POINTERS = ("best", "last")
SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION", re.IGNORECASE)
SHORTEST_SECRET = 8


class StorageFailure(HvdtrainError):
    """A read or write of the storage that failed."""


class Storage:
    """The runs below an address."""

    def __init__(self, output: str) -> None:
        """Load the library for the address. Raises UsageError."""
        if not is_output(output):
            raise UsageError(f"the address of a run{OUTPUT.problem}")
        self.output, protocol = output.rstrip("/"), output.partition(SCHEME)[0]
        local = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        try:
            import fsspec

            if protocol == "memory":
                raise ValueError("memory is not shared between processes")
            self._fs, self._root = fsspec.url_to_fs(self.output, **local)
        except ImportError as error:
            raise UsageError(
                f"{output}: {protocol}:// needs a library: {error}. For s3:// run `pip "
                "install 'hvdtrain[storage]'`; for gs:// install gcsfs as well, for az:// adlfs"
            ) from error
        except Exception as error:  # of the address, or of what the library reads at its start
            raise UsageError(f"{output}: cannot be used: {_reason(error)}") from error

    def probe(self) -> None:
        """Write, read and remove a small object. Raises UsageError if that fails."""
        path, content = f"{self._root}/.hvdtrain-{secrets.token_hex(8)}", secrets.token_bytes(16)
        try:
            with _translated():
                self._fs.pipe_file(path, content)
                if self._fs.cat_file(path) != content:
                    raise StorageFailure("what was written is not what is read")
                self._fs.rm_file(path)
        except StorageFailure as error:
            raise UsageError(
                f"--output={self.output}: a trial to write, read and remove a small object there "
                f"failed: {error}. Is the bucket there, and may these credentials do all three?"
            ) from error

    def names(self) -> set[str]:
        """Return the names of all runs, complete or not. Raises StorageFailure."""
        with _translated(), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            return {path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, False)}
        return set()

    def run_of_job(self, name: str, job: str) -> str | None:
        """Return the name, `name` or a numbered one, of the run that a job has begun, or None."""
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
        self._fetch_records(folder, beat)
        last = next((name for name in newer if self._fetch_checkpoint(folder, name, beat)), "")
        if last != newer[0]:  # whose end the summary may describe
            (folder / SUMMARY).unlink(missing_ok=True)
        if not last and not here:
            raise UsageError(
                f"--resume: no checkpoint in {self.output}/{run} can be read. Restore one, or "
                "start another --experiment"
            )
        best = self._pointed(run, "best")
        if best in stored and not (folder / CHECKPOINTS / best).exists():
            self._fetch_checkpoint(folder, best, beat)
        for pointer, name in zip(POINTERS, (best, last), strict=True):
            if name and (folder / CHECKPOINTS / name).is_dir():
                replace_file(folder / CHECKPOINTS / pointer, [name, "\n"])
        if not here:  # of a run that died without a checkpoint, or of none
            (folder / LOCK).unlink(missing_ok=True)

    def upload(
        self, folder: Path, keep: int, last: str, best: str, new: Collection[str], summary: bytes
    ) -> None:
        """Upload the records of a run and the checkpoints `last` and `best`, if these names are not
        empty, and remove all others but the newest, as many as to `keep`. Raises StorageFailure.

        `new`: those to upload even if their manifests are there, as the files may be damaged.
        `summary`: of the run when `last` was its last checkpoint, or an earlier one was; or empty.
        """
        with _translated():
            config = (folder / CONFIG).read_bytes()
            for name in RECORDS:
                if (folder / name).is_file():
                    self._fs.put_file(str(folder / name), f"{self._root}/{folder.name}/{name}")
        for name in sorted({last, best} - {""}):
            self._put_checkpoint(folder, name, name in new)
        for pointer, name in zip(POINTERS, (best, last), strict=True):
            if name:
                self._write(f"{folder.name}/{CHECKPOINTS}/{pointer}", f"{name}\n".encode())
        # The configuration last: with a new length, an old summary would be that of its end.
        for name, content in ((SUMMARY, summary), (CONFIG, config)):
            if content:
                self._write(f"{folder.name}/{name}", content)
        stored = self._checkpoints(folder.name) if last else {}
        kept = {*self._complete(stored)[:keep], last, best}
        for name in stored.keys() - kept:
            for file in sorted(stored[name], key=lambda file: file != MANIFEST):
                self._remove(f"{folder.name}/{CHECKPOINTS}/{name}/{file}")

    def _put_checkpoint(self, folder: Path, name: str, is_new: bool) -> None:
        source, target = folder / CHECKPOINTS / name, f"{folder.name}/{CHECKPOINTS}/{name}"
        with _translated():
            manifest = (source / MANIFEST).read_bytes()
        stored = self._read(f"{target}/{MANIFEST}")
        if stored == manifest and not is_new:
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
        from hvdtrain.train.checkpoint import DamagedCheckpoint, load_state

        new, source = folder / CHECKPOINTS / f".{name}.partial", f"{self.output}/{folder.name}"
        try:
            self._download(f"{folder.name}/{CHECKPOINTS}/{name}", new, beat)
            load_state(new)
        except DamagedCheckpoint as error:
            say(f"resume: skipping {name} in {source}, which is damaged: {error}")
            rmtree(new)
            return False
        new.rename(folder / CHECKPOINTS / name)
        return True

    def _download(self, checkpoint: str, folder: Path, beat: Callable[[], object]) -> None:
        """Download the files of a checkpoint to a new folder. Raises StorageFailure."""
        from hvdtrain.train.checkpoint import FILES  # imports torch

        rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in FILES:
            self._get(f"{checkpoint}/{file}", folder / file, beat)

    def copy(self, run: str, name: str, folder: Path) -> Path:
        """Download the records of a run and its checkpoint of this name, or with an empty one its
        best, to a new folder; return that of the run. Raises UsageError if it has none.
        """
        stored = self._complete(self._checkpoints(run))
        wanted = (name,) if name else (*map(partial(self._pointed, run), POINTERS), *stored)
        checkpoint = next(filter(stored.__contains__, wanted), None)
        if checkpoint is None:
            raise UsageError(
                f"{self.output}/{run}: there is no complete checkpoint {name}".rstrip()
            )
        copied = folder / run / CHECKPOINTS
        self._download(f"{run}/{CHECKPOINTS}/{checkpoint}", copied / checkpoint, lambda: None)
        (copied / POINTERS[0]).write_text(checkpoint)
        self._fetch_records(folder / run, lambda: None)
        return copied.parent

    def _pointed(self, run: str, pointer: str) -> str:
        content = self._read(f"{run}/{CHECKPOINTS}/{pointer}") or b""
        return content.decode("utf-8", "replace").strip()

    def _fetch_records(self, folder: Path, beat: Callable[[], object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*RECORDS, SUMMARY, CONFIG):
            (folder / name).unlink(missing_ok=True)
            self._get(f"{folder.name}/{name}", folder / name, beat)

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

    def _get(self, path: str, file: Path, beat: Callable[[], object]) -> None:
        """Download a file, if it is there. Raises StorageFailure."""
        from fsspec.callbacks import Callback

        heard = Callback(hooks={"beat": lambda size, value, **more: beat()})
        with _translated(), suppress(FileNotFoundError):
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


def open_storage(output: str, folder: Path, resume: str | None, beat: Callable[[], object]) -> None:
    """Check the storage of a run, if it has one, before anything is begun, and fetch what is to be
    resumed. `folder`: of the run. `beat`: called as parts arrive.

    Raises UsageError, also for a failure of the storage: nothing was started.
    """
    if SCHEME not in output:
        return
    from hvdtrain.data.drawing import kept  # imports torch

    storage = Storage(output)
    with kept():  # libraries of storage may draw random numbers
        storage.probe()
        say(f"storage: {storage.output}/{folder.name}, copied from {folder}")
        if resume == AUTO:
            try:
                storage.fetch(folder, beat)
            except StorageFailure as error:
                raise UsageError(f"--resume=auto: {storage.output}: {error}") from error


def taken_names(output: str, resume: str | None) -> set[str]:
    """Return the names in the storage, if any, that a new run cannot have."""
    return Storage(output).names() if SCHEME in output and resume is None else set()


def name_of_job(output: str, folder: Path, job: str) -> str | None:
    """Return the name of the run that a job of the launcher has begun, here or on another host."""
    if (here := folder_of_job(folder, job)) or SCHEME not in output:
        return here.name if here else None
    with suppress(HvdtrainError):  # which `open_storage` reports
        return Storage(output).run_of_job(folder.name, job)
    return None


@contextmanager
def local_copy(source: str) -> Iterator[str]:
    """Yield what names a run or a checkpoint; for an address in storage, the path of a copy of it,
    with its best checkpoint, that lasts as long as the context. Raises HvdtrainError.
    """
    if SCHEME not in source:
        yield source
        return
    run, _, name = source.rstrip("/").rpartition(f"/{CHECKPOINTS}/")
    run, name = (run, name) if NAME.fullmatch(name) else (source.rstrip("/"), "")
    output, _, run = run.rpartition("/")
    with TemporaryDirectory(prefix="hvdtrain-") as folder:
        yield str(Storage(output).copy(run, name, Path(folder)))


@contextmanager
def _translated() -> Iterator[None]:
    """Raise StorageFailure for any error of the storage's library."""
    try:
        yield
    except HvdtrainError:
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
