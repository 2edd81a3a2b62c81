"""Random generators of a process: torch's (CPU and device), Python's and NumPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_all(*numbers: int) -> None:
    """Seed the generators of Python, NumPy and torch (on all devices)."""
    seed = numbers[0]
    if numbers[1:]:
        seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed records the stack for each kind of device, which takes 0.5 ms
        torch.default_generator.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators of torch (CPU and `device`), Python and NumPy."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    on_cpu = device.type == "cpu"
    return {
        "torch": torch.get_rng_state(),
        "cuda": None if on_cpu else torch.get_device_module(device).get_rng_state(device),
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state of `rng_state`."""
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and state["cuda"] is not None:
        torch.get_device_module(device).set_rng_state(state["cuda"], device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
