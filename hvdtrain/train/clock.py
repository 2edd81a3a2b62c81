"""The time that each phase of a step takes on this rank."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.exchange import Exchange
from hvdtrain.pulse import BEFORE_EXCHANGE, Pulse
from hvdtrain.tensors import CPU

PHASES = ("data", "compute", "exchange", "update")
OWN_COLUMNS = tuple(map(PHASES.index, BEFORE_EXCHANGE))


class PhaseClock:
    """The time of each phase of a step.

    On the CPU it is the time of the host. On a device the host only starts what is computed, and
    waits for it in a later phase. There it is the time between events that the device reaches one
    after another, and includes what it waits for: for data, and for other ranks.
    """

    def __init__(self, pulse: Pulse, device: torch.device = CPU) -> None:
        self.pulse = pulse  # receives each phase change
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        # Phases between two events, which the device may not have reached yet.
        self._intervals: deque[tuple[str, Any, Any]] = deque()
        self._phase, self._began = PHASES[0], self._now()

    def restart(self, step: int) -> None:
        """Begin a step in the data phase; the time since the last step counts for no phase."""
        self.pulse.step = step
        self._begin(PHASES[0], self._now())

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        self._begin(phase, self.leave())

    def leave(self) -> Any:
        """End the last phase of a step; return its end."""
        now = self._now()
        if self._module is None:
            self._seconds[self._phase] += now - self._began
        else:
            self._intervals.append((self._phase, self._began, now))
        return now

    def take(self) -> list[float]:
        """Return the seconds of each phase since the last call, in the order of PHASES; those that
        a device has not reached yet are returned by a later call.
        """
        while self._intervals and self._intervals[0][-1].query():
            phase, first, last = self._intervals.popleft()
            self._seconds[phase] += first.elapsed_time(last) / 1000
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return list(seconds.values())

    def _begin(self, phase: str, now: Any) -> None:
        self._phase, self._began = phase, now
        self.pulse.beat(phase)

    def _now(self) -> Any:
        """Return the time, or an event of the device that is reached after all that is started."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event


class OwnTimes:
    """The time that each rank takes for its samples, over an interval."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._own = exchange, [0.0] * (1 + len(BEFORE_EXCHANGE))
        self._of_all: Callable[[], torch.Tensor] | None = None

    def add(self, count: float, phases_s: Sequence[float]) -> None:
        """Add a step: the count of this rank's samples, and its seconds of each of PHASES."""
        new = [count, *(phases_s[column] for column in OWN_COLUMNS)]
        self._own = [a + b for a, b in zip(self._own, new, strict=True)]

    def start(self) -> None:
        """Collective: begin to gather what was added since the last call."""
        table = torch.zeros((self._exchange.size, len(self._own)), dtype=torch.float64)
        table[self._exchange.rank] = torch.tensor(self._own, dtype=torch.float64)
        self._own = [0.0] * len(self._own)
        if self._exchange.size > 1:
            self._of_all = self._exchange.sum_later(table, "hvdtrain.own_times")

    def read(self) -> list[list[float]]:
        """Collective: return what was gathered, for each rank: its count of samples, and its
        seconds of BEFORE_EXCHANGE. Nothing of a single rank.
        """
        of_all, self._of_all = self._of_all, None
        return of_all().tolist() if of_all else []
