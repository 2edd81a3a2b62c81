"""Systems that are wrong on purpose, for `hvdtrain compare --systems`."""

from __future__ import annotations

from hvdtrain.data import Shares
from hvdtrain.lab.systems.all_reduce import GatherBroadcast
from hvdtrain.lab.systems.work import GlobalBatch


class MeanOfMeans(GatherBroadcast):
    """The usual mistake: each rank's mean counts the same, however many samples it has."""

    what = "the mean of the ranks' means"

    def step(self, batch: GlobalBatch) -> None:
        self._gradients.zero_()
        own = Shares(self.member.workers).of(batch.indices, self.member.number)
        loaded = self.work.load(own, batch.epoch)
        self.work.clock.enter("compute")
        self.work.add_gradient(self.work.model, loaded, len(own) * self.member.workers)
        self._sum_over_ranks()
        self.work.update(self._optimizer)


class Failing(GatherBroadcast):
    """Worker 1 fails in its second step, while worker 0 waits for it."""

    what = "one that fails"

    def step(self, batch: GlobalBatch) -> None:
        super().step(batch)
        if self.member.number == 1:
            raise ArithmeticError("as requested")
