"""The address at which the other workers reach this host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping

from hvdtrain.errors import PreflightError

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface

# Variables in which a launcher names the interfaces common to all hosts: Gloo's, Open MPI's, and
# the one that horovodrun sets under any MPI.
_CHOSEN = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include", "NCCL_SOCKET_IFNAME")
_MPIRUN = "OMPI_MCA_orte_hnp_uri"  # 1711276032.0;tcp://10.0.0.1,172.17.0.1:53793;tcp6://...


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the IPv4 address of the interface that the launcher has chosen.

    If it has chosen none, as plain mpirun does, return the source address of the route to mpirun's
    host. Raises PreflightError if neither is known.
    """
    for interface in _chosen(environment):
        try:
            return interface_address(interface)
        except OSError:  # not on this host, or a network ("10.0.0.0/8") instead of a name
            continue
    _, found, addresses = environment.get(_MPIRUN, "").partition("tcp://")
    if found:
        with contextlib.suppress(OSError):  # no route
            return route_to(addresses.split(":")[0].split(",")[0])
    raise PreflightError(
        "ring: the network interface at which the other workers reach this host is unknown; "
        f"none of {', '.join(_CHOSEN)} names one: set NCCL_SOCKET_IFNAME to its name, such as eth0"
    )


def _chosen(environment: Mapping[str, str]) -> Iterator[str]:
    for name in _CHOSEN:
        yield from filter(None, environment.get(name, "").split(","))


def interface_address(interface: str) -> str:
    """Return the IPv4 address of an interface. Raises OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])


def route_to(host: str) -> str:
    """Return the address from which this host reaches `host`. Raises OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends no packet, only selects a route
        return str(probe.getsockname()[0])
