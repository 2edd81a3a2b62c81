"""Loss, right answers and speed over all ranks, without waiting for them at each step.

Each rank's sums of a step are added over ranks while training goes on, and read one step late
(at the end of an interval or an epoch at once). A loss that is not finite on any rank so becomes
known to all ranks at the same step, and all leave together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hvdtrain.errors import TrainingError
from hvdtrain.exchange import Exchange

WARM_UP_STEPS = 5  # left out of the steady-state samples per second


@dataclass
class StepSums:
    """One rank's [loss sum, right answers, samples, losses not finite] of one step, in float64."""

    own: torch.Tensor
    total: Callable[[], torch.Tensor] | None = None

    @classmethod
    def nothing(cls, device: torch.device) -> StepSums:
        """Of a rank whose share is empty."""
        return cls(torch.zeros(4, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, loss_sum: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor) -> StepSums:
        """Of a batch: a scalar; (samples, classes); (samples,)."""
        correct = (scores.argmax(dim=1) == labels).sum()
        parts = (loss_sum, correct, correct.new_tensor(len(labels)), ~loss_sum.isfinite())
        return cls(torch.stack([part.double() for part in parts]))

    def start(self, exchange: Exchange, step: int) -> StepSums:
        """Collective: begin adding over ranks. Two steps may be under way, so two names."""
        self.total = exchange.sum_later(self.own.clone(), f"hvdtrain.step_sums.{step % 2}")
        return self


@dataclass(frozen=True)
class Totals:
    """Where a run stands, and what was summed since the last reading of the same kind."""

    step: int
    epoch: int
    samples_seen: int
    samples: int
    loss: float
    accuracy: float
    samples_per_s: float


class _Window:
    """Sums since the last reading."""

    def __init__(self) -> None:
        self.sums = [0.0, 0.0, 0.0]  # loss, right answers, samples
        self.seconds = 0.0

    def read(self, step: int, epoch: int, samples_seen: int) -> Totals:
        loss_sum, correct, samples = self.sums
        totals = Totals(
            step=step,
            epoch=epoch,
            samples_seen=samples_seen,
            samples=int(samples),
            loss=loss_sum / samples if samples else math.nan,
            accuracy=correct / samples if samples else math.nan,
            samples_per_s=samples / self.seconds if self.seconds else math.nan,
        )
        self.sums = [0.0, 0.0, 0.0]
        self.seconds = 0.0
        return totals


class Meter:
    """Collects the sums of steps in order."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._step = 0
        self._epoch = 0
        self._samples_seen = 0
        self._interval = _Window()
        self._whole_epoch = _Window()
        self._all = _Window()
        self._steady = _Window()
        self._started_s = 0.0
        self._waiting: tuple[int, StepSums] | None = None

    def begin_step(self) -> None:
        """Start the clock of a step; what lies between steps is not counted."""
        self._started_s = time.perf_counter()

    def end_step(self, sums: StepSums, step: int) -> None:
        """Take the sums of the step before, which have arrived by now, and stop the clock.

        Raises TrainingError on all ranks, naming the ranks, when a loss was not finite.
        """
        self._collect()
        self._waiting = (step, sums)
        elapsed_s = time.perf_counter() - self._started_s
        for window in self._windows(step):
            window.seconds += elapsed_s

    def read_interval(self) -> Totals:
        """Collective: what was summed since the last call, up to the step that just ended."""
        self._collect()
        return self._interval.read(self._step, self._epoch, self._samples_seen)

    def read_epoch(self) -> Totals:
        """Collective: the same for the epoch, which ends here."""
        self._collect()
        self._epoch += 1
        return self._whole_epoch.read(self._step, self._epoch, self._samples_seen)

    @property
    def steady_samples_per_s(self) -> float:
        """Over all ranks, without the first steps (unless there were no others)."""
        window = self._steady if self._steady.seconds else self._all
        return window.sums[2] / window.seconds if window.seconds else math.nan

    def _windows(self, step: int) -> list[_Window]:
        windows = [self._interval, self._whole_epoch, self._all]
        return windows if step <= WARM_UP_STEPS else [*windows, self._steady]

    def _collect(self) -> None:
        if self._waiting is None:
            return
        step, sums = self._waiting
        self._waiting = None
        assert sums.total is not None
        loss_sum, correct, samples, not_finite = sums.total().tolist()
        if not_finite:
            self._raise_not_finite(step, sums.own)
        for window in self._windows(step):
            for position, value in enumerate((loss_sum, correct, samples)):
                window.sums[position] += value
        self._step = step
        self._samples_seen += int(samples)

    def _raise_not_finite(self, step: int, own: torch.Tensor) -> None:
        own_loss, _, samples, own_not_finite = own.tolist()
        own_loss = own_loss / samples if own_not_finite else None
        losses = self._exchange.all_gather_object(own_loss, "hvdtrain.not_finite")
        where = ", ".join(
            f"rank {rank} (loss {loss})" for rank, loss in enumerate(losses) if loss is not None
        )
        raise TrainingError(
            f"the loss is not finite at step {step} on {where}. Nothing of this step is saved. "
            "Lower --lr, add --warmup-epochs, or look for bad values in the data"
        )
