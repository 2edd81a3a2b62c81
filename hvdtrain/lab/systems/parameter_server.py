"""Parameter servers, synchronous: the parameters are sharded over processes of their own.

Each server holds one range of all parameters, and the optimizer's state for it. In a step every
worker pushes its gradients, each range to its server; a server adds up those of all workers,
updates its range, and sends it back to every worker:

    worker 0 --- range 0 of its gradients --->  server 0   sum, update   --- range 0 ---> workers
             \\-- range 1 ------------------->  server 1   sum, update   --- range 1 ---> workers
    worker 1 ...

Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014).
All servers together receive N S bytes and send as many; a worker sends S and receives S.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvdtrain.lab.systems.contract import Parameters, Place, Spec, Strategy, Traffic
from hvdtrain.lab.systems.messages import Messages
from hvdtrain.lab.systems.work import (
    GlobalBatch,
    Work,
    flatten_gradients,
    flatten_parameters,
    parameters_of,
)
from hvdtrain.ring import split_evenly


class Server:
    """What a server process holds: one range of the parameters, and how it is updated."""

    def __init__(self, work: Work, values: torch.Tensor, workers: int, messages: Messages) -> None:
        """`values`: the range, as every process has drawn it."""
        self._work, self._workers, self._messages = work, workers, messages
        self._values = values.clone()
        self._values.grad = torch.zeros_like(values)
        self._gradient: torch.Tensor = self._values.grad
        self._arriving = torch.empty_like(values)
        self._optimizer = work.optimizer([self._values])

    def step(self) -> None:
        """Collective: take every worker's gradient, in order; update once; tell every worker."""
        clock = self._work.clock
        clock.enter("exchange")
        self._gradient.zero_()
        for worker in range(self._workers):
            self._messages.receive(self._arriving, worker)
            self._gradient.add_(self._arriving)
        clock.enter("update")
        self._optimizer.step()
        clock.enter("exchange")
        for worker in range(self._workers):
            self._messages.send(self._values, worker)
        clock.leave()

    def send_all(self) -> None:
        """Collective: tell every worker how the range stands, at the end of a run."""
        for worker in range(self._workers):
            self._messages.send(self._values, worker)

    def figures(self) -> dict[str, float]:
        """Nothing beyond the usual."""
        return {}


class Client:
    """What a worker process holds: the whole model, and who has which range of it."""

    def __init__(self, work: Work, place: Place, messages: Messages) -> None:
        self._work, self._place, self._messages = work, place, messages
        self._gradients = flatten_gradients(work.model)
        self._values = flatten_parameters(work.model)
        self._ranges = dict(enumerate(ranges_of(self._values, place.spec), place.workers))

    def step(self, batch: GlobalBatch) -> None:
        """Collective: compute on the own share, push, and pull what the servers make of it."""
        clock, place = self._work.clock, self._place
        self._gradients.zero_()
        self._work.add_gradient_of_share(batch, place.number, place.workers)
        clock.enter("exchange")
        waits = [
            self._messages.start_send(self._gradients[part], server)
            for server, part in self._ranges.items()
        ]
        self.pull()
        for wait in waits:
            wait()
        clock.leave()

    def pull(self) -> None:
        """Collective: receive every range from its server."""
        waits = [
            self._messages.start_receive(self._values[part], server)
            for server, part in self._ranges.items()
        ]
        for wait in waits:
            wait()


def ranges_of(values: torch.Tensor, spec: Spec) -> list[slice]:
    """The range of each server, of almost equal lengths."""
    return list(split_evenly(values.numel(), spec.servers))


class ParameterServer(Strategy):
    """Processes 0 .. N - 1 are workers, the others servers."""

    what = "parameters sharded over server processes, synchronous"
    server_class = Server

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(work, place)
        self._messages = Messages(place)
        self._client: Client | None = None
        self._server: Server | None = None
        if place.number < place.workers:
            self._client = Client(work, place, self._messages)
        else:
            values = flatten_parameters(work.model)
            own = values[ranges_of(values, place.spec)[place.number - place.workers]]
            self._server = self.server_class(work, own, place.workers, self._messages)

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        servers = [f"server {number}" for number in range(spec.servers)]
        return super().processes(spec) + servers

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic]:
        """A server's share of the parameters may differ from another's by an element."""
        n, k = spec.workers, spec.servers
        of_worker = Traffic(size, size, k)
        of_server = Traffic(n * size / k, n * size / k, n)
        return {
            name: of_worker if number < n else of_server
            for number, name in enumerate(cls.processes(spec))
        }

    def step(self, batch: GlobalBatch) -> None:
        if self._client:
            self._client.step(batch)
        if self._server:
            self._server.step()

    def parameters(self) -> Parameters:
        """Collective: every worker pulls once more, and so holds what the servers hold."""
        if self._server:
            self._server.send_all()
            return {}
        if self._client:
            self._client.pull()
        return parameters_of(self.work.model)

    def traffic(self) -> Mapping[str, Traffic]:
        return {self.name: self._messages.traffic}

    def figures(self) -> dict[str, float]:
        return self._server.figures() if self._server else {}

    def notes(self) -> list[str]:
        return ["servers update; workers wait for them, which is timed as exchange"]

    def close(self) -> None:
        self._messages.close()


class AsynchronousServer(Server):
    """Counts its updates, and remembers which one each worker was last told of."""

    def __init__(self, work: Work, values: torch.Tensor, workers: int, messages: Messages) -> None:
        super().__init__(work, values, workers, messages)
        self._updates = 0
        self._told = [0] * workers
        self._staleness: list[int] = []

    def step(self) -> None:
        """Collective: as many pushes as there are workers, whosesoever they are.

        Over a run these are all pushes of all workers.
        """
        clock = self._work.clock
        for _ in range(self._workers):
            clock.enter("exchange")
            worker = self._messages.receive_from_any(self._gradient)
            self._staleness.append(self._updates - self._told[worker])
            clock.enter("update")
            self._optimizer.step()
            self._updates += 1
            self._told[worker] = self._updates
            clock.enter("exchange")
            self._messages.send(self._values, worker)
        clock.leave()

    def figures(self) -> dict[str, float]:
        return {
            "staleness_mean": sum(self._staleness) / len(self._staleness),
            "staleness_max": max(self._staleness),
        }


class AsynchronousParameterServer(ParameterServer):
    """The same processes, and another kind of server."""

    what = "parameters sharded over server processes, asynchronous: each push is its own update"
    judged = False
    server_class = AsynchronousServer

    def notes(self) -> list[str]:
        return ["a worker waits for its own pushes only; staleness counts updates by others"]
