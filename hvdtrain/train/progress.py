"""The progress of a run: its state between two steps, what may end it early, and its outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hvdtrain.data import Splits
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.log import counted
from hvdtrain.tasks import Task
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.metering import Meter, Totals


@dataclass(frozen=True)
class Patience:
    """Early stopping: the number of evaluations that may pass without improvement."""

    evaluations: int
    min_delta: float = 0.0  # an improvement is larger


def patience_of(evaluations: int | None, min_delta: float, data: Splits) -> Patience | None:
    """Return when to stop early, if asked for. Raises UsageError if there are no evaluations."""
    if evaluations is None:
        return None
    if not len(data.valid):
        raise UsageError(
            f"--patience={evaluations}: there are no samples to validate with, so no evaluations "
            "to count: give some, or leave it out"
        )
    return Patience(evaluations, min_delta)


@dataclass
class EarlyEnd:
    """The end of a run before its last step: by request, or as evaluations do not improve."""

    requested: str | None = None  # the reason of a request of this rank, until all agree
    reason: str | None = None  # once all ranks have agreed to end the run here
    best: float | None = None  # of the evaluations that count
    waited: int = 0  # number of evaluations since the best one

    def count(self, evaluation: Evaluation, task: Task, patience: Patience) -> str | None:
        """Count an evaluation; return the reason to end the run, if it is the last one to await."""
        figure = {"loss": evaluation.loss, **evaluation.metrics}[task.best]
        sign = 1 if task.best_is_highest else -1
        least = -math.inf if self.best is None else sign * self.best + patience.min_delta
        if sign * figure > least:  # not if it is NaN
            self.best, self.waited = figure, 0
        else:
            self.waited += 1
        if self.waited < patience.evaluations:
            return None
        best = "" if self.best is None else f" on {self.best:.6g}"
        least_change = f" by more than {patience.min_delta:g}" if patience.min_delta else ""
        times = counted(self.waited, "evaluation")
        return f"validation {task.best} did not improve{best}{least_change} in {times}"

    def agree(self, reason: str | None, exchange: Exchange) -> None:
        """Collective: end the run if any rank has a reason; that of the lowest rank is kept."""
        reasons = exchange.all_gather_object(reason, "hvdtrain.early_end")
        self.reason = next(filter(None, reasons), None)


@dataclass
class State:
    """The progress and sums of a run; steps and samples seen determine the data that follow."""

    meter: Meter
    step: int = 0
    samples_seen: int = 0
    evaluation: Evaluation | None = None  # the newest one
    evaluated_at: int = 0  # the step after which it was made
    early_end: EarlyEnd = field(default_factory=EarlyEnd)


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run."""

    totals: Totals
    evaluation: Evaluation | None  # of the last step; None without samples to validate with
    steady_samples_per_s: float
    end_reason: str | None = None  # of an early end
