"""Loss, right answers and speed over all ranks, without waiting for them at each step.

Each rank's sums of a step are added over ranks while training goes on, and read one step late
(at the end of an interval or an epoch, and before a checkpoint, at once). What one rank meets, a
loss that is not finite or a signal to stop, so becomes known to all ranks at the same step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hvdtrain.errors import TrainingError
from hvdtrain.exchange import Exchange

WARM_UP_STEPS = 5  # left out of the steady-state samples per second


class StepSums:
    """One rank's sums of one step, on their way over all ranks."""

    def __init__(self, device: torch.device) -> None:
        """All zero: of a rank whose share is empty."""
        # Loss, right answers, samples, losses not finite, requests to stop.
        self.own = torch.zeros(5, dtype=torch.float64, device=device)
        self.total: Callable[[], torch.Tensor] = lambda: self.own

    def add(self, loss_sum: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch: a scalar; (samples, classes); (samples,)."""
        correct = (scores.argmax(dim=1) == labels).sum()
        parts = (loss_sum, correct, correct.new_tensor(len(labels)), ~loss_sum.isfinite())
        self.own[:4] += torch.stack([part.double() for part in parts])

    def start(self, exchange: Exchange, step: int, stop_requested: bool) -> None:
        """Collective: begin adding over ranks. Two steps may be under way, so two names."""
        self.own[4] = stop_requested
        self.total = exchange.sum_later(self.own.clone(), f"hvdtrain.step_sums.{step % 2}")


@dataclass(frozen=True)
class Totals:
    """Where a run stands, and what was summed since the last reading of the same kind."""

    step: int
    epoch: int  # counted from 1: the one that is under way or has just ended
    samples_seen: int
    samples: int
    loss: float
    accuracy: float
    samples_per_s: float


@dataclass
class _Window:
    """Sums since the last reading."""

    loss_sum: float = 0.0
    correct: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0

    def add(self, loss_sum: float, correct: float, samples: float) -> None:
        self.loss_sum += loss_sum
        self.correct += correct
        self.samples += samples

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else math.nan


class Meter:
    """Collects the sums of steps in order."""

    def __init__(self, exchange: Exchange, samples_per_epoch: int) -> None:
        self._exchange = exchange
        self._samples_per_epoch = samples_per_epoch
        self._step = 0
        self._samples_seen = 0
        self._interval = _Window()
        self._epoch = _Window()
        self._all = _Window()
        self._steady = _Window()
        self._steps_here = 0
        self._started_s = 0.0
        self._waiting: tuple[int, StepSums] | None = None
        self.stop_agreed = False
        self.last_epoch: Totals | None = None

    def begin_step(self) -> None:
        """Start the clock of a step; what lies between steps is not counted."""
        self._started_s = time.perf_counter()

    def end_step(self, sums: StepSums, step: int) -> None:
        """Take the sums of the step before, which have arrived by now, and stop the clock.

        Raises TrainingError on all ranks, naming the ranks, when a loss was not finite.
        """
        self.collect()
        self._waiting = (step, sums)
        elapsed_s = time.perf_counter() - self._started_s
        self._steps_here += 1
        for window in self._windows():
            window.seconds += elapsed_s

    def collect(self) -> None:
        """Collective: wait for the sums of the step that ended last."""
        if self._waiting is None:
            return
        step, sums = self._waiting
        self._waiting = None
        loss_sum, correct, samples, not_finite, stop = sums.total().tolist()
        if not_finite:
            self._raise_not_finite(step, sums.own)
        for window in self._windows():
            window.add(loss_sum, correct, samples)
        self._step = step
        self._samples_seen += int(samples)
        self.stop_agreed = self.stop_agreed or stop > 0

    def read_interval(self) -> Totals:
        """Collective: what was summed since the last call, up to the step that just ended."""
        self.collect()
        window, self._interval = self._interval, _Window()
        return self._totals(window)

    @property
    def has_open_epoch(self) -> bool:
        """Whether steps were made since `close_epoch`."""
        return self._epoch.samples > 0

    def close_epoch(self) -> Totals:
        """Collective: the same for the epoch, which ends here."""
        self.collect()
        window, self._epoch = self._epoch, _Window()
        self.last_epoch = totals = self._totals(window)
        return totals

    def totals(self) -> Totals:
        """What is known so far of the epoch that is under way."""
        return self._totals(self._epoch)

    @property
    def steady_samples_per_s(self) -> float:
        """Over all ranks, without the first steps (unless there were no others)."""
        steady = self._steady.samples_per_s
        return self._all.samples_per_s if math.isnan(steady) else steady

    def state_dict(self) -> dict[str, Any]:
        """The sums that an interrupted run needs to go on: all but times."""
        return {
            "step": self._step,
            "samples_seen": self._samples_seen,
            "interval": asdict(self._interval),
            "epoch": asdict(self._epoch),
            "last_epoch": asdict(self.last_epoch) if self.last_epoch else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._step, self._samples_seen = state["step"], state["samples_seen"]
        self._interval = _Window(**state["interval"])
        self._epoch = _Window(**state["epoch"])
        self.last_epoch = Totals(**state["last_epoch"]) if state["last_epoch"] else None

    def _totals(self, window: _Window) -> Totals:
        return Totals(
            step=self._step,
            epoch=-(-self._samples_seen // self._samples_per_epoch),
            samples_seen=self._samples_seen,
            samples=int(window.samples),
            loss=window.loss_sum / window.samples if window.samples else math.nan,
            accuracy=window.correct / window.samples if window.samples else math.nan,
            samples_per_s=window.samples_per_s,
        )

    def _windows(self) -> list[_Window]:
        windows = [self._interval, self._epoch, self._all]
        return windows if self._steps_here <= WARM_UP_STEPS else [*windows, self._steady]

    def _raise_not_finite(self, step: int, own: torch.Tensor) -> None:
        own_loss, _, samples, own_not_finite, _ = own.tolist()
        own_loss = own_loss / samples if own_not_finite else None
        losses = self._exchange.all_gather_object(own_loss, "hvdtrain.not_finite")
        where = ", ".join(
            f"rank {rank} (loss {loss})" for rank, loss in enumerate(losses) if loss is not None
        )
        raise TrainingError(
            f"the loss is not finite at step {step} on {where}. Nothing of this step is saved. "
            "Lower --lr, add --warmup-epochs, or look for bad values in the data"
        )
