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

from collections.abc import Mapping

import torch

from hvdtrain.lab.systems.contract import (
    Member,
    Messages,
    Parameters,
    Spec,
    Strategy,
    Tensors,
    Traffic,
)
from hvdtrain.lab.systems.work import GlobalBatch, Work, flatten_gradients, flatten_parameters
from hvdtrain.ring import split_evenly


class Server:
    """A server process: one range of the parameters, and its optimizer."""

    def __init__(self, work: Work, values: torch.Tensor, workers: int, messages: Messages) -> None:
        """`values`: the initial values of the range, equal in all processes."""
        self._clock, self._workers, self._messages = work.clock, range(workers), messages
        self._values = values.clone()
        self._gradient = torch.zeros_like(values)
        self._values.grad = self._gradient
        self._arriving = torch.empty_like(values)
        self._optimizer = work.optimizer([self._values])

    def step(self) -> None:
        """Collective: sum the gradients of all workers, update once, send out the range."""
        self._clock.enter("exchange")
        self._gradient.zero_()
        for worker in self._workers:
            self._messages.receive(self._arriving, worker)
            self._gradient.add_(self._arriving)
        self._clock.enter("update")
        self._optimizer.step()
        self._clock.enter("exchange")
        self.send_to_all()
        self._clock.leave()

    def send_to_all(self) -> None:
        """Collective: send the range to every worker."""
        for worker in self._workers:
            self._messages.send(self._values, worker)


class ParameterServer(Strategy):
    """The system `parameter_server`: processes 0 to N - 1 are workers, the rest are servers."""

    what = "parameters sharded over server processes, synchronous"
    server_class = Server

    def __init__(self, work: Work, member: Member) -> None:
        super().__init__(work, member)
        self.link = self._messages = Messages(member)
        self._values = flatten_parameters(work.model)
        parts = split_evenly(self._values.numel(), member.spec.servers)
        self._ranges = dict(enumerate(parts, member.workers))  # by number of the server's process
        self._server: Server | None = None
        if member.number < member.workers:
            self._gradients = flatten_gradients(work.model)
        else:
            shard = self._values[self._ranges[member.number]]
            self._server = self.server_class(work, shard, member.workers, self._messages)

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        return super().processes(spec) + [f"server {number}" for number in range(spec.servers)]

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic]:
        """Return the traffic by rank, as means: the ranges of servers may differ by one element."""
        n, k = spec.workers, spec.servers
        each = [Traffic(size, size, k)] * n + [Traffic(n * size / k, n * size / k, n)] * k
        return dict(zip(cls.processes(spec), each, strict=True))

    def step(self, batch: GlobalBatch) -> None:
        """Collective: on a worker, push the gradients of its share, pull the new parameters."""
        if self._server:
            self._server.step()
            return
        self._gradients.zero_()
        self.work.add_gradient_of_share(batch, self.member.number, self.member.workers)
        self.work.clock.enter("exchange")
        self._messages.exchange(self._by_server(self._gradients), self._by_server(self._values))
        self.work.clock.leave()

    def _by_server(self, values: torch.Tensor) -> Tensors:
        return {server: values[part] for server, part in self._ranges.items()}

    def parameters(self) -> Parameters:
        """Collective: return the final parameters, pulled once more, on workers; {} on servers."""
        if self._server:
            self._server.send_to_all()
            return {}
        self._messages.exchange({}, self._by_server(self._values))
        return super().parameters()

    def notes(self) -> list[str]:
        return ["workers wait while servers update; the wait is timed as exchange"]


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
        for _ in self._workers:
            self._clock.enter("exchange")
            worker = self._messages.receive_from_any(self._gradient)
            self._staleness.append(self._updates - self._last_sent[worker])
            self._clock.enter("update")
            self._optimizer.step()
            self._updates += 1
            self._last_sent[worker] = self._updates
            self._clock.enter("exchange")
            self._messages.send(self._values, worker)
        self._clock.leave()

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

    def figures(self) -> dict[str, float]:
        return self._server.figures() if isinstance(self._server, AsynchronousServer) else {}

    def notes(self) -> list[str]:
        return [
            "workers wait for their own pushes only; staleness counts updates from other workers"
        ]
