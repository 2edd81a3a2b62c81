"""The event log of a run: lines of JSON, and scalars for TensorBoard and other writers."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.audit import AuditRecord
from hvdtrain.files import json_ready, make_folder, why_not_written
from hvdtrain.log import complain
from hvdtrain.records.directory import RunDirectory
from hvdtrain.records.folders import AUDITS, METRICS, TENSORBOARD
from hvdtrain.records.trackers import Tracker
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.metering import Totals

NO_FIGURES: Mapping[str, float] = {}


class TensorBoardFiles:
    """A writer of event files for TensorBoard; where they cannot be written, training goes on
    without them.
    """

    def __init__(self, folder: Path, resumed_from: int) -> None:
        """`resumed_from`: the step to resume from; later scalars are dropped."""
        self._folder = folder
        # Slow, and only for rank 0.
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        self._writer: Any = None  # a SummaryWriter
        with self._tolerating():
            make_folder(folder)
            self._writer = SummaryWriter(str(folder), purge_step=resumed_from + 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step, as one event: a third of the work of one for each."""
        if writer := self._writer:
            with self._tolerating():
                self._folder.stat()  # of files that were removed nothing else is noticed
                tagged = [{"tag": name, "simple_value": v} for name, v in values.items()]
                writer.file_writer.add_summary(self._summary(value=tagged), step)

    def close(self, status: str, summary: dict[str, Any]) -> None:
        """Complete the files, which hold nothing of status and summary."""
        if writer := self._writer:
            with self._tolerating():
                writer.close()

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            complain(
                f"hvdtrain: warning: {self._folder}: cannot be written: "
                f"{why_not_written(self._folder, error)}: the training goes on without it"
            )


def _report_no_trace(arguments: threading.ExceptHookArgs) -> None:
    """Leave out the trace of TensorBoard's thread, whose error the next call raises."""
    if type(arguments.thread).__name__ != "_AsyncWriterThread":
        _usual_hook(arguments)


_usual_hook, threading.excepthook = threading.excepthook, _report_no_trace


class EventLog:
    """An observer on rank 0 that writes to the run directory."""

    def __init__(
        self,
        directory: RunDirectory,
        resumed_from: int = 0,
        classes: Sequence[str] = (),
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """`resumed_from`: a step. `classes`: names. `trackers`: of scalars, besides TensorBoard."""
        self._directory, self._classes = directory, list(classes)
        self._writers: list[TensorBoardFiles | Tracker] = [
            TensorBoardFiles(directory.path / TENSORBOARD, resumed_from),
            *trackers,
        ]

    def interval_end(
        self,
        totals: Totals,
        lr: float,
        gpu: Mapping[str, float] = NO_FIGURES,
        stragglers: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write one line for a logged step; `gpu`: figures of rank 0's GPU, if it has one."""
        norm = {"gradient_norm": totals.gradient_norm}
        phases = {f"{name}_s": seconds for name, seconds in totals.phases_s.items()}
        figures = {f"gpu_{name}": value for name, value in gpu.items()}
        slow = {"stragglers": stragglers} if stragglers else {}
        self._directory.append(
            METRICS, {"kind": "step", **_trained(totals, lr), **norm, **figures, **phases, **slow}
        )
        scalars = {
            "train/loss": totals.loss,
            "samples_per_s": totals.samples_per_s,
            "lr": lr,
            **{f"train/{name}": value for name, value in totals.metrics.items()},
            **{f"phase/{name}": seconds for name, seconds in phases.items()},
            **{f"gpu/{name}": value for name, value in gpu.items()},
            **{name: value for name, value in norm.items() if value is not None},
        }
        self._scalars(totals.step, scalars)

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None:
        """Write one line for an epoch; `evaluation`: None if it was not due."""
        record = {"kind": "epoch", **_trained(totals, lr), "samples": totals.samples}
        evaluated = self._evaluation(totals, evaluation) if evaluation else {}
        self._directory.append(METRICS, record | evaluated)

    def evaluated(self, totals: Totals, evaluation: Evaluation) -> None:
        """Write one line for an evaluation within an epoch."""
        record = {
            "kind": "evaluation",
            "step": totals.step,
            "epoch": totals.epoch,
            "samples_seen": totals.samples_seen,
            **self._evaluation(totals, evaluation),
        }
        self._directory.append(METRICS, record)

    def _evaluation(self, totals: Totals, evaluation: Evaluation) -> dict[str, Any]:
        """Write an evaluation's file and scalars; return its fields of a line."""
        figures = {"loss": evaluation.loss, **evaluation.metrics}
        self._directory.write_evaluation(
            {"step": totals.step, "samples": evaluation.samples, **figures}
            | evaluation.plain()["tables"]
            | {"classes": self._classes}
        )
        self._scalars(totals.step, {f"valid/{name}": v for name, v in figures.items()})
        accuracy = evaluation.class_accuracy()  # the table itself is too long for a line
        return valid_fields(evaluation) | ({"valid_class_accuracy": accuracy} if accuracy else {})

    def audited(self, record: AuditRecord) -> None:
        """Write one line for an audit."""
        self._directory.append(AUDITS, asdict(record))
        self._scalars(record.step, {"audit/worst_error_over_bound": record.worst_error_over_bound})

    def close(self, summary: dict[str, Any]) -> None:
        """Complete what the writers have written; `summary`: of the run."""
        for writer in self._writers:
            writer.close(summary["status"], json_ready(summary))

    def _scalars(self, step: int, scalars: dict[str, float]) -> None:
        for writer in self._writers:
            writer.scalars(step, scalars)


def valid_fields(evaluation: Evaluation) -> dict[str, Any]:
    """Return the figures of an evaluation, as lines of records and the summary name them."""
    figures = {"loss": evaluation.loss, **evaluation.metrics, "samples": evaluation.samples}
    return {f"valid_{name}": value for name, value in figures.items()}


def _trained(totals: Totals, lr: float) -> dict[str, Any]:
    return {
        "step": totals.step,
        "epoch": totals.epoch,
        "samples_seen": totals.samples_seen,
        "train_loss": totals.loss,
        **{f"train_{name}": value for name, value in totals.metrics.items()},
        "samples_per_s": totals.samples_per_s,
        "lr": lr,
    }
