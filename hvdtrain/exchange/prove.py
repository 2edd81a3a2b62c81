"""The check of a newly built Horovod: `horovodrun -np 2 python -m hvdtrain.exchange.prove`."""

import sys

import torch

from hvdtrain.exchange.gpus import find_own_gpu
from hvdtrain.exchange.horovod import HorovodExchange
from hvdtrain.tensors import CPU


def prove() -> None:
    """Collective: exit with code 1 unless an all-reduce gives its known result; on the ranks' GPUs
    too, if Horovod is built with NCCL and each rank has one.

    `hvdtrain install-horovod` runs it, for each controller.
    """
    exchange = HorovodExchange()
    gpu = find_own_gpu(exchange).device if exchange.has_nccl else None
    wrong = [
        str(device) for device in filter(None, (CPU, gpu)) if not _adds_right(exchange, device)
    ]
    exchange.close()
    if exchange.size < 2 or wrong:
        where = f" on {', '.join(wrong)}" if gpu else ""
        sys.exit(f"all-reduce over {exchange.size} ranks gave a wrong sum{where}")


def _adds_right(exchange: HorovodExchange, device: torch.device) -> bool:
    """Collective: return whether an all-reduce of tensors on the device gives its known result."""
    ranks, values = exchange.size, torch.arange(1000, dtype=torch.float64, device=device)
    total = exchange.sum_later(values + 1000 * exchange.rank, f"hvdtrain.prove.{device.type}")()
    return torch.equal(total, ranks * values + 1000 * sum(range(ranks)))


if __name__ == "__main__":
    prove()
