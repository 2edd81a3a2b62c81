"""Connection to the other workers of a job."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed

from hvdtrain import slurm
from hvdtrain.errors import PreflightError
from hvdtrain.exchange import Exchange, SingleProcess
from hvdtrain.network import (
    OF_GLOO,
    OF_NCCL,
    OF_OPEN_MPI,
    address_of,
    interface_of,
    route_to,
    take_own_interface,
)
from hvdtrain.ring.transports import Transport
from hvdtrain.ring.transports.tcp import join_ring
from hvdtrain.topology import Topology

if TYPE_CHECKING:
    from hvdtrain.exchange.horovod import HorovodExchange

BY_HOST = "HOROVOD_GLOO_HIERARCHICAL_ALLREDUCE"  # read by the builds of hvdtrain.horovod_build

# Set before hvd.init() unless the user has set them (docs: Horovod's and Open MPI's parameters).
ENVIRONMENT_DEFAULTS = {
    # No fusion: which tensors fuse depends on timing, and so, with three or more ranks, would the
    # order of summation. Without fusion a run is repeatable.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # With several workers a host, Gloo's ring over all would send more over the network.
    BY_HOST: "1",
    # Open MPI spins while it waits, which takes compute time if workers occupy all cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


class HostSums(enum.Enum):
    """Whether Gloo adds the values of a host's ranks before those of other hosts."""

    NONE = enum.auto()  # all ranks are added in one order
    FIRST = enum.auto()
    FIRST_APART = enum.auto()  # first, though the ranks of a host are not adjacent


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
            f"Horovod cannot be loaded here: {error}. Run hvdtrain install-horovod"
        ) from error
    return HorovodExchange()


def prepare_environment(
    is_initialised: bool, start_rendezvous: Callable[[list[slurm.Variables]], int]
) -> None:
    """Set the variables that Horovod reads when it starts, unless it has started.

    Collective in a Slurm step, whose tasks get those that horovodrun would have set; for
    `start_rendezvous` see `slurm.meet`. Raises PreflightError if this host has no interface for it.
    """
    if not is_initialised:
        take_own_interface()
        for name, value in ENVIRONMENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
    if not slurm.is_step(os.environ):
        return
    variables, address = slurm.meet(slurm.SlurmStep.from_environment(os.environ), start_rendezvous)
    interface = os.environ.get(OF_GLOO) or interface_of(address)
    if interface is None:
        raise PreflightError(
            f"no network interface of this host has the address {address}; set {OF_GLOO} to the "
            "name of the interface that connects the hosts of the job"
        )
    os.environ.update(variables | {OF_GLOO: interface})
    os.environ.setdefault(OF_NCCL, interface)


def ring_of_torch_distributed() -> Transport:
    """Collective: return a ring of sockets; addresses are exchanged by torch.distributed."""
    group = torch.distributed

    def gather(value: Any) -> list[Any]:
        gathered: list[Any] = [None] * group.get_world_size()
        group.all_gather_object(gathered, value)
        return gathered

    return join_ring(group.get_rank(), route_to(os.environ.get("MASTER_ADDR", "localhost")), gather)


# Variables in which a launcher names the interfaces of this host: Gloo's, Open MPI's, and
# the one that horovodrun sets under any MPI.
_CHOSEN = (OF_GLOO, OF_OPEN_MPI, OF_NCCL)
_MPIRUN = "OMPI_MCA_orte_hnp_uri"  # 1711276032.0;tcp://10.0.0.1,172.17.0.1:53793;tcp6://...


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the IPv4 address of the interface that the launcher has chosen.

    If it has chosen none, as plain mpirun does, return the source address of the route to mpirun's
    host. Raises PreflightError if neither is known.
    """
    chosen = ",".join(environment.get(name, "") for name in _CHOSEN)
    for interface in filter(None, chosen.split(",")):
        if address := address_of(interface):  # a name, not a network ("10.0.0.0/8")
            return address
    _, scheme, addresses = environment.get(_MPIRUN, "").partition("tcp://")
    if scheme:
        with contextlib.suppress(OSError):  # no route
            return route_to(addresses.split(":")[0].split(",")[0])
    raise PreflightError(
        "ring: the network interface at which the other workers reach this host is unknown; "
        f"none of {', '.join(_CHOSEN)} names one: set NCCL_SOCKET_IFNAME to its name, such as eth0"
    )
