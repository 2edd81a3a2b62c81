"""Bytes that a rank has sent and received, counted where they pass."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hvdtrain.ring.transports import Transport

# struct tcp_info of linux/tcp.h: tcpi_bytes_received, tcpi_notsent_bytes (handed over, but still in
# the kernel's buffer), and tcpi_bytes_sent (since Linux 4.19).
RECEIVED_AT, NOT_SENT_AT, SENT_AT, INFO_BYTES = 128, 144, 200, 256


class Traffic(NamedTuple):
    """Sums since the beginning, or over some steps."""

    sent: float = 0
    received: float = 0
    messages: float = 0  # sent

    def since(self, earlier: Traffic) -> Traffic:
        """What came after `earlier`."""
        return Traffic(*(now - then for now, then in zip(self, earlier, strict=True)))

    def over(self, steps: int) -> Traffic:
        """The mean of a step."""
        return Traffic(*(total / steps for total in self))


class Tally:
    """Counts messages one by one; `total` is the sum so far."""

    def __init__(self) -> None:
        self.total = Traffic()

    def add(self, sent: int = 0, received: int = 0) -> None:
        """One message, or a pair of them, of so many bytes."""
        before = self.total
        self.total = Traffic(
            before.sent + sent, before.received + received, before.messages + (sent > 0)
        )


class CountedTransport:
    """A ring's transport that counts what passes through it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.tally = Tally()

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def size(self) -> int:
        return self._transport.size

    def sendrecv(
        self,
        outgoing: NDArray[Any],
        incoming: NDArray[Any],
        *,
        backwards: bool = False,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        self._transport.sendrecv(outgoing, incoming, backwards=backwards, meanwhile=meanwhile)
        self.tally.add(outgoing.nbytes, incoming.nbytes)

    def close(self) -> None:
        self._transport.close()


def socket_traffic() -> Traffic | None:
    """What all TCP connections of this process have carried so far, as the kernel counts it.

    So what a library sends on its own is measured too: payload, its headers and its negotiation.
    Connections that are closed count no more. None where the kernel does not tell.
    """
    sent = received = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue  # no socket, or gone meanwhile
        with link:
            if link.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if link.type != socket.SOCK_STREAM:
                continue
            info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        if len(info) < SENT_AT + 8:
            return None
        sent += struct.unpack_from("Q", info, SENT_AT)[0]
        sent += struct.unpack_from("I", info, NOT_SENT_AT)[0]
        received += struct.unpack_from("Q", info, RECEIVED_AT)[0]
    return Traffic(sent, received)
