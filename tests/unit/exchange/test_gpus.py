"""Which GPU a rank uses for collectives, and the reasons for none: the CPU stands for GPUs."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hvdtrain.exchange import gpus
from hvdtrain.exchange.gpus import OwnGpu, find_devices, find_own_gpu, synchronize

HOST = socket.gethostname()


@dataclass
class Exchange:
    """One rank's view: what the ranks before and after it send."""

    local_rank: int = 0
    takes_gpu_tensors: bool = True
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()
    sent: list[Any] = field(default_factory=list)

    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        self.sent.append(value)
        return [*self.before, value, *self.after]


def see(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let this process see so many devices, each with an identity of its own."""
    devices = [torch.device("cpu", number) for number in range(count)]
    monkeypatch.setattr(gpus, "find_devices", lambda: devices)
    monkeypatch.setattr(gpus, "uuid_of", lambda device: f"GPU-{device.index}")
    monkeypatch.delenv(gpus.SHARES_GPU, raising=False)


ELSEWHERE = ("other", "GPU-0")


@pytest.mark.parametrize(
    ("visible", "exchange", "expected"),
    [
        (0, Exchange(after=(None,)), OwnGpu(None)),
        (0, Exchange(takes_gpu_tensors=False, after=(None,)), OwnGpu(None)),
        (2, Exchange(local_rank=1, before=(ELSEWHERE,)), OwnGpu(torch.device("cpu", 1))),
        (1, Exchange(local_rank=3, before=(ELSEWHERE,)), OwnGpu(torch.device("cpu", 0))),
        (
            *(2, Exchange(takes_gpu_tensors=False, after=(ELSEWHERE,))),
            OwnGpu(None, "Horovod is built without GPU operations"),
        ),
        (1, Exchange(after=(None, None)), OwnGpu(None, "ranks 1, 2 without a GPU")),
        (2, Exchange(local_rank=2, before=(ELSEWHERE,)), OwnGpu(None, "rank 1 without a GPU")),
        (
            *(1, Exchange(before=(ELSEWHERE, (HOST, "GPU-0")))),
            OwnGpu(None, "ranks 1, 2 would share a GPU"),
        ),
    ],
)
def test_the_gpu_of_a_rank(
    visible: int, exchange: Exchange, expected: OwnGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when ranks would share a GPU, one uses that of another, some use GPUs and others do
    not, or the reason why none is used is lost.
    """
    see(monkeypatch, visible)
    assert find_own_gpu(exchange) == expected


def test_shared_gpus_that_nccl_permits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when NCCL's variable for several ranks on a GPU has no effect."""
    see(monkeypatch, 1)
    monkeypatch.setenv(gpus.SHARES_GPU, "1")
    assert find_own_gpu(Exchange(before=((HOST, "GPU-0"),))).device is not None


def test_without_an_accelerator() -> None:
    """Fails when a machine without GPUs has devices, or waiting for the CPU raises."""
    if not torch.accelerator.is_available():
        assert find_devices() == []
    synchronize(torch.device("cpu"))
