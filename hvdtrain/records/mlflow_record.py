"""The record of a run in MLflow."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from hvdtrain.records.directory import RunDirectory

EXPERIMENT = "hvdtrain"  # unless MLFLOW_EXPERIMENT_NAME is set
STATUSES = {"finished": "FINISHED", "stopped": "KILLED"}  # all others: FAILED
MOST_METRICS, MOST_OTHERS = 1000, 100  # of one call
LONGEST_VALUE = 5000  # of a tag, in letters


class MlflowRecord:
    """The record of a run in the store of MLFLOW_TRACKING_URI, or MLflow's own local one."""

    def __init__(self, directory: RunDirectory, options: dict[str, Any], recorded: int) -> None:
        """Import the library. `recorded` is not needed: the store has the last steps itself."""
        import mlflow
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._entities = mlflow.entities
        self._missing = mlflow.exceptions.MlflowException
        self._client = MlflowClient()
        self._directory, self._options = directory, options
        self._run = ""
        self._steps: dict[str, int] | None = None  # the last one of each metric, after a resume

    def open(self) -> str:
        held = self._directory.read_tracker("mlflow").get("run_id")
        existing = self._find(held) if held else None
        if existing:
            self._run, self._steps = existing.info.run_id, {}
            self._client.update_run(self._run, status="RUNNING")
        else:
            created = self._client.create_run(
                self._experiment(), run_name=self._directory.path.name
            )
            self._run = created.info.run_id
            self._directory.write_tracker("mlflow", {"run_id": self._run})
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
        self._client.set_terminated(self._run, STATUSES.get(status, "FAILED"))

    def _find(self, run: str) -> Any:
        """Return a run with its parameters; None if the store does not have it (any more)."""
        try:
            existing = self._client.get_run(run)
        except self._missing as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return existing if existing.info.lifecycle_stage == "active" else None

    def _experiment(self) -> str:
        if experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return experiment_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except self._missing:  # another job may have created it just now
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _add_options(self, held: Mapping[str, str]) -> None:
        """Add the options as parameters, which cannot change: those that have, as tags."""
        values = {name: str(value) for name, value in self._options.items()}
        new = [
            self._entities.Param(name, value[:LONGEST_VALUE])
            for name, value in values.items()
            if name not in held
        ]
        self._log("params", new, MOST_OTHERS)
        changed = {n: v for n, v in values.items() if held.get(n, v) != v[:LONGEST_VALUE]}
        self._add_tags({f"resumed/{name}": value for name, value in changed.items()})

    def _add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(_metric(name), float(value), now_ms, step)
            for name, value in values.items()
            if not math.isinf(value)  # a database stores another number in its place
        ]
        self._log("metrics", metrics, MOST_METRICS)

    def _add_tags(self, values: Mapping[str, Any]) -> None:
        tags = [
            self._entities.RunTag(_metric(name), str(value)[:LONGEST_VALUE])
            for name, value in values.items()
        ]
        self._log("tags", tags, MOST_OTHERS)

    def _log(self, kind: str, entities: list[Any], most: int) -> None:
        """Add params, metrics or tags (`kind`), at most so many in one call."""
        for start in range(0, len(entities), most):
            part = {kind: entities[start : start + most]}
            self._client.log_batch(self._run, synchronous=True, **part)

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
