"""Two all-reduces of our own, which sum the gradients over ranks: gather and broadcast, and ring.

In the first, every rank sends its gradients to rank 0, which sums them and sends the sum back. So
rank 0 receives (N - 1) S bytes, sends as many, and becomes the bottleneck as N grows. In a ring
each rank sends, and receives, 2 (N - 1) / N S bytes. Source: A. Gibiansky, "Bringing HPC Techniques
to Deep Learning" (2017), which introduces the second from the first; see also `hvdtrain.ring`.
"""

from collections.abc import Mapping

import torch

from hvdtrain.lab.systems.contract import (
    CountedTransport,
    Member,
    Messages,
    RingTraffic,
    Spec,
    Strategy,
    Traffic,
)
from hvdtrain.lab.systems.work import GlobalBatch, Work, flatten_gradients, trained
from hvdtrain.ring import Transport, all_reduce
from hvdtrain.ring.transports.tcp import TcpTransport, listen

ROOT = 0
HOST = "127.0.0.1"  # all processes are on this machine


class SumOverRanks(Strategy):
    """One process per worker, each with a flat tensor of all gradients."""

    def __init__(self, work: Work, member: Member) -> None:
        super().__init__(work, member)
        self._gradients = flatten_gradients(work.model)
        self._optimizer = work.optimizer(trained(work.model))

    def step(self, batch: GlobalBatch) -> None:
        self._gradients.zero_()
        self.work.add_gradient_of_share(batch, self.member.number, self.member.workers)
        self.work.clock.enter("exchange")
        self._sum_over_ranks()
        self.work.update(self._optimizer)

    def _sum_over_ranks(self) -> None:
        """Collective: replace `_gradients` by their sum, on every rank."""
        raise NotImplementedError


class GatherBroadcast(SumOverRanks):
    """The system `gather_broadcast`, in which rank 0 is also a worker."""

    what = "gradients gathered and summed on rank 0, then broadcast; point to point"

    def __init__(self, work: Work, member: Member) -> None:
        super().__init__(work, member)
        self.link = self._messages = Messages(member)
        self._arriving = torch.empty_like(self._gradients)

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic]:
        others = spec.workers - 1
        each = [Traffic(others * size, others * size, others)] + [Traffic(size, size, 1)] * others
        return dict(zip(cls.processes(spec), each, strict=True))

    def _sum_over_ranks(self) -> None:
        if self.member.number != ROOT:
            self._messages.send(self._gradients, ROOT)
            self._messages.receive(self._gradients, ROOT)
            return
        others = range(1, self.member.workers)
        for rank in others:
            self._messages.receive(self._arriving, rank)
            self._gradients.add_(self._arriving)
        for rank in others:
            self._messages.send(self._gradients, rank)


class Ring(RingTraffic, SumOverRanks):
    """The system `ring`, in which each rank is connected to its two neighbours."""

    what = "ring all-reduce in plain Python, over sockets"

    def __init__(self, work: Work, member: Member) -> None:
        super().__init__(work, member)
        self.link = self._ring = CountedTransport(_connect(member))

    def _sum_over_ranks(self) -> None:
        values = self._gradients.numpy()
        all_reduce(values, self._ring, out=values)


def _connect(member: Member) -> Transport:
    """Collective: connect the ring; ports are exchanged in the store of the processes."""
    store = member.open_store()
    listener = listen(HOST)
    store.set(f"port of {member.number}", str(listener.getsockname()[1]))
    numbers = range(member.processes)
    addresses = [(HOST, int(store.get(f"port of {number}"))) for number in numbers]
    token = bytes.fromhex(member.spec.token)
    return TcpTransport(member.number, listener, addresses, token, member.spec.time_limit_s)
