"""The GPUs (or other accelerators of torch) whose tensors the ranks of a job can exchange."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hvdtrain.errors import name_ranks

if TYPE_CHECKING:
    from hvdtrain.exchange.horovod import HorovodExchange

SHARES_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"  # permits several ranks on a GPU, from NCCL 2.30 on


@dataclass(frozen=True)
class OwnGpu:
    """This rank's GPU for collectives. None: `why` it has none; empty where no rank sees a GPU."""

    device: torch.device | None
    why: str = ""


def find_devices() -> list[torch.device]:
    """Return the GPUs that this process sees; none on a machine without."""
    # In this order: torch 2.6 raises an error when asked for an accelerator where there is none.
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return []
    return [torch.device(device.type, index) for index in range(torch.accelerator.device_count())]


def find_own_gpu(exchange: HorovodExchange) -> OwnGpu:
    """Collective: return this rank's GPU, if every rank has one of its own and Horovod takes its
    tensors. The answer is alike on every rank.
    """
    devices, local_rank = find_devices(), exchange.local_rank
    # Slurm, for one, shows each process its own GPU alone.
    index = 0 if len(devices) == 1 else local_rank
    device = devices[index] if index < len(devices) else None
    unit = (socket.gethostname(), uuid_of(device)) if device is not None else None
    units = exchange.all_gather_object(unit, "hvdtrain.gpus")
    if units.count(None) == len(units):
        return OwnGpu(None)
    if not exchange.takes_gpu_tensors:
        return OwnGpu(None, "Horovod is built without GPU operations")
    without = [rank for rank, other in enumerate(units) if other is None]
    if without:
        return OwnGpu(None, f"{name_ranks(without)} without a GPU")
    shared = [rank for rank, other in enumerate(units) if units.count(other) > 1]
    if shared and os.environ.get(SHARES_GPU) != "1":
        return OwnGpu(None, f"{name_ranks(shared)} would share a GPU")
    if device is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return OwnGpu(device)


def uuid_of(device: torch.device) -> str:
    """Return a GPU's UUID, which is the same in all processes; else its number in this one."""
    of_device = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)
    return str(getattr(of_device(device), "uuid", device))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; nothing on a CPU, which never lags."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
