"""The interface of a compared system: its processes, the step of each, messages and traffic."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import distributed

from hvdtrain.lab.systems.work import GlobalBatch, Work, WorkSpec, parameters_of
from hvdtrain.ring import Transport

LOOPBACK = "lo"  # all processes are on this machine

Tensors = Mapping[int, torch.Tensor]  # by number of process
Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class SystemOptions:
    """The options of every system of a comparison."""

    workers: int  # N: devices that compute
    servers: int  # K: parameter servers
    work: WorkSpec
    towers_reduction: str
    towers_dim: int
    time_limit_s: float


@dataclass(frozen=True, kw_only=True)
class Spec(SystemOptions):
    """The parameters of one run of a system, the same for all of its processes."""

    system: str
    folder: str  # for the rendezvous file and the results
    token: str  # secret by which the ring's processes authenticate each other
    log_interval: int = 10  # steps, of systems that log them


@dataclass(frozen=True)
class Member:
    """A process as a member of its system: its number among all processes."""

    number: int
    processes: int
    spec: Spec

    @property
    def workers(self) -> int:
        return self.spec.workers

    def open_store(self) -> Any:
        """Return the store, a file, through which the processes of the system find each other."""
        # The type is public, but not listed.
        store = distributed.FileStore(f"{self.spec.folder}/store", self.processes)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=self.spec.time_limit_s))
        return store


class Strategy:
    """One process of a system. A derived class defines `step`.

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

    def __init__(self, work: Work, member: Member) -> None:
        """Collective: every process of the system constructs one."""
        self.work = work
        self.member = member
        # To the other processes, where hvdtrain sends by itself.
        self.link: Messages | CountedTransport | None = None

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        """Return the name of each process of the system."""
        return [f"worker {rank}" for rank in range(spec.workers)]

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic] | None:
        """Return each rank's traffic per step in theory, for gradients of `size` bytes, or None."""
        return None

    @property
    def name(self) -> str:
        """Name of this process."""
        return self.processes(self.member.spec)[self.member.number]

    def step(self, batch: GlobalBatch) -> None:
        """Collective: make one update from one global batch."""
        raise NotImplementedError(f"{type(self).__name__}.step is missing")

    def parameters(self) -> Parameters:
        """Collective: return the parameters that this process holds, by name."""
        return parameters_of(self.work.model)

    def traffic(self) -> Mapping[str, Traffic] | None:
        """Return the total traffic so far of each rank in this process; None if unknown."""
        counted = self.link.traffic if self.link else Traffic()
        traffic = socket_traffic() if self.measured == "sockets" else counted
        return {self.name: traffic} if traffic else None

    def notes(self) -> list[str]:
        """Return remarks on how the system ran, for the reader of the results."""
        return []

    def figures(self) -> dict[str, float]:
        """Return further measurements, such as staleness."""
        return {}

    def close(self) -> None:
        """Collective: release connections and threads."""
        if self.link:
            self.link.close()


class RingTraffic(Strategy):
    """A system that sends as much as a ring all-reduce."""

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic]:
        """Return 2 (N - 1) / N S bytes each way, in 2 (N - 1) messages if segments are sent whole.

        This is the mean over ranks: the segments of a buffer may differ by one element.
        """
        steps = 2 * (spec.workers - 1)
        each = Traffic(steps * size / spec.workers, steps * size / spec.workers, steps)
        return dict.fromkeys(cls.processes(spec), each)


@dataclass(frozen=True)
class Traffic:
    """Bytes sent and received, and messages sent: totals, or means per step."""

    sent: float = 0
    received: float = 0
    messages: float = 0

    def plus(self, sent: int = 0, received: int = 0) -> Traffic:
        """Return the total with one more message, or one in each direction, of these bytes."""
        return Traffic(self.sent + sent, self.received + received, self.messages + (sent > 0))

    def since(self, earlier: Traffic, steps: int) -> Traffic:
        """Return the mean per step of the traffic since `earlier`, over so many steps."""
        return Traffic(
            (self.sent - earlier.sent) / steps,
            (self.received - earlier.received) / steps,
            (self.messages - earlier.messages) / steps,
        )


def join_group(member: Member) -> None:
    """Collective: join the torch process group, over Gloo, of all processes of the system."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    distributed.init_process_group(
        "gloo",
        store=member.open_store(),
        rank=member.number,
        world_size=member.processes,
        timeout=timedelta(seconds=member.spec.time_limit_s),
    )


def leave_group() -> None:
    """Collective: wait for all, then leave: the first to leave closes connections of the others."""
    distributed.barrier()
    distributed.destroy_process_group()


class Messages:
    """Counted messages in the group, each a tensor to or from the process of a given number."""

    def __init__(self, member: Member) -> None:
        """Collective: join the group."""
        join_group(member)
        self.traffic = Traffic()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send `tensor`; return once it may be changed."""
        self.exchange({to: tensor}, {})

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive a message from `source` into `tensor`."""
        self.exchange({}, {source: tensor})

    def receive_from_any(self, tensor: torch.Tensor) -> int:
        """Receive the first message to arrive into `tensor`; return its sender."""
        sender = distributed.recv(tensor)
        self.traffic = self.traffic.plus(received=tensor.nbytes)
        return int(sender)

    def exchange(self, outgoing: Tensors, incoming: Tensors) -> None:
        """Send to and receive from several processes at the same time."""
        requests = [
            *(distributed.isend(tensor, to) for to, tensor in outgoing.items()),
            *(distributed.irecv(tensor, source) for source, tensor in incoming.items()),
        ]
        for request in filter(None, requests):  # None: only outside the group
            request.wait()
        for tensor in outgoing.values():
            self.traffic = self.traffic.plus(sent=tensor.nbytes)
        for tensor in incoming.values():
            self.traffic = self.traffic.plus(received=tensor.nbytes)

    def close(self) -> None:
        """Collective: leave the group."""
        leave_group()


class CountedTransport:
    """A ring transport that counts its traffic."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.close = transport.close
        self.traffic = Traffic()
        self._transport = transport

    def sendrecv(
        self,
        outgoing: NDArray[Any],
        incoming: NDArray[Any],
        *,
        backwards: bool = False,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        self._transport.sendrecv(outgoing, incoming, backwards=backwards, meanwhile=meanwhile)
        self.traffic = self.traffic.plus(outgoing.nbytes, incoming.nbytes)


# Offsets in struct tcp_info of linux/tcp.h: tcpi_bytes_received, tcpi_notsent_bytes (written, but
# still in the kernel's buffer), and tcpi_bytes_sent (since Linux 4.19).
RECEIVED_AT, NOT_SENT_AT, SENT_AT, INFO_BYTES = 128, 144, 200, 256


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
            over_ip = link.family in (socket.AF_INET, socket.AF_INET6)
            if not over_ip or link.type != socket.SOCK_STREAM:
                continue
            info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        if len(info) < SENT_AT + 8:
            return None
        sent += struct.unpack_from("Q", info, SENT_AT)[0]
        sent += struct.unpack_from("I", info, NOT_SENT_AT)[0]
        received += struct.unpack_from("Q", info, RECEIVED_AT)[0]
    return Traffic(sent, received)
