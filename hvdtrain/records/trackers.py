"""Records of a run in experiment trackers, MLflow and Weights & Biases, beside the run's folder.

Each tracker is served by a thread with a queue, so that training never waits for a network. One
that fails is left out from then on, with a warning; it never ends the training.
"""

import importlib.util
import logging
import math
import netrc
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from hvdtrain.errors import refuse
from hvdtrain.log import complain, say
from hvdtrain.records.directory import RunDirectory

OPEN_S = 60.0  # for a tracker to open its record, before training goes on and records wait
CLOSE_S = 60.0  # for the last records of a finished run
FAILED_CLOSE_S = 4.0  # of another: horovodrun kills this worker five seconds after another failed
GROUP = "hvdtrain"  # of runs: unless MLFLOW_EXPERIMENT_NAME, or WANDB_PROJECT, is set
MLFLOW_STATUSES = {"finished": "FINISHED", "stopped": "KILLED"}  # all others: FAILED
MOST_METRICS, MOST_OTHERS = 1000, 100  # of one call of MLflow
LONGEST_VALUE = 5000  # of a tag of MLflow, in letters


class Record:
    """The record of one run in one tracker; its methods may raise any error of its library."""

    name: str  # of the tracker, as --log-to gives it, and of its library

    def __init__(self, directory: RunDirectory, options: dict[str, Any], recorded: int) -> None:
        """Import the library. `recorded`: the last step of an earlier start; only later count."""
        self._library: Any = importlib.import_module(self.name)
        self._directory, self._options, self._recorded = directory, options, recorded

    def open(self) -> str:
        """Open the record, or continue that of a resumed run; return where it is."""
        raise NotImplementedError

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step, unless they were recorded before a resume."""

    def end(self, status: str, summary: dict[str, Any]) -> None:
        """Add the summary, and mark the run as ended."""


class MlflowRecord(Record):
    """The record of a run in the store of MLFLOW_TRACKING_URI, or MLflow's own local one, which has
    the last steps itself.
    """

    name = "mlflow"
    _run = ""
    _steps: dict[str, int] | None = None  # the last one of each metric, after a resume

    def __init__(self, directory: RunDirectory, options: dict[str, Any], recorded: int) -> None:
        super().__init__(directory, options, recorded)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client = self._library.MlflowClient()

    def open(self) -> str:
        held = self._directory.tracked_as(self.name)
        existing = self._find(held) if held else None
        if existing:
            self._run, self._steps = existing.info.run_id, {}
            self._client.update_run(self._run, status="RUNNING")
        else:
            created = self._client.create_run(
                self._experiment(), run_name=self._directory.path.name
            )
            self._run = created.info.run_id
            self._directory.track_as(self.name, self._run)
        self._add_options(existing.data.params if existing else {})
        return f"run {self._run} in {self._client.tracking_uri}"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        new = {name: v for name, v in values.items() if step > self._last_step(_metric(name))}
        self._add_metrics(step, new)

    def end(self, status: str, summary: dict[str, Any]) -> None:
        facts = dict(_flat("summary", summary))
        numbers = {n: v for n, v in facts.items() if isinstance(v, int | float)}
        self._add_metrics(summary["steps"], numbers)
        self._add_tags({n: v for n, v in facts.items() if n not in numbers and v is not None})
        self._client.set_terminated(self._run, MLFLOW_STATUSES.get(status, "FAILED"))

    def _find(self, run: str) -> Any:
        """Return a run with its parameters; None if the store does not have it (any more)."""
        try:
            existing = self._client.get_run(run)
        except self._library.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return existing if existing.info.lifecycle_stage == "active" else None

    def _experiment(self) -> str:
        if experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return experiment_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", GROUP)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except self._library.exceptions.MlflowException:  # another job may just have created it
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _add_options(self, held: Mapping[str, str]) -> None:
        """Add the options as parameters, which cannot change: those that have, as tags."""
        values = {name: str(value) for name, value in self._options.items()}
        new = [
            self._library.entities.Param(name, value[:LONGEST_VALUE])
            for name, value in values.items()
            if name not in held
        ]
        self._log("params", new, MOST_OTHERS)
        changed = {n: v for n, v in values.items() if held.get(n, v) != v[:LONGEST_VALUE]}
        self._add_tags({f"resumed/{name}": value for name, value in changed.items()})

    def _add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._library.entities.Metric(_metric(name), float(value), now_ms, step)
            for name, value in values.items()
            if not math.isinf(value)  # a database stores another number in its place
        ]
        self._log("metrics", metrics, MOST_METRICS)

    def _add_tags(self, values: Mapping[str, Any]) -> None:
        tags = [
            self._library.entities.RunTag(_metric(name), str(value)[:LONGEST_VALUE])
            for name, value in values.items()
        ]
        self._log("tags", tags, MOST_OTHERS)

    def _log(self, kind: str, entities: list[Any], most: int) -> None:
        """Add params, metrics or tags (`kind`), at most so many in one call."""
        for start in range(0, len(entities), most):
            self._client.log_batch(
                self._run, synchronous=True, **{kind: entities[start : start + most]}
            )

    def _last_step(self, metric: str) -> int:
        """Return the last step of a metric that the store had before a resume, or 0."""
        if self._steps is None:
            return 0
        if metric not in self._steps:
            history = self._client.get_metric_history(self._run, metric)
            self._steps[metric] = max((point.step for point in history), default=0)
        return self._steps[metric]


def _metric(name: str) -> str:
    """Return a name with the letters that MLflow allows."""
    return re.sub(r"[^\w\-. /:]", "_", name, flags=re.ASCII)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value of nested dictionaries, under a name such as summary/best/step."""
    if not isinstance(value, dict):
        yield prefix, str(value) if isinstance(value, bool | list | tuple) else value
        return
    for name, item in value.items():
        yield from _flat(f"{prefix}/{name}", item)


