"""Parameter servers: the parameters are sharded over server processes; synchronous, asynchronous.

Each server holds one range of the parameters and its optimizer state. In a synchronous step every
worker pushes its gradients, each range to its server; a server sums those of all workers, updates
its range, and sends it back to every worker:

    worker 0 --- range 0 of its gradients --->  server 0   sum, update   --- range 0 ---> workers
             \\-- range 1 ------------------->  server 1   sum, update   --- range 1 ---> workers
    worker 1 ...

Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014).
All servers together receive N S bytes and send as many; a worker sends S and receives S. An
asynchronous server makes one update from each push, and replies to its sender at once.
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
    """A server process: one range of the parameters, and its optimizer."""

    def __init__(self, work: Work, values: torch.Tensor, workers: int, messages: Messages) -> None:
        """`values`: the initial values of the range, equal in all processes."""
        self._work, self._workers, self._messages = work, workers, messages
        self._values = values.clone()
        self._values.grad = torch.zeros_like(values)
        self._gradient: torch.Tensor = self._values.grad
        self._arriving = torch.empty_like(values)
        self._optimizer = work.optimizer([self._values])

    def step(self) -> None:
        """Collective: sum the gradients of all workers, update once, send out the range."""
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
        """Collective: send the final range to every worker."""
        for worker in range(self._workers):
            self._messages.send(self._values, worker)

    def figures(self) -> dict[str, float]:
        return {}


class Client:
    """A worker process: the whole model, and the server of each range."""

    def __init__(self, work: Work, place: Place, messages: Messages) -> None:
        self._work, self._place, self._messages = work, place, messages
        self._gradients = flatten_gradients(work.model)
        self._values = flatten_parameters(work.model)
        self._ranges = dict(enumerate(ranges_of(self._values, place.spec), place.workers))

    def step(self, batch: GlobalBatch) -> None:
        """Collective: compute on the own share, push its gradients, pull the updated parameters."""
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
    """Return the range of each server; lengths differ by at most one."""
    return list(split_evenly(values.numel(), spec.servers))


class ParameterServer(Strategy):
    """The system `parameter_server`: processes 0 to N - 1 are workers, the rest are servers."""

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
        """Return the traffic by rank, as means: the ranges of servers may differ by one element."""
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
        """Collective: return the final parameters, pulled once more, on workers; {} on servers."""
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
        return ["workers wait while servers update; the wait is timed as exchange"]

    def close(self) -> None:
        self._messages.close()


class AsynchronousServer(Server):
    """A server that makes one update per push, and measures the staleness of each."""

    def __init__(self, work: Work, values: torch.Tensor, workers: int, messages: Messages) -> None:
        super().__init__(work, values, workers, messages)
        self._updates = 0
        self._last_sent = [0] * workers  # number of the update that each worker last received
        self._staleness: list[int] = []

    def step(self) -> None:
        """Collective: handle as many pushes as there are workers, in order of arrival.

        Some of them may belong to other steps; over a run these are all pushes of all workers.
        """
        clock = self._work.clock
        for _ in range(self._workers):
            clock.enter("exchange")
            worker = self._messages.receive_from_any(self._gradient)
            self._staleness.append(self._updates - self._last_sent[worker])
            clock.enter("update")
            self._optimizer.step()
            self._updates += 1
            self._last_sent[worker] = self._updates
            clock.enter("exchange")
            self._messages.send(self._values, worker)
        clock.leave()

    def figures(self) -> dict[str, float]:
        return {
            "staleness_mean": sum(self._staleness) / len(self._staleness),
            "staleness_max": max(self._staleness),
        }


class AsynchronousParameterServer(ParameterServer):
    """The system `parameter_server_async`: as `parameter_server`, with asynchronous servers."""

    what = "parameters sharded over server processes, asynchronous: each push is its own update"
    judged = False
    server_class = AsynchronousServer

    def notes(self) -> list[str]:
        return [
            "workers wait for their own pushes only; staleness counts updates from other workers"
        ]
