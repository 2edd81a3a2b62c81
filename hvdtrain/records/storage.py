"""The copy of a run in object storage, such as s3://bucket/runs/EXPERIMENT, by fsspec.

It has the files of the run's folder. The manifest of a checkpoint is uploaded last and removed
first, so that a checkpoint without one is none: it was cut off.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

from hvdtrain.config.fields import SCHEME
from hvdtrain.documents import parse_json, read_json
from hvdtrain.errors import UsageError
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
    is_locked,
    problem_of,
    put_in_place,
    run_id_of,
)
from hvdtrain.records.stored_files import StorageFailure, StoredFiles, translated

RUN_FILE = ".run"  # the id of the run that has the name
MANIFEST = "manifest.json"
# Uploaded before a checkpoint, which is not to be there without them.
RECORDS = (JOB_FILE, METRICS, AUDITS, TRACE, EVALUATION, "mlflow.json", "wandb.json")
NAME = re.compile(r"step-[0-9]{8,}")
POINTERS = ("best", "last")


class Storage(StoredFiles):
    """The runs below an address."""

    def run_of_job(self, name: str, job: str) -> str | None:
        """Return the name, `name` or a numbered one, of the run that a job has begun, or None."""
        numbered = re.compile(rf"{re.escape(name)}(-\d+)?")
        for run in filter(numbered.fullmatch, sorted(self.names())):
            if (self._read(f"{run}/{JOB_FILE}") or b"").split() == [job.encode()]:
                return run
        return None

    def claim(self, run: str, run_id: str, takes_over: bool = False) -> None:
        """Record whose name this is. Raises StorageFailure if it is another run's.

        `takes_over`: it may be that of a run that has no checkpoint there.
        """
        if (marked := self._marked(run)) == run_id:
            return
        if (marked or self._saved_by(run)) not in ("", run_id):
            if not takes_over or self._complete(self._checkpoints(run)):
                raise StorageFailure(f"another run has the name {run} there")
            self._remove(f"{run}/{JOB_FILE}")
        self.write(f"{run}/{RUN_FILE}", f"{run_id}\n".encode())

    def fetch(self, folder: Path, beat: Callable[[], object]) -> None:
        """Download the newest good checkpoint of a run, the best one and the records, unless the
        folder here has a good checkpoint as new, or a live job. `beat`: called as parts arrive.

        Damaged checkpoints, and those of other runs, are skipped, with a notice. Raises UsageError
        if there are only those, or if the folder has another run; StorageFailure; and OSError.
        """
        from hvdtrain.train.checkpoint import Checkpoints, step_of  # imports torch

        if (folder / LOCK).exists() and is_locked(folder):
            return
        run, here = folder.name, Checkpoints(folder / CHECKPOINTS, keep=1).complete()
        run_id = self._marked(run) or self._saved_by(run)
        if here and run_id and run_id_of(folder) not in ("", run_id):
            raise UsageError(
                f"--resume: {self.output}/{run} is another run than {folder}, from which it would "
                "be copied: move one of them away, or choose another --experiment"
            )
        stored = self._complete(self._checkpoints(run))
        good = next((path for path in here if not problem_of(path, "")), None) if stored else None
        since = step_of(good.name) if good else -1
        newer = [name for name in stored if step_of(name) > since]
        if not newer:
            return
        say(f"resume: {self.output}/{run} has a newer checkpoint than {folder}: downloading")
        self._fetch_records(folder, beat)
        fetched = (name for name in newer if self._fetch_checkpoint(folder, name, run_id, beat))
        last = next(fetched, "")
        _keep_summary_of(folder, step_of(last) if last else since)
        if not last and not here:
            raise UsageError(
                f"--resume: no checkpoint in {self.output}/{run} can be read. Restore one, or "
                "start another --experiment"
            )
        best = self._pointed(run, "best")
        if best in stored and not (folder / CHECKPOINTS / best).exists():
            self._fetch_checkpoint(folder, best, run_id, beat)
        _point(folder / CHECKPOINTS, best, last)
        if not here:  # of a run that died without a checkpoint, or of none
            (folder / LOCK).unlink(missing_ok=True)

    def upload(
        self, folder: Path, keep: int, last: str, best: str, new: Collection[str], summary: bytes
    ) -> None:
        """Upload the records of a run and the checkpoints `last` and `best`, if these names are not
        empty, and remove all others but the newest, as many as to `keep`. Raises StorageFailure,
        also if another run has the name there.

        `new`: those to upload even if their manifests are there, as the files may be damaged.
        `summary`: of the run when `last` was its last checkpoint, or an earlier one was; or empty.
        """
        if run_id := run_id_of(folder):
            self.claim(folder.name, run_id)
        with translated():
            config = (folder / CONFIG).read_bytes()
            for name in RECORDS:
                if (folder / name).is_file():
                    self._fs.put_file(str(folder / name), f"{self._root}/{folder.name}/{name}")
        for name in sorted({last, best} - {""}):
            self._put_checkpoint(folder, name, name in new)
        for pointer, name in zip(POINTERS, (best, last), strict=True):
            if name:
                self.write(f"{folder.name}/{CHECKPOINTS}/{pointer}", f"{name}\n".encode())
        # The configuration last: with a new length, an old summary would be that of its end.
        for name, content in ((SUMMARY, summary), (CONFIG, config)):
            if content:
                self.write(f"{folder.name}/{name}", content)
        stored = self._checkpoints(folder.name) if last else {}
        kept = {*self._complete(stored)[:keep], last, best}
        for name in stored.keys() - kept:
            for file in sorted(stored[name], key=lambda file: file != MANIFEST):
                self._remove(f"{folder.name}/{CHECKPOINTS}/{name}/{file}")

    def _put_checkpoint(self, folder: Path, name: str, is_new: bool) -> None:
        source, target = folder / CHECKPOINTS / name, f"{folder.name}/{CHECKPOINTS}/{name}"
        with translated():
            manifest = (source / MANIFEST).read_bytes()
        stored = self._read(f"{target}/{MANIFEST}")
        if stored == manifest and not is_new:
            return
        if stored is not None:  # a step that a resumed run has saved again
            self._remove(f"{target}/{MANIFEST}")
        with translated():
            for path in source.iterdir():
                if path.name != MANIFEST:
                    self._fs.put_file(str(path), f"{self._root}/{target}/{path.name}")
        self.write(f"{target}/{MANIFEST}", manifest)

    def _fetch_checkpoint(
        self, folder: Path, name: str, run_id: str, beat: Callable[[], object]
    ) -> bool:
        """Download a checkpoint and return whether it is a good one of the run; print the problem
        of another.
        """
        from hvdtrain.train.checkpoint import PARTIAL

        final, source = folder / CHECKPOINTS / name, f"{self.output}/{folder.name}"
        new = final.with_name(f".{name}{PARTIAL}")
        self._download(f"{folder.name}/{CHECKPOINTS}/{name}", new, beat)
        if problem := problem_of(new, run_id):
            say(f"resume: skipping {name} in {source}, which is {problem}")
            rmtree(new)
            return False
        put_in_place(new, final)
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

    def _marked(self, run: str) -> str:
        """Return the id of the run that has claimed a name, or an empty text."""
        return (self._read(f"{run}/{RUN_FILE}") or b"").decode("utf-8", "replace").strip()

    def _saved_by(self, run: str) -> str:
        """Return the id of the run that has written the newest checkpoint, or an empty text."""
        for name in self._complete(self._checkpoints(run)):
            with suppress(ValueError):
                manifest = self._read(f"{run}/{CHECKPOINTS}/{name}/{MANIFEST}") or b""
                if run_id := parse_json(manifest.decode("utf-8", "replace")).get("run"):
                    return str(run_id)
        return ""

    def _checkpoints(self, run: str) -> dict[str, set[str]]:
        """Return the names of the files of each checkpoint, also of those that are cut off."""
        checkpoints: dict[str, set[str]] = {}
        with translated(), suppress(FileNotFoundError):
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


def _keep_summary_of(folder: Path, step: int) -> None:
    """Remove the summary of a run unless it describes the end at this step."""
    with suppress(OSError, ValueError):
        if read_json(folder / SUMMARY).get("steps") == step:
            return
    (folder / SUMMARY).unlink(missing_ok=True)


def _point(checkpoints: Path, best: str, last: str) -> None:
    for pointer, name in zip(POINTERS, (best, last), strict=True):
        if name and (checkpoints / name).is_dir():
            replace_file(checkpoints / pointer, [name, "\n"])
