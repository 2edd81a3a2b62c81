"""What the storage of a run has to do before the run starts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.config import RunConfig
from hvdtrain.config.fields import AUTO, SCHEME
from hvdtrain.errors import UsageError
from hvdtrain.files import why_not_written
from hvdtrain.log import say
from hvdtrain.records.folders import JOB_FILE, folder_of_job
from hvdtrain.records.storage import Storage
from hvdtrain.records.stored_files import StorageFailure


def open_storage(output: str, folder: Path, resume: str | None, beat: Callable[[], object]) -> None:
    """Check the storage of a run, if it has one, before anything is begun, and fetch what is to be
    resumed. `folder`: of the run. `beat`: called as parts arrive.

    Raises UsageError, also for a failure of the storage: nothing was started.
    """
    if SCHEME not in output:
        return
    with _before_start(output) as storage:
        storage.probe()
        say(f"storage: {storage.output}/{folder.name}, copied from {folder}")
        if resume == AUTO:
            try:
                storage.fetch(folder, beat)
            except OSError as error:
                raise UsageError(
                    f"--output={output}: {folder}, the copy here, cannot be written: "
                    f"{why_not_written(folder, error)}"
                ) from error


def claim_name(options: RunConfig, name: str, run_id: str, job: str | None) -> None:
    """Record in the storage, if any, that a run which starts has this name. Raises UsageError if
    another one has. `job`: of the launcher.
    """
    if SCHEME not in options.output:
        return
    with _before_start(options.output) as storage:
        storage.claim(name, run_id, takes_over=options.resume == AUTO)
        if job:
            storage.write(f"{name}/{JOB_FILE}", f"{job}\n".encode())


def taken_names(output: str, resume: str | None) -> set[str]:
    """Return the names in the storage, if any, that a new run cannot have. Raises UsageError."""
    if SCHEME not in output or resume is not None:
        return set()
    with _before_start(output) as storage:
        return storage.names()
    raise AssertionError("an error is never suppressed")


def name_of_job(output: str, folder: Path, job: str | None) -> str | None:
    """Return the name of the run that a job of the launcher, if any, has begun, here or on another
    host. Raises UsageError for a failure of the storage.
    """
    if not job:
        return None
    if (here := folder_of_job(folder, job)) or SCHEME not in output:
        return here.name if here else None
    with _before_start(output) as storage:
        return storage.run_of_job(folder.name, job)
    raise AssertionError("an error is never suppressed")


@contextmanager
def _before_start(output: str) -> Iterator[Storage]:
    """Yield the storage. Raises UsageError for its failures, as nothing was started."""
    from hvdtrain.data.drawing import kept  # imports torch

    with kept():  # libraries of storage may draw random numbers
        try:
            yield Storage(output)
        except StorageFailure as error:
            raise UsageError(f"--output={output}: {error}") from error
