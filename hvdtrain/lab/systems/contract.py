"""The contract of a system that is compared: its processes, and what each does in a step."""

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
    """What the processes of one system are told: the same text for each of them."""

    system: str
    workers: int  # N: devices that compute
    servers: int  # of parameter servers
    work: WorkSpec
    towers_reduction: str
    towers_dim: int
    folder: str  # for what processes tell one another when they meet, and for their results
    token: str  # a secret, by which the ring's processes know one another
    time_limit_s: float
    controller_pid: int  # of the command that started all: with it ends every process

    def as_text(self) -> str:
        """For a file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Spec:
        """Back from a file."""
        values = json.loads(text)
        return cls(**values | {"work": WorkSpec(**values["work"])})


@dataclass(frozen=True)
class Place:
    """Where a process stands among those of its system."""

    number: int
    processes: int
    spec: Spec

    @property
    def workers(self) -> int:
        return self.spec.workers

    @property
    def meeting_point(self) -> Path:
        """A file through which the processes find one another."""
        return Path(self.spec.folder) / "store"


class Strategy:
    """One process's part in a system. Derive from it, and define `step` and `parameters`.

    The update of a step is the one that `single` makes: with the gradient of the mean loss over
    the global batch, however unevenly it is shared out. Phases are told to `work.clock`, whose
    `leave` ends each step.
    """

    what: ClassVar[str] = ""
    judged: ClassVar[bool] = True  # whether its parameters must be those of `single`
    under_horovodrun: ClassVar[bool] = False
    # How `traffic` is known: "counted" where we send and receive ourselves; "sockets" where a
    # library does and the kernel counts for us.
    measured: ClassVar[str] = "counted"

    def __init__(self, work: Work, place: Place) -> None:
        """Collective: every process of the system makes one."""
        self.work = work
        self.place = place

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        """What each process of the system is called."""
        return [f"worker {rank}" for rank in range(spec.workers)]

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic] | None:
        """What each rank sends and receives in a step, for gradients of `size` bytes, as theory
        has it; None where it depends on more than that.
        """
        return None

    @property
    def name(self) -> str:
        """This process's."""
        return self.processes(self.place.spec)[self.place.number]

    def step(self, batch: GlobalBatch) -> None:
        """Collective: one update from one global batch."""
        raise NotImplementedError(f"{type(self).__name__}.step is missing")

    def parameters(self) -> Parameters:
        """Collective: the model's parameters, by name, as far as this process holds them."""
        raise NotImplementedError(f"{type(self).__name__}.parameters is missing")

    def traffic(self) -> Mapping[str, Traffic] | None:
        """What each rank in this process has sent and received so far; None: not known."""
        return {self.name: Traffic()}

    def notes(self) -> list[str]:
        """What a reader should know of how it ran."""
        return []

    def figures(self) -> dict[str, float]:
        """Further measurements, such as staleness."""
        return {}

    def close(self) -> None:
        """Collective: let go of what it holds."""


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
