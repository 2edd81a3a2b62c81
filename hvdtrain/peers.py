"""A ring over the ranks of torch.distributed, for scripts that use DistributedDataParallel."""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch.distributed

from hvdtrain.own_address import route_to
from hvdtrain.ring.transports import Transport
from hvdtrain.ring.transports.tcp import TcpTransport, listen


def ring_of_torch_distributed() -> Transport:
    """Collective: sockets between the ranks, whose addresses and secret the job itself tells."""
    group = torch.distributed
    rank, size = group.get_rank(), group.get_world_size()
    listener = listen(route_to(os.environ.get("MASTER_ADDR", "localhost")))
    addresses: list[Any] = [None] * size
    group.all_gather_object(addresses, listener.getsockname()[:2])
    token = [secrets.token_bytes(32) if rank == 0 else b""]
    group.broadcast_object_list(token, src=0)
    return TcpTransport(rank, listener, addresses, token[0])
