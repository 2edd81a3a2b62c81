"""The progress of a run: its state between two steps, and its outcome."""

from dataclasses import dataclass

from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.metering import Meter, Totals


@dataclass
class State:
    """The progress and sums of a run; steps and samples seen determine the data that follow."""

    meter: Meter
    step: int = 0
    samples_seen: int = 0
    evaluation: Evaluation | None = None  # the newest one
    evaluated_at: int = 0  # the step after which it was made


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run."""

    totals: Totals
    evaluation: Evaluation | None  # of the last step; None without samples to validate with
    steady_samples_per_s: float
