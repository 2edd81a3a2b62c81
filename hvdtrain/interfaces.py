"""Network interfaces of this machine, and which of them the workers of a job use.

From the standard library alone. Horovod takes one name for all hosts, but an interface may be eth0
on one host and eth1 on another; so each worker finds its own, by its route to the first host.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress

_SIOCGIFCONF = 0x8912  # Linux: all interfaces that have an IPv4 address
_RECORD = struct.Struct("16s4x4s16x")  # struct ifreq: the name, then a sockaddr in a union
_MOST_BYTES = 1024 * _RECORD.size

# Set by the launcher, unless the user has chosen an interface: an address that all hosts reach.
TOWARDS = "HVDTRAIN_INTERFACE_TOWARDS"
OF_GLOO, OF_NCCL = "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"
OF_OPEN_MPI = "OMPI_MCA_btl_tcp_if_include"
OF_TORCH = "GLOO_SOCKET_IFNAME"  # of torch.distributed


def interfaces() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address) pairs in the system's order; raise OSError on failure."""
    import fcntl  # not on Windows, where `--help` imports this module

    buffer = array.array("B", bytes(_MOST_BYTES))
    request = struct.pack("iL", _MOST_BYTES, buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request)
    length = struct.unpack("iL", answer)[0]
    pairs = []
    for name, address in _RECORD.iter_unpack(buffer.tobytes()[:length]):
        label = name.partition(b"\0")[0].decode(errors="replace")
        pairs.append((label.partition(":")[0], socket.inet_ntoa(address)))  # "eth0:1": an alias
    return pairs


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address; None if there is none."""
    return next((name for name, ipv4 in interfaces() if ipv4 == address), None)


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none, or is not there."""
    return next((ipv4 for name, ipv4 in interfaces() if name == interface), None)


def route_to(host: str) -> str:
    """Return the address from which this host reaches `host`. Raises OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends no packet, only selects a route
        return str(probe.getsockname()[0])


def own_interfaces(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name this host's interface, by what reads them.

    Those that horovodrun or mpirun has set are replaced by the one towards TOWARDS, if this is set;
    torch.distributed gets the same. Empty if no interface is known.
    """
    chosen = environment.get(OF_GLOO) or environment.get(OF_OPEN_MPI)
    if towards := environment.get(TOWARDS):
        with suppress(OSError):  # without a route nothing better is known than what is set
            chosen = interface_of(route_to(towards)) or chosen
    named = [name for name in (OF_GLOO, OF_NCCL, OF_OPEN_MPI) if name in environment]
    return dict.fromkeys([*named, OF_TORCH], chosen) if chosen else {}


def take_own_interface() -> None:
    """Let Horovod and its libraries use this host's own interface, in this process."""
    if TOWARDS in os.environ:
        os.environ.update(own_interfaces(os.environ))