class WandbRecord(Record):
    """The record of a run in Weights & Biases: in the run's folder, unless the user has logged in
    or set WANDB_MODE.
    """

    name = "wandb"
    _run: Any = None

    def open(self) -> str:
        run_id = self._directory.tracked_as(self.name)
        if not run_id:
            run_id, self._recorded = secrets.token_hex(4), 0
            self._directory.track_as(self.name, run_id)
        settings = self._library.setup().settings
        is_chosen = settings.mode != "online" or "WANDB_MODE" in os.environ
        self._run = self._library.init(
            project=os.environ.get("WANDB_PROJECT", GROUP),
            name=self._directory.path.name,
            id=run_id,
            resume="allow",
            dir=str(self._directory.path),
            mode=None if is_chosen or _has_login(settings) else "offline",
            reinit="create_new",  # a run of the user's own code stays apart
            # Output is in the run's folder already, and the console belongs to the progress.
            settings=self._library.Settings(silent=True, console="off"),
        )
        self._run.config.update(self._options, allow_val_change=True)
        if not self._run.offline:
            return str(self._run.url)
        return f"run {run_id}; to upload it: wandb sync {Path(self._run.dir).parent}"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._recorded:
            self._run.log(dict(values), step=step)

    def end(self, status: str, summary: dict[str, Any]) -> None:
        self._run.summary.update({"summary": summary})
        self._run.finish(exit_code=int(status != "finished"))  # 1 marks it as failed
        if self._library.run is None:  # otherwise it is the user's own, which goes on
            # Only this waits until wandb's own process has written the file.
            self._library.teardown()


def _has_login(settings: Any) -> bool:
    """Return whether there is a key for the server, in the environment or in a netrc file."""
    if settings.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(settings.base_url).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


RECORDS = {record.name: record for record in (MlflowRecord, WandbRecord)}


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
