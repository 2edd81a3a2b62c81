"""What measurements need of a device, whatever its type: its name, and the end of its work."""

from __future__ import annotations

import torch


def find_devices() -> list[torch.device]:
    """Return the accelerators that this process sees, such as GPUs; none on a machine without."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return []
    return [torch.device(accelerator.type, it) for it in range(torch.accelerator.device_count())]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; nothing on a CPU, which never lags."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def name_of(device: torch.device) -> str:
    """Return the device as text: its number, and its model as far as torch gives one."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device} ({name(device)})" if name else str(device)
