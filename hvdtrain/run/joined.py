"""The workers of a command that shares its work, such as `hvdtrain evaluate`; or one process."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from hvdtrain.cgroups import usable_cores
from hvdtrain.exchange import Exchange, SingleProcess, join
from hvdtrain.exchange.agreement import check_equal_on_all_ranks, run_on_all
from hvdtrain.exchange.connect import connect_workers
from hvdtrain.pulse import WAITING, Pulse
from hvdtrain.run.process import leave_at_once, leave_together
from hvdtrain.run.tasks import hosts_of
from hvdtrain.topology import Topology

Result = TypeVar("Result")


@dataclass(frozen=True)
class JoinedWorkers:
    """All workers of a command, of which this process is one; or this process alone."""

    exchange: Exchange
    topology: Topology
    pulse: Pulse

    @property
    def is_first(self) -> bool:
        """Return whether this is the one that prints and writes."""
        return self.exchange.rank == 0

    def run(self, what: str, action: Callable[[], Result]) -> Result:
        """Collective: run an action on every worker; raise AgreedFailure on all if it fails on any.

        A single process raises what the action does. `what`: see `run_on_all`.
        """
        if self.exchange.size == 1:
            return action()

        def reported() -> Result:
            result = action()
            self.pulse.beat(WAITING)
            return result

        return run_on_all(self.exchange, what, reported)

    def is_stopped(self) -> bool:
        """Report that work goes on. Returns False: a signal ends a worker of a command at once."""
        self.pulse.beat("compute")
        return False

    def check_same(self, model: torch.nn.Module) -> None:
        """Collective: raise TrainingError unless all workers have read the same weights."""
        if self.exchange.size > 1:
            check_equal_on_all_ranks(
                model, self.exchange, "in the checkpoint that each has read", with_buffers=True
            )


@contextmanager
def joined_workers(topology: Topology) -> Iterator[JoinedWorkers]:
    """Collective: join the workers that a launcher started, and leave together with them.

    A process that is none of several works by itself, without Horovod. A failure is raised by a
    single process; several workers print it, and end at once with its exit code.
    """
    if not topology.launched or topology.size == 1:
        yield JoinedWorkers(SingleProcess(), topology, Pulse())
        return
    exchange = join(connect_workers)  # a script may ask for it too, by hvdtrain.init
    pulse = Pulse.from_environment()
    try:
        with exchange.peer_failures():
            _share_cores(exchange, topology)
            yield JoinedWorkers(exchange, topology, pulse)
            exchange.close()
        pulse.finish()
    except KeyboardInterrupt:
        leave_at_once(128 + signal.SIGINT)
    except Exception as error:
        leave_together(error, exchange, topology)


def _share_cores(exchange: Exchange, topology: Topology) -> None:
    """Collective: divide the threads of this host among its workers, unless the user, or
    `hvdtrain launch`, has chosen their number.
    """
    hosts = hosts_of(exchange.all_gather_object(topology.local_rank, "hvdtrain.local_ranks"))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // hosts.count(hosts[exchange.rank])))
