"""The ring all-reduce in plain Python (`hvdtrain.ring`) as the exchange, over sockets.

Source: see `hvdtrain.ring`. Each rank sends, and receives, 2 (N - 1) / N S bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch import distributed

from hvdtrain.lab.systems.contract import (
    CountedTransport,
    Parameters,
    Place,
    Spec,
    Strategy,
    Traffic,
)
from hvdtrain.lab.systems.work import (
    GlobalBatch,
    Work,
    flatten_gradients,
    parameters_of,
    trained,
)
from hvdtrain.ring import Transport, all_reduce
from hvdtrain.ring.transports.tcp import TcpTransport, listen

HOST = "127.0.0.1"  # all processes are on this machine


def ring_formula(workers: int, size: int) -> dict[str, Traffic]:
    """Return 2 (N - 1) / N S bytes each way, in 2 (N - 1) messages if segments are sent whole."""
    steps = 2 * (workers - 1)
    each = Traffic(steps * size / workers, steps * size / workers, steps)
    return {f"worker {rank}": each for rank in range(workers)}


class Ring(Strategy):
    """The system `ring`: one process per worker, each connected to its two neighbours."""

    what = "ring all-reduce in plain Python, over sockets"

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(work, place)
        self._ring = CountedTransport(_connect(place))
        self._gradients = flatten_gradients(work.model)
        self._optimizer = work.optimizer(trained(work.model))

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic]:
        """Return the mean over ranks: the segments of a buffer may differ by one element."""
        return ring_formula(spec.workers, size)

    def step(self, batch: GlobalBatch) -> None:
        self._gradients.zero_()
        self.work.add_gradient_of_share(batch, self.place.number, self.place.workers)
        self.work.clock.enter("exchange")
        values = self._gradients.numpy()
        all_reduce(values, self._ring, out=values)
        self.work.update(self._optimizer)

    def parameters(self) -> Parameters:
        return parameters_of(self.work.model)

    def traffic(self) -> Mapping[str, Traffic]:
        return {self.name: self._ring.tally.total}

    def close(self) -> None:
        self._ring.close()


def _connect(place: Place) -> Transport:
    """Collective: connect the ring; ports are exchanged in the rendezvous file."""
    store = distributed.FileStore(str(place.meeting_point), place.processes)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=place.spec.time_limit_s))
    listener = listen(HOST)
    store.set(f"port of {place.number}", str(listener.getsockname()[1]))
    ports = [int(store.get(f"port of {number}")) for number in range(place.processes)]
    addresses = [(HOST, port) for port in ports]
    token = bytes.fromhex(place.spec.token)
    return TcpTransport(place.number, listener, addresses, token, place.spec.time_limit_s)
