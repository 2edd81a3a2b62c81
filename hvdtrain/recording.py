"""Writes a run's figures: metrics.jsonl, audit.jsonl and the same as TensorBoard scalars."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from hvdtrain.evaluate import Evaluation
from hvdtrain.metering import Totals
from hvdtrain.run_directory import RunDirectory

METRICS = "metrics.jsonl"
AUDITS = "audit.jsonl"


class Recorder:
    """An observer that writes into the run directory; there is one, on rank 0."""

    def __init__(self, directory: RunDirectory, resumed_from: int = 0) -> None:
        """`resumed_from`: the step that the run goes on from; later scalars are dropped."""
        self._directory = directory
        folder = str(directory.path / "tensorboard")
        self._tensorboard = SummaryWriter(folder, purge_step=resumed_from + 1)

    def interval_end(self, totals: Totals, lr: float) -> None:
        """One line per logged step."""
        record = {
            "kind": "step",
            "step": totals.step,
            "epoch": totals.epoch,
            "samples_seen": totals.samples_seen,
            "train_loss": totals.loss,
            "train_accuracy": totals.accuracy,
            "samples_per_s": totals.samples_per_s,
            "lr": lr,
        }
        self._directory.append(METRICS, record)
        scalars = {"train/loss": totals.loss, "train/accuracy": totals.accuracy}
        self._scalars(totals.step, scalars | {"samples_per_s": totals.samples_per_s, "lr": lr})

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None:
        """One line per epoch; `evaluation` is None where there was none."""
        record = {
            "kind": "epoch",
            "step": totals.step,
            "epoch": totals.epoch,
            "samples_seen": totals.samples_seen,
            "samples": totals.samples,
            "train_loss": totals.loss,
            "train_accuracy": totals.accuracy,
            "samples_per_s": totals.samples_per_s,
            "lr": lr,
        }
        if evaluation:
            evaluated = asdict(evaluation)
            self._directory.write_evaluation({"step": totals.step, **evaluated})
            del evaluated["confusion"]  # classes squared: too long for a line an epoch
            record |= {f"valid_{name}": value for name, value in evaluated.items()}
            record["valid_class_accuracy"] = evaluation.class_accuracy
            scalars = {"valid/loss": evaluation.loss, "valid/accuracy": evaluation.accuracy}
            self._scalars(totals.step, scalars)
        self._directory.append(METRICS, record)

    def audited(self, record: Any) -> None:
        """One line per audit (an AuditRecord)."""
        self._directory.append(AUDITS, asdict(record))
        ratio = record.worst_error_over_bound
        self._scalars(record.step, {"audit/worst_error_over_bound": ratio})

    def close(self) -> None:
        """Everything is on disk afterwards."""
        self._tensorboard.close()

    def _scalars(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, step)
