"""A ring over the ranks of torch.distributed, for scripts that use DistributedDataParallel."""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch.distributed

from hvdtrain.exchange.address import route_to
from hvdtrain.pulse import RING_TOKEN
from hvdtrain.ring.transports import Transport
from hvdtrain.ring.transports.tcp import TcpTransport, listen, token_of_launcher


def ring_of_torch_distributed() -> Transport:
    """Collective: return a ring of sockets; addresses are exchanged by torch.distributed."""
    group = torch.distributed
    rank, size = group.get_rank(), group.get_world_size()
    listener = listen(route_to(os.environ.get("MASTER_ADDR", "localhost")))
    gathered: list[Any] = [None] * size
    group.all_gather_object(gathered, (listener.getsockname()[:2], RING_TOKEN in os.environ))
    addresses, given = zip(*gathered, strict=True)
    token = [token_of_launcher(given)]
    if token[0] is None:
        token = [secrets.token_bytes(32) if rank == 0 else None]
        group.broadcast_object_list(token, src=0)
    assert token[0] is not None
    return TcpTransport(rank, listener, addresses, token[0])
