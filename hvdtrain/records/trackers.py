"""Records of a run in experiment trackers, MLflow and Weights & Biases, beside the run's folder.

Each tracker is served by a thread with a queue, so that training never waits for a network. One
that fails is left out from then on, with a warning; it never ends the training.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from hvdtrain.errors import refuse
from hvdtrain.log import complain, say
from hvdtrain.records.directory import RunDirectory
from hvdtrain.records.mlflow_record import MlflowRecord
from hvdtrain.records.wandb_record import WandbRecord

OPEN_S = 60.0  # for a tracker to open its record, before training goes on and records wait
CLOSE_S = 60.0  # for the last records of a finished run
FAILED_CLOSE_S = 4.0  # of another: horovodrun kills this worker five seconds after another failed


class Record(Protocol):
    """The record of one run in one tracker; its methods may raise any error of its library."""

    def open(self) -> str:
        """Open the record, or continue that of a resumed run; return where it is."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step, unless they were recorded before a resume."""

    def end(self, status: str, summary: dict[str, Any]) -> None:
        """Add the summary, and mark the run as ended."""


RECORDS: dict[str, Callable[[RunDirectory, dict[str, Any], int], Record]] = {
    "mlflow": MlflowRecord,
    "wandb": WandbRecord,
}


class Tracker:
    """A writer of scalars to one tracker."""

    def __init__(self, name: str, open_record: Callable[[], Record]) -> None:
        """Open the record; `open_record` imports the library, and raises what it raises."""
        self._name = name
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._opened, self._failed = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name=f"hvdtrain {name}", daemon=True)
        try:
            self._record = open_record()  # imports are safest on the main thread
        except Exception as error:
            self._give_up(error)
            return
        self._thread.start()
        self._opened.wait(OPEN_S)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step, in the background."""
        if not self._failed:
            self._queue.put(partial(self._record.scalars, step, dict(values)))

    def close(self, status: str, summary: dict[str, Any]) -> None:
        """Mark the run as ended, and wait until all is recorded."""
        if self._failed:
            return
        self._queue.put(partial(self._record.end, status, dict(summary)))
        self._queue.put(None)
        limit_s = CLOSE_S if status == "finished" else FAILED_CLOSE_S
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._give_up(TimeoutError(f"the last records were not taken in {limit_s:g} s"))

    def _work(self) -> None:
        try:
            say(f"{self._name}: {self._record.open()}")
            self._opened.set()
            while action := self._queue.get():
                action()
        except Exception as error:
            self._give_up(error)
        finally:
            self._opened.set()

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            complain(
                f"hvdtrain: warning: --log-to {self._name}: the training goes on without it: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            )


def check_trackers(names: str | None) -> None:
    """Raise UsageError, with all problems, if the library of a tracker is missing."""
    refuse(
        f"--log-to={names}: the library of {name} is not installed on the host of rank 0: "
        f"pip install 'hvdtrain[{name}]'"
        for name in (names.split(",") if names else ())
        if not all(map(_is_installed, _libraries(name)))
    )


def open_trackers(
    names: str | None, directory: RunDirectory, options: dict[str, Any], recorded: int
) -> list[Tracker]:
    """Return the trackers of a run, with open records.

    `options`: all options, as resolved. `recorded`: the last step that was recorded before a
    resume, which may be later than the checkpoint.
    """
    return [
        Tracker(name, partial(RECORDS[name], directory, options, recorded))
        for name in (names.split(",") if names else ())
    ]


def _is_installed(library: str) -> bool:
    # A folder of that name in the current one, such as wandb's own, counts as no library.
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


def _libraries(name: str) -> tuple[str, ...]:
    # MLflow's local store, its default, is a database.
    is_local = name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI")
    return (name, "sqlalchemy", "alembic") if is_local else (name,)
