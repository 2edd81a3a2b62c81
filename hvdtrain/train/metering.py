"""Loss, metrics and speed over all ranks, without waiting for them at each step.

Each rank's sums of a step are added over ranks while training continues, and read one step later
(immediately at the end of an interval or epoch, before a checkpoint, and after a long step). So all
ranks receive an event of one rank, a loss that is not finite or a stop signal, at the same step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from hvdtrain.data.feeding import to_device
from hvdtrain.errors import TrainingError
from hvdtrain.exchange import Exchange
from hvdtrain.pulse import Pulse
from hvdtrain.tasks import Sums
from hvdtrain.tensors import CPU
from hvdtrain.train.clock import PHASES, OwnTimes, PhaseClock
from hvdtrain.train.devices import reader

LONG_STEP_S = 1.0  # waiting for the sums of such a step costs nothing in comparison
WARM_UP_STEPS = 5  # excluded from the steady-state samples per second

# The sums of a step: first those that the host knows, then those computed on the device.
COUNT, STOP, LEFT, BAD, END = range(5)
PHASES_FROM = 5
LOSS = PHASES_FROM + len(PHASES)
NOT_FINITE, METRICS_FROM = LOSS + 1, LOSS + 2


class StepSums:
    """The sums of one step: first of this rank, then reduced over all ranks."""

    def __init__(self, device: torch.device, metrics: Sequence[str] = (), rows: int = 1) -> None:
        """`rows`: sums that are kept apart, and added in their order once all ranks have added."""
        # Loss; losses that are not finite; metrics. On a CPU Python's own sums of them are quicker.
        width, self._computed = METRICS_FROM - LOSS + len(metrics), torch.empty((rows, 0))
        if device.type != "cpu":
            self._computed = torch.zeros((rows, width), dtype=torch.float64, device=device)
        # Count that the loss is a mean over (usually samples); stop requests; ranks that have left
        # the loop; unreadable samples; requests to end the run; seconds of each phase.
        on_host = LOSS + width - self._computed.shape[1]
        self._host_sums = [[0.0] * on_host for _ in range(rows)]
        self.gradient_norm: torch.Tensor | None = None  # over all ranks, at logged steps
        self._metrics = tuple(metrics)
        self._total: Callable[[], list[float]] = lambda: self.local

    @property
    def local(self) -> list[float]:
        """Return the sums of this rank."""
        if len(self._host_sums) == 1 and not self._computed.numel():
            return list(self._host_sums[0])  # quick
        return _sum_of_rows(self._rows())

    @property
    def local_times(self) -> tuple[float, list[float]]:
        """Return what this rank's loss is a mean over, and its seconds of each phase."""
        return sum(row[COUNT] for row in self._host_sums), self._host_sums[0][PHASES_FROM:LOSS]

    def add(self, sums: Sums, bad: int = 0, row: int = 0) -> None:
        """Add the sums of a batch to a row; `bad`: number of samples that could not be read."""
        metrics = [sums.metrics[name].detach() for name in self._metrics]
        loss, on_host = sums.loss.detach(), self._host_sums[row]
        on_host[COUNT] += sums.samples
        on_host[BAD] += bad
        if self._computed.numel():
            computed = [loss, ~loss.isfinite(), *metrics]
            self._computed[row] += torch.stack([value.double() for value in computed])
            return
        figures = [loss.item(), not math.isfinite(loss), *(value.item() for value in metrics)]
        on_host[LOSS:] = _added(on_host[LOSS:], figures)

    def mark(self, column: int, applies: bool = True) -> None:
        """Note that this rank has left the loop (LEFT), or asks to end the run (END)."""
        self._host_sums[0][column] = float(applies)

    def is_marked(self, column: int) -> bool:
        """Return whether this rank has noted that."""
        return self._host_sums[0][column] > 0

    def start(
        self,
        exchange: Exchange,
        step: int,
        stop_requested: bool,
        phases_s: Sequence[float],
        part: int = 0,
    ) -> None:
        """Collective: begin the reduction. Two steps may be in progress, so two names alternate.

        `part`: number of the update within the step.
        """
        self._host_sums[0][STOP] = float(stop_requested)
        self._host_sums[0][PHASES_FROM:LOSS] = phases_s
        name = f"hvdtrain.step_sums.{step % 2}" + (f".{part}" if part else "")
        if exchange.size == 1 and not self._computed.numel():
            self._total = partial(list, self.local)
            return
        rows = self._rows()
        read, of_all = reader(rows.device), exchange.sum_later(rows, name)
        self._total = cache(lambda: _sum_of_rows(read(of_all())))

    def join(self, further: StepSums) -> None:
        """Add the sums of a further update of the step, but for its loss and its count."""
        first, second = self._total, further._total
        self._total = cache(lambda: _joined(first(), second()))
        self._computed[:, NOT_FINITE - LOSS :] += further._computed[:, NOT_FINITE - LOSS :]
        rows = zip(self._host_sums, further._host_sums, strict=True)
        self._host_sums = [_joined(one, other) for one, other in rows]

    def _rows(self) -> torch.Tensor:
        host_sums, computed = torch.from_numpy(np.array(self._host_sums)), self._computed
        on_device = [to_device(host_sums, computed.device), computed]
        return torch.cat(on_device, dim=1) if computed.numel() else host_sums

    def total(self) -> list[float]:
        """Collective: wait for the reduction; return the sums over all ranks."""
        return self._total()

    def mean_loss(self) -> float:
        """Collective: return the mean loss over all ranks; NaN without samples."""
        totals = self.total()
        return totals[LOSS] / totals[COUNT] if totals[COUNT] else math.nan

    def check_losses(self, exchange: Exchange, step: int) -> None:
        """Collective: raise TrainingError, naming the ranks, unless all losses are finite."""
        if not self.total()[NOT_FINITE]:
            return
        local = self.local
        local_loss = local[LOSS] / local[COUNT] if local[NOT_FINITE] else None
        losses = exchange.all_gather_object(local_loss, "hvdtrain.not_finite")
        where = ", ".join(
            f"rank {rank} (loss {loss})" for rank, loss in enumerate(losses) if loss is not None
        )
        raise TrainingError(
            f"the loss is not finite at step {step} on {where}. Nothing of this step is saved. "
            "Lower --lr, add --warmup-epochs, or look for bad values in the data"
        )


