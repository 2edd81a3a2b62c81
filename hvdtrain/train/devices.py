"""The device that a rank computes on: its choice, checks between ranks, repetition of bits, and
copies from it.
"""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.errors import UsageError, name_ranks
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.exchange.gpus import SHARES_GPU, find_devices
from hvdtrain.topology import Topology

# Types of torch's devices besides the CPU. (Those of ROCm are named cuda as well.)
ACCELERATORS: tuple[str, ...] = ("cuda",)


def choose_device(wanted: str, topology: Topology) -> torch.device:
    """Return the CPU, or the GPU of this local rank. Raises UsageError if it has none.

    Launchers that bind each process to a GPU of its own, such as Slurm, show it no other one; of a
    divided GPU (MIG) a process sees one part at most. So a single visible GPU is the rank's own.
    """
    devices = () if wanted == "cpu" else find_devices()
    visible = [device for device in devices if device.type in ACCELERATORS]
    if wanted == "cpu" or (wanted == "auto" and not visible):
        return torch.device("cpu")
    seen = f"{len(visible)} visible (CUDA_VISIBLE_DEVICES={_visible_setting()})"
    if not visible:
        cause = seen if torch.backends.cuda.is_built() else "this torch is built without CUDA"
        raise UsageError(f"--device=cuda: no CUDA device: {cause}. Use --device cpu, or auto")
    index = 0 if len(visible) == 1 else topology.local_rank
    if index >= len(visible):
        raise UsageError(
            f"--device={wanted}: local rank {topology.local_rank} has no CUDA device, {seen}. "
            f"Start at most {len(visible)} per host, or use --device cpu"
        )
    torch.accelerator.set_device_index(index)
    return visible[index]


def name_of(device: torch.device) -> str:
    """Return the value of --device that chooses a device of this type."""
    return "cpu" if device.type == "cpu" else "cuda"


def shown(device: torch.device) -> str:
    """Return a device as users see it: its type, and the name of a GPU."""
    return "cpu" if device.type == "cpu" else f"{device.type} ({_properties(device).name})"


def check_devices(device: torch.device, exchange: Exchange) -> None:
    """Collective: raise AgreedFailure if some ranks have a GPU and others none, or two share one.

    NCCL refuses a GPU with several ranks, unless its own variable permits it.
    """
    unit = "" if device.type == "cpu" else str(getattr(_properties(device), "uuid", ""))
    identity = (device.type, socket.gethostname(), unit)
    devices = exchange.all_gather_object(identity, "hvdtrain.devices")
    sharing = [rank for rank, other in enumerate(devices) if unit and other == identity]

    def check() -> None:
        if device.type != devices[0][0]:
            raise UsageError(
                f"--device: {device.type} here, and {devices[0][0]} on rank 0, but all ranks must "
                "have devices of one type: give --device cpu, or --device cuda, which names the "
                "ranks without a GPU"
            )
        if len(sharing) > 1 and os.environ.get(SHARES_GPU) != "1":
            raise UsageError(
                f"--device: {name_ranks(sharing)} would share one GPU ({unit}, "
                f"CUDA_VISIBLE_DEVICES={_visible_setting()}), which NCCL refuses. Start one "
                "worker for each GPU, or use --device cpu"
            )

    run_on_all(exchange, "devices", check)


def describe(device: torch.device) -> str:
    """Return what the bits of results depend on in a device; the CPU is described elsewhere."""
    if device.type == "cpu":
        return "cpu"
    gpu = _properties(device)
    return (
        f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} "
        f"multiprocessors, cuDNN {torch.backends.cudnn.version()}, products of float32 in "
        f"{torch.get_float32_matmul_precision()} precision, TF32 in convolutions "
        f"{'on' if torch.backends.cudnn.allow_tf32 else 'off'}"
    )


def repeat_bits(device: torch.device, demanded: bool) -> None:
    """Make torch choose operations that are deterministic.

    For one that has no such form torch raises an error if repetition is `demanded`, and otherwise
    prints a warning, once; on the CPU nothing changes then.
    """
    if device.type == "cpu" and not demanded:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True, warn_only=not demanded)
    torch.backends.cudnn.benchmark = False


def move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move the state of an optimizer beside its parameters, which have been moved.

    Some make it at once, such as Adagrad, when a script's parameters are still on the CPU.
    """
    for group in optimizer.param_groups:
        # The count of steps is a scalar on the CPU, but where a kernel on the device reads it.
        takes_scalars = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and (value.dim() > 0 or takes_scalars):
                    optimizer.state[parameter][name] = value.to(parameter.device)


def _visible_setting() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")


def _properties(device: torch.device) -> Any:
    return torch.get_device_module(device).get_device_properties(device)


def reader(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies values to the CPU. It waits for what the device has to do now,
    not for more, such as the next step.
    """
    if device.type == "cpu":
        return lambda values: values
    module = torch.get_device_module(device)
    ready = module.Event()
    ready.record()

    def read(values: torch.Tensor) -> torch.Tensor:
        beside = module.Stream(values.device)
        beside.wait_event(ready)
        with module.stream(beside):
            copied = torch.empty_like(values, device="cpu", pin_memory=True)
            copied.copy_(values, non_blocking=True)
        beside.synchronize()
        return copied

    return read
