"""The event log of a run: lines of JSON, and scalars for TensorBoard and other writers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.audit import AuditRecord
from hvdtrain.files import json_ready, make_folder, why_not_written
from hvdtrain.log import complain
from hvdtrain.records.directory import AUDITS, METRICS, TENSORBOARD, RunDirectory
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.metering import Totals

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

NO_FIGURES: Mapping[str, float] = {}


class Writer(Protocol):
    """A receiver of scalars by step."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step."""

    def close(self, status: str, summary: dict[str, Any]) -> None:
        """Complete the files or the record; `summary`: of a run that ended with `status`."""


class TensorBoardFiles:
    """A writer of event files for TensorBoard; where they cannot be written, training goes on
    without them.
    """

    def __init__(self, folder: Path, resumed_from: int) -> None:
        """`resumed_from`: the step to resume from; later scalars are dropped."""
        self._folder = folder
        from torch.utils.tensorboard import SummaryWriter  # slow, and only for rank 0

        self._writer: SummaryWriter | None = None
        with self._tolerating():
            make_folder(folder)
            self._writer = SummaryWriter(str(folder), purge_step=resumed_from + 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if writer := self._writer:
            with self._tolerating():
                self._folder.stat()  # of files that were removed nothing else is noticed
                for name, value in values.items():
                    writer.add_scalar(name, value, step)

    def close(self, status: str, summary: dict[str, Any]) -> None:
        if writer := self._writer:
            with self._tolerating():
                writer.close()

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            reason = why_not_written(self._folder, error)
            complain(
                f"hvdtrain: warning: {self._folder}: cannot be written: {reason}: the training "
                "goes on without it"
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
        writers: Sequence[Writer] = (),
    ) -> None:
        """`resumed_from`: a step. `classes`: names. `writers`: of scalars, besides TensorBoard."""
        self._directory = directory
        self._classes = list(classes)
        files = TensorBoardFiles(directory.path / TENSORBOARD, resumed_from)
        self._writers: list[Writer] = [files, *writers]

    def interval_end(
        self, totals: Totals, lr: float, gpu: Mapping[str, float] = NO_FIGURES
    ) -> None:
        """Write one line for a logged step; `gpu`: figures of rank 0's GPU, if it has one."""
        phases = {f"{name}_s": seconds for name, seconds in totals.phases_s.items()}
        record = {"kind": "step", **_trained(totals, lr), "gradient_norm": totals.gradient_norm}
        record |= {f"gpu_{name}": value for name, value in gpu.items()}
        self._directory.append(METRICS, record | phases)
        scalars = {"train/loss": totals.loss, "samples_per_s": totals.samples_per_s, "lr": lr}
        scalars |= {f"train/{name}": value for name, value in totals.metrics.items()}
        scalars |= {f"phase/{name}": seconds for name, seconds in phases.items()}
        scalars |= {f"gpu/{name}": value for name, value in gpu.items()}
        if totals.gradient_norm is not None:
            scalars["gradient_norm"] = totals.gradient_norm
        self._scalars(totals.step, scalars)

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None:
        """Write one line for an epoch; `evaluation`: None if it was not due."""
        record = {"kind": "epoch", **_trained(totals, lr), "samples": totals.samples}
        fields = self._evaluation(totals, evaluation) if evaluation else {}
        self._directory.append(METRICS, record | fields)

    def evaluated(self, totals: Totals, evaluation: Evaluation) -> None:
        """Write one line for an evaluation within an epoch."""
        at = {"step": totals.step, "epoch": totals.epoch, "samples_seen": totals.samples_seen}
        fields = self._evaluation(totals, evaluation)
        self._directory.append(METRICS, {"kind": "evaluation", **at, **fields})

    def _evaluation(self, totals: Totals, evaluation: Evaluation) -> dict[str, Any]:
        """Write an evaluation's file and scalars; return its fields of a line."""
        figures = {"loss": evaluation.loss, **evaluation.metrics}
        of_step = {"step": totals.step, "samples": evaluation.samples, **figures}
        tables = evaluation.plain()["tables"]
        self._directory.write_evaluation(of_step | tables | {"classes": self._classes})
        self._scalars(totals.step, {f"valid/{name}": v for name, v in figures.items()})
        record: dict[str, Any] = {f"valid_{name}": value for name, value in figures.items()}
        record["valid_samples"] = evaluation.samples
        if accuracy := evaluation.class_accuracy():  # the table itself is too long for a line
            record["valid_class_accuracy"] = accuracy
        return record

    def audited(self, record: AuditRecord) -> None:
        """Write one line for an audit."""
        self._directory.append(AUDITS, asdict(record))
        ratio = record.worst_error_over_bound
        self._scalars(record.step, {"audit/worst_error_over_bound": ratio})

    def close(self, summary: dict[str, Any]) -> None:
        """Complete what the writers have written; `summary`: of the run."""
        for writer in self._writers:
            writer.close(summary["status"], json_ready(summary))

    def _scalars(self, step: int, scalars: dict[str, float]) -> None:
        for writer in self._writers:
            writer.scalars(step, scalars)


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
