"""Messages from process to process, by torch.distributed over Gloo, counted."""

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
    """Collective: torch's process group of all processes of the system."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(place.meeting_point), place.processes),  # type: ignore[attr-defined]  # public, but not listed
        rank=place.number,
        world_size=place.processes,
        timeout=timedelta(seconds=place.spec.time_limit_s),
    )


def leave_group() -> None:
    """Collective: wait for one another, as the first to leave closes the others' connections."""
    distributed.barrier()
    distributed.destroy_process_group()


class Messages:
    """Point to point: a tensor from one process to another. Each names the other's number."""

    def __init__(self, place: Place) -> None:
        """Collective: every process of the system makes one."""
        join_group(place)
        self._tally = Tally()

    @property
    def traffic(self) -> Traffic:
        """So far."""
        return self._tally.total

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Returns once `tensor` may be changed."""
        self.start_send(tensor, to)()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill `tensor`."""
        self.start_receive(tensor, source)()

    def receive_from_any(self, tensor: torch.Tensor) -> int:
        """Fill `tensor` with the message that comes first; returns who sent it."""
        sender = distributed.recv(tensor)
        self._tally.add(received=tensor.nbytes)
        return int(sender)

    def start_send(self, tensor: torch.Tensor, to: int) -> Wait:
        """Begin; the call of the result waits. Until then `tensor` must stay as it is."""
        self._tally.add(sent=tensor.nbytes)
        return _waiting(distributed.isend(tensor, to))

    def start_receive(self, tensor: torch.Tensor, source: int) -> Wait:
        """Begin; the call of the result waits. Until then `tensor` is not to be read."""
        self._tally.add(received=tensor.nbytes)
        return _waiting(distributed.irecv(tensor, source))

    def close(self) -> None:
        """Collective: leave the group."""
        leave_group()


def _waiting(request: distributed.Work | None) -> Wait:
    if request is None:
        raise RuntimeError("this process is in no group")
    return request.wait
