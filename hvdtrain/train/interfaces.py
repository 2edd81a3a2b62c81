"""What the training loop calls at each step, interval and epoch: audits, records, saving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from hvdtrain.data.feeding import StepData
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.job import Job
from hvdtrain.train.metering import StepSums, Totals
from hvdtrain.train.progress import State


class Audit(Protocol):
    """An audit or a trace of chosen steps (`hvdtrain.audit`)."""

    def begin(self, step: int, data: StepData) -> None:
        """Prepare for a step (counted from 1), before its first backward pass."""

    def begin_pass(self, share: int, batch: Any) -> None:
        """Prepare for a backward pass over a batch of `share`; passes of a share are adjacent."""

    def reduced(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Collective: examine the gradients of these optimizers once they are reduced."""

    def updated(self, step: int, sums: StepSums) -> None:
        """Collective: examine the step once all parameters are updated."""

    def close(self) -> None:
        """Collective: end, after the last step."""


class StepHook(Protocol):
    """A profiler of chosen steps."""

    def begin(self, step: int) -> None:
        """Prepare for a step (counted from 1), before its backward pass."""

    def end(self, step: int) -> None:
        """Collective: end the step."""


class Observer(Protocol):
    """A receiver of the results of intervals and epochs, which records or prints them."""

    def interval_end(self, totals: Totals, lr: float) -> None: ...

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None: ...

    def evaluated(self, totals: Totals, evaluation: Evaluation) -> None:
        """Take an evaluation within an epoch; `totals`: of the epoch so far."""


class Balancer(Protocol):
    """A receiver of the times of all ranks, which may move virtual workers between ranks."""

    def interval_end(self, totals: Totals) -> None:
        """Collective: move virtual workers from the next step on, if a step is then shorter."""


class Keeper(Protocol):
    """The part of a run that saves its state and receives stop requests."""

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to stop; called at each step and in evaluations."""

    def save(self, job: Job, state: State, evaluation: Evaluation | None) -> None:
        """Collective: save the state between two steps."""

    def save_in_memory(self, job: Job, state: State) -> None:
        """Collective: save the state in the memory of hosts alone, if the run has such copies."""

    def stop(self) -> NoReturn:
        """Collective: end the run, whose state is saved, by raising Stopped."""


@dataclass(frozen=True)
class Hooks:
    """The objects that the loop calls at each step, interval and epoch."""

    audit: Audit
    observer: Observer
    keeper: Keeper
    profiler: StepHook  # called before and after the whole step
    on_evaluation: Callable[[Evaluation], object] | None = None  # of a script
    balancer: Balancer | None = None
