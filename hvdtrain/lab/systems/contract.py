"""The interface of a compared system: its processes, the step of each, and its traffic."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from numpy.typing import NDArray

from hvdtrain.lab.systems.work import GlobalBatch, Work, WorkSpec
from hvdtrain.ring.transports import Transport

Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Spec:
    """The parameters of one run of a system, the same for all of its processes."""

    system: str
    workers: int  # N: devices that compute
    servers: int  # K: parameter servers
    work: WorkSpec
    towers_reduction: str
    towers_dim: int
    folder: str  # for the rendezvous file and the results
    token: str  # secret by which the ring's processes authenticate each other
    time_limit_s: float
    controller_pid: int  # of the starting command; every process ends with it

    def as_text(self) -> str:
        """Serialise to JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Spec:
        """Parse the JSON that `as_text` returns."""
        values = json.loads(text)
        return cls(**values | {"work": WorkSpec(**values["work"])})


@dataclass(frozen=True)
class Place:
    """The position of a process among those of its system."""

    number: int
    processes: int
    spec: Spec

    @property
    def workers(self) -> int:
        return self.spec.workers

    @property
    def meeting_point(self) -> Path:
        """The rendezvous file of the processes."""
        return Path(self.spec.folder) / "store"


class Strategy:
    """One process of a system. A derived class defines `step` and `parameters`.

    A step makes the same update as `single`: with the gradient of the mean loss over the global
    batch, however unevenly the batch is distributed. It reports its phases to `work.clock`, and
    ends with the clock's `leave`.
    """

    what: ClassVar[str] = ""
    judged: ClassVar[bool] = True  # whether its parameters must equal those of `single`
    under_horovodrun: ClassVar[bool] = False
    # Source of `traffic`: "counted" where hvdtrain sends and receives, "sockets" where a library
    # does and the kernel counts.
    measured: ClassVar[str] = "counted"

    def __init__(self, work: Work, place: Place) -> None:
        """Collective: every process of the system constructs one."""
        self.work = work
        self.place = place

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        """Return the name of each process of the system."""
        return [f"worker {rank}" for rank in range(spec.workers)]

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic] | None:
        """Return the theoretical traffic of each rank per step, for gradients of `size` bytes; None
        where it depends on more than that.
        """
        return None

    @property
    def name(self) -> str:
        """Name of this process."""
        return self.processes(self.place.spec)[self.place.number]

    def step(self, batch: GlobalBatch) -> None:
        """Collective: make one update from one global batch."""
        raise NotImplementedError(f"{type(self).__name__}.step is missing")

    def parameters(self) -> Parameters:
        """Collective: return the parameters that this process holds, by name."""
        raise NotImplementedError(f"{type(self).__name__}.parameters is missing")

    def traffic(self) -> Mapping[str, Traffic] | None:
        """Return the total traffic so far of each rank in this process; None if unknown."""
        return {self.name: Traffic()}

    def notes(self) -> list[str]:
        """Return remarks on how the system ran, for the reader of the results."""
        return []

    def figures(self) -> dict[str, float]:
        """Return further measurements, such as staleness."""
        return {}

    def close(self) -> None:
        """Collective: release connections and threads."""


# Offsets in struct tcp_info of linux/tcp.h: tcpi_bytes_received, tcpi_notsent_bytes (written, but
# still in the kernel's buffer), and tcpi_bytes_sent (since Linux 4.19).
RECEIVED_AT, NOT_SENT_AT, SENT_AT, INFO_BYTES = 128, 144, 200, 256


class Traffic(NamedTuple):
    """Bytes sent and received, and messages sent: totals, or means per step."""

    sent: float = 0
    received: float = 0
    messages: float = 0

    def since(self, earlier: Traffic) -> Traffic:
        """Return the difference to `earlier`."""
        return Traffic(*(now - then for now, then in zip(self, earlier, strict=True)))

    def over(self, steps: int) -> Traffic:
        """Return the mean per step."""
        return Traffic(*(total / steps for total in self))


class Tally:
    """A counter of messages; `total` is the sum so far."""

    def __init__(self) -> None:
        self.total = Traffic()

    def add(self, sent: int = 0, received: int = 0) -> None:
        """Count one message, or one in each direction, of the given bytes."""
        before = self.total
        self.total = Traffic(
            before.sent + sent, before.received + received, before.messages + (sent > 0)
        )


class CountedTransport:
    """A ring transport that counts its traffic."""

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
    """Return the kernel's byte counts over all open TCP connections of this process.

    They include what a library sends by itself: payload, headers and negotiation. Closed
    connections are not counted. None where the kernel does not report these counts.
    """
    sent = received = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue  # not a socket, or closed since it was listed
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
