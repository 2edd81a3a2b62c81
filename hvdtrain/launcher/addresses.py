"""Network interfaces of this machine and their IPv4 addresses, from the standard library alone."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import re
import socket
import struct

ANYWHERE = "0.0.0.0"  # listen on all interfaces
_SIOCGIFCONF = 0x8912  # Linux: all interfaces that have an IPv4 address
_RECORD = struct.calcsize("16s24x")  # struct ifreq: the name, then a sockaddr in a union
_MOST_BYTES = 1024 * _RECORD
_LABEL = re.compile(r":.*")  # alias suffix of a second address, as in "eth0:1"


def interfaces() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address) pairs in the system's order; raise OSError on failure."""
    buffer = array.array("B", bytes(_MOST_BYTES))
    request = struct.pack("iL", _MOST_BYTES, buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request)
    length = struct.unpack("iL", answer)[0]
    data = buffer.tobytes()[:length]
    found = []
    for start in range(0, length, _RECORD):
        name = data[start : start + 16].split(b"\0")[0].decode(errors="replace")
        address = socket.inet_ntoa(data[start + 20 : start + 24])
        found.append((_LABEL.sub("", name), address))
    return found


def interface_of(address: str, among: list[tuple[str, str]]) -> str | None:
    """Return the name of the interface that has this address; None if there is none."""
    return next((name for name, own in among if own == address), None)


def is_loopback(address: str) -> bool:
    """Return whether the address is a loopback address, unreachable from other machines."""
    return ipaddress.ip_address(address).is_loopback


def resolves_here(name: str) -> bool:
    """Return whether horovodrun takes the name for this machine and starts workers without ssh."""
    try:
        return socket.gethostbyname(name) in {address for _, address in interfaces()}
    except (OSError, UnicodeError):
        return False
