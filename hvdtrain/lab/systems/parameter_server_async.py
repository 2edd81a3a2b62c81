"""Parameter servers, asynchronous: no worker waits for another.

A server applies each push as it comes, as an update of its own, and answers that worker alone with
the parameters as they then stand. So a gradient may be of parameters that others have moved
meanwhile: how many updates lie between is its staleness. The result depends on timing, and is not
that of `single`.

Source: J. Dean et al., "Large Scale Distributed Deep Networks" (NIPS 2012), Downpour SGD.
"""

from __future__ import annotations

import torch

from hvdtrain.lab.systems.messages import Messages
from hvdtrain.lab.systems.parameter_server import ParameterServer, Server
from hvdtrain.lab.systems.work import Work


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
