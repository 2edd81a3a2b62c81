"""Connection to the other workers of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.errors import PreflightError
from hvdtrain.exchange import Exchange, SingleProcess
from hvdtrain.topology import Topology

if TYPE_CHECKING:
    from hvdtrain.exchange.horovod import HorovodExchange


def connect(topology: Topology) -> Exchange:
    """Collective: join the other workers if a launcher started this process, else return N = 1.

    Raises UsageError if Horovod cannot connect the processes of that launcher.
    """
    if topology.launched:
        return connect_workers()
    topology.check_joined(1)
    return SingleProcess()


def connect_workers() -> HorovodExchange:
    """Collective: join the other workers. Raises PreflightError if Horovod does not work."""
    try:
        from hvdtrain.exchange.horovod import HorovodExchange
    except ImportError as error:
        raise PreflightError(
            f"Horovod cannot be loaded here: {error}. Run launch/setup, or install "
            "hvdtrain[distributed]"
        ) from error
    return HorovodExchange()
