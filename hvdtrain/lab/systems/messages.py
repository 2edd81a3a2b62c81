"""Counted point-to-point messages by torch.distributed over Gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed

from hvdtrain.lab.systems.contract import Place, Tally, Traffic

LOOPBACK = "lo"  # all processes are on this machine

Wait = Callable[[], object]


def join_group(place: Place) -> None:
    """Collective: join the torch process group of all processes of the system."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(place.meeting_point), place.processes),  # type: ignore[attr-defined]  # public, but not listed
        rank=place.number,
        world_size=place.processes,
        timeout=timedelta(seconds=place.spec.time_limit_s),
    )


def leave_group() -> None:
    """Collective: wait for all, then leave: the first to leave closes connections of the others."""
    distributed.barrier()
    distributed.destroy_process_group()


class Messages:
    """Counted messages, each a tensor to or from the process of a given number."""

    def __init__(self, place: Place) -> None:
        """Collective: every process of the system constructs one."""
        join_group(place)
        self._tally = Tally()

    @property
    def traffic(self) -> Traffic:
        """Total traffic so far."""
        return self._tally.total

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send `tensor`; return once it may be changed."""
        self.start_send(tensor, to)()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive a message from `source` into `tensor`."""
        self.start_receive(tensor, source)()

    def receive_from_any(self, tensor: torch.Tensor) -> int:
        """Receive the first message to arrive into `tensor`; return its sender."""
        sender = distributed.recv(tensor)
        self._tally.add(received=tensor.nbytes)
        return int(sender)

    def start_send(self, tensor: torch.Tensor, to: int) -> Wait:
        """Start to send; return a function that waits, until which `tensor` must not change."""
        self._tally.add(sent=tensor.nbytes)
        return _waiting(distributed.isend(tensor, to))

    def start_receive(self, tensor: torch.Tensor, source: int) -> Wait:
        """Start to receive; return a function that waits, until which `tensor` must not be read."""
        self._tally.add(received=tensor.nbytes)
        return _waiting(distributed.irecv(tensor, source))

    def close(self) -> None:
        """Collective: leave the group."""
        leave_group()


def _waiting(request: distributed.Work | None) -> Wait:
    if request is None:
        raise RuntimeError("this process is not in the process group")
    return request.wait
