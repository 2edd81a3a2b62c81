"""Keeps the state of a run while it goes, and ends it when all ranks have agreed to stop."""

from __future__ import annotations

from typing import NoReturn

from hvdtrain.errors import Stopped
from hvdtrain.exchange import Exchange
from hvdtrain.pulse import Pulse
from hvdtrain.run.ledger import Ledger
from hvdtrain.run.signals import StopSignals
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.loop import Job, State
from hvdtrain.train.state import capture


class RunKeeper:
    """Every rank has one: saving and stopping are collective. Rank 0's ledger writes."""

    def __init__(
        self,
        exchange: Exchange,
        ledger: Ledger,
        signals: StopSignals,
        pulse: Pulse,
    ) -> None:
        self._exchange = exchange
        self._ledger = ledger
        self._signals = signals
        self._pulse = pulse

    def evaluation_begins(self) -> None:
        self._pulse.beat("evaluate")

    def waits(self) -> None:
        self._pulse.beat("exchange")

    def stop_requested(self) -> bool:
        self._signals.alive()
        self._pulse.beat()
        self._ledger.check_saved()
        return self._signals.requested is not None

    def save(self, job: Job, state: State, evaluation: Evaluation | None) -> None:
        progress = self._ledger.progress()
        self.waits()
        snapshot = capture(job, state, self._exchange, progress)
        self._pulse.beat("save")
        self._ledger.saved(snapshot, evaluation)

    def stop(self) -> NoReturn:
        """Collective: any rank may have had the signal; all end with its number."""
        self._ledger.wait_until_saved()
        numbers = self._exchange.all_gather_object(self._signals.requested, "hvdtrain.stop")
        raise Stopped(max(number for number in numbers if number is not None))