def _sum_of_rows(rows: torch.Tensor) -> list[float]:
    """Return the sum of rows that are apart, in their order."""
    return list((rows.view(-1) if rows.shape[0] == 1 else rows.sum(0)).tolist())


def _joined(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the sums of two updates of a step: loss, count and what ranks ask for of the first."""
    both = _added(one, other)
    return [*one[:PHASES_FROM], *both[PHASES_FROM:LOSS], *one[LOSS:NOT_FINITE], *both[NOT_FINITE:]]


@dataclass(frozen=True)
class Totals:
    """The progress of a run, and means and speed over one interval or epoch."""

    step: int
    epoch: int  # counted from 1: the current one, or the one that has just ended
    samples_seen: int
    samples: int
    loss: float
    metrics: dict[str, float]
    samples_per_s: float
    phases_s: dict[str, float] = field(default_factory=dict)  # per step, mean over ranks
    gradient_norm: float | None = None  # of the last step
    bad_samples: int = 0  # samples that could not be read, since the start of the run
    of_ranks: list[list[float]] = field(default_factory=list)  # of an interval: see OwnTimes

    @property
    def seconds(self) -> float:
        """Return the time of the steps since the last reading, without evaluation and saving."""
        return self.samples / self.samples_per_s if self.samples_per_s else math.nan

    @property
    def step_s(self) -> float:
        """Return the mean time of a step, over ranks."""
        return sum(self.phases_s.values())


@dataclass
class _Window:
    """Sums since the last reading."""

    loss_sum: float = 0.0
    count: float = 0.0
    metrics: list[float] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    steps: int = 0
    phases_s: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))

    def add(self, sums: Sequence[float], samples: int, phases_s: Sequence[float]) -> None:
        self.loss_sum += sums[LOSS]
        self.count += sums[COUNT]
        self.metrics = _added(self.metrics, sums[METRICS_FROM:])
        self.samples += samples
        self.steps += 1
        self.phases_s = _added(self.phases_s, phases_s)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else math.nan


def _added(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)] if one else list(other)


class Meter:
    """The sums of steps over an interval, an epoch and the run, added in order of steps."""

    def __init__(
        self,
        exchange: Exchange,
        samples_per_epoch: int,
        metrics: Sequence[str] = (),
        pulse: Pulse | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.clock = PhaseClock(pulse or Pulse(), device)
        self._exchange, self._samples_per_epoch = exchange, samples_per_epoch
        self._metrics = tuple(metrics)
        self._step, self._samples_seen, self._bad_samples = 0, 0, 0
        self._gradient_norm: torch.Tensor | float | None = None
        self._interval, self._epoch, self._all, self._steady = (_Window() for _ in range(4))
        self._steps_here, self._started_s, self._last_step_s = 0, 0.0, 0.0
        self._waiting: tuple[int, StepSums, int] | None = None
        self._own_times = OwnTimes(exchange)
        self.stop_agreed = False
        self.last_epoch: Totals | None = None

    def begin_step(self, step: int, is_logged: bool = False) -> None:
        """Collective: start the clock of a step; the time between steps is not counted.

        `is_logged`: `read_interval` follows; what it reads of each rank is gathered meanwhile.
        """
        if is_logged:
            self._own_times.start()
        self._started_s = time.perf_counter()
        self.clock.restart(step)

    def end_step(self, sums: StepSums, step: int, samples: int) -> None:
        """Collective: add the sums of the previous step and stop the clock.

        `samples`: size of the step's global batch. Raises TrainingError on all ranks, naming the
        ranks, if a loss of the previous step was not finite.
        """
        self.collect()
        self._waiting = (step, sums, samples)
        elapsed_s = time.perf_counter() - self._started_s
        self._steps_here += 1
        for window in self._windows():
            window.seconds += elapsed_s
        if self._last_step_s > LONG_STEP_S:  # of all ranks: a stop must not wait for another one
            self.collect()

    def collect(self) -> None:
        """Collective: wait for the sums of the last step and add them, if not yet done."""
        if self._waiting is None:
            return
        (step, sums, samples), self._waiting = self._waiting, None
        sums.check_losses(self._exchange, step)
        self._own_times.add(*sums.local_times)
        totals = sums.total()
        phases_s = [seconds / self._exchange.size for seconds in totals[PHASES_FROM:LOSS]]
        for window in self._windows():
            window.add(totals, samples, phases_s)
        self._step, self._samples_seen = step, self._samples_seen + samples
        self._bad_samples += int(totals[BAD])
        self._gradient_norm, self._last_step_s = sums.gradient_norm, sum(phases_s)
        self.stop_agreed = self.stop_agreed or totals[STOP] > 0

    def read_interval(self) -> Totals:
        """Collective: return the totals since the last call, up to the last step."""
        self.collect()
        window, self._interval = self._interval, _Window()
        return replace(self._totals(window), of_ranks=self._own_times.read())

    @property
    def has_open_epoch(self) -> bool:
        """Return whether steps were made since the last `close_epoch`."""
        return self._epoch.samples > 0 or self._waiting is not None

    def close_epoch(self) -> Totals:
        """Collective: end the epoch; return its totals."""
        self.collect()
        window, self._epoch = self._epoch, _Window()
        self.last_epoch = self._totals(window)
        return self.last_epoch

    def totals(self) -> Totals:
        """Return the totals collected so far of the current epoch."""
        return self._totals(self._epoch)

    @property
    def steady_samples_per_s(self) -> float:
        """Return the speed over all ranks without the first WARM_UP_STEPS, if there were more."""
        steady = self._steady.samples_per_s
        return self._all.samples_per_s if math.isnan(steady) else steady

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: all sums except those of the whole run."""
        return {
            "step": self._step,
            "samples_seen": self._samples_seen,
            "bad_samples": self._bad_samples,
            "gradient_norm": self._last_norm,
            "interval": asdict(self._interval),
            "epoch": asdict(self._epoch),
            "last_epoch": self.last_epoch
            and {name: v for name, v in asdict(self.last_epoch).items() if name != "of_ranks"},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._step, self._samples_seen = state["step"], state["samples_seen"]
        self._bad_samples, self._gradient_norm = state["bad_samples"], state["gradient_norm"]
        self._interval, self._epoch = (_Window(**state[name]) for name in ("interval", "epoch"))
        self.last_epoch = Totals(**state["last_epoch"]) if state["last_epoch"] else None

    def _totals(self, window: _Window) -> Totals:
        count, steps = window.count or math.nan, max(window.steps, 1)
        metrics = window.metrics or [math.nan] * len(self._metrics)
        return Totals(
            step=self._step,
            epoch=-(-self._samples_seen // self._samples_per_epoch),
            samples_seen=self._samples_seen,
            samples=window.samples,
            loss=window.loss_sum / count,
            metrics={n: v / count for n, v in zip(self._metrics, metrics, strict=True)},
            samples_per_s=window.samples_per_s,
            phases_s=dict(zip(PHASES, (s / steps for s in window.phases_s), strict=True)),
            gradient_norm=self._last_norm,
            bad_samples=self._bad_samples,
        )

    @property
    def _last_norm(self) -> float | None:
        return None if self._gradient_norm is None else float(self._gradient_norm)

    def _windows(self) -> list[_Window]:
        windows = [self._interval, self._epoch, self._all]
        return windows if self._steps_here <= WARM_UP_STEPS else [*windows, self._steady]
