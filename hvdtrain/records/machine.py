"""The machine and the software of a run, which are recorded, and compared on resume."""

from __future__ import annotations

import importlib.metadata
import platform
from contextlib import suppress
from pathlib import Path

import torch

from hvdtrain import __version__
from hvdtrain.train.devices import describe


def versions() -> dict[str, str]:
    """Return the versions of hvdtrain, Python and the libraries that compute and exchange."""
    by_package = {"hvdtrain": __version__, "python": platform.python_version()}
    by_package["torch"] = str(torch.__version__)
    for package in ("horovod", "mpi4py"):
        with suppress(importlib.metadata.PackageNotFoundError):
            by_package[package] = importlib.metadata.version(package)
    return by_package


def machine(device: torch.device) -> dict[str, str]:
    """Return what the bits of results depend on, besides the configuration and the data."""
    processor = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line[:10] == "model name"]
        processor = next(iter(models), processor)
    return {
        "processor": f"{processor}, {torch.backends.cpu.get_cpu_capability()}",
        "compute_threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "device": describe(device),
    }


class GpuMeter:
    """Memory and utilisation of this process's GPU; nothing on another device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_utilisation = True

    def read(self) -> dict[str, float]:
        """Return the peak of allocated memory since the last call, and, as far as the driver's
        library (the package nvidia-ml-py) is there, the utilisation of the last second.
        """
        if self._device.type == "cpu":
            return {}
        module = torch.get_device_module(self._device)
        figures: dict[str, float] = {
            "memory_mib": module.max_memory_allocated(self._device) >> 20,
        }
        module.reset_peak_memory_stats(self._device)
        if self._has_utilisation:
            try:
                figures["utilisation_percent"] = module.utilization(self._device)
            except Exception:  # no library, another version of it, or the driver permits no reading
                self._has_utilisation = False
        return figures


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return a line for each property of the machine that has changed since `before`."""
    return [
        f"{name.replace('_', ' ')}: {value} then, {now.get(name)} now"
        for name, value in before.items()
        if now.get(name) != value
    ]
