"""The state that each worker has for itself: buffers of the model, and random generators.

Forward passes change some buffers on each rank by itself. The generators are those of torch (CPU
and device), of Python and of NumPy.
"""

import random
from collections.abc import Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.data import VirtualShares
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.canonical import check_types
from hvdtrain.tensors import copied_to_cpu, tensors_sha256

Buffers = dict[str, torch.Tensor | None]
WorkerState = Mapping[str, Any]  # "buffers": by name; "rng": random generators, or None


def state_of_process(model: torch.nn.Module, device: torch.device) -> WorkerState:
    """Return the state of a worker that has the process to itself."""
    return {"buffers": buffers_of(model), "rng": rng_state(device)}


def slots_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield the full name of each buffer, the module that holds it, and its key there."""
    for path, module in model.named_modules():
        for key in module._buffers:
            yield f"{path}.{key}" if path else key, module, key


def buffers_of(model: torch.nn.Module, names: Container[str] | None = None) -> Buffers:
    """Return copies of all buffers by name, or of those of `names`; None where none is set."""
    return {
        name: None if (buffer := module._buffers[key]) is None else buffer.clone()
        for name, module, key in slots_of(model)
        if names is None or name in names
    }


def load_buffers(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
    """Copy into the model's buffers; replace one that had none, another shape or another type."""
    for name, module, key in slots_of(model):
        if name not in buffers:
            continue
        old, new = module._buffers[key], buffers[name]
        if new is None:
            module._buffers[key] = None
        elif old is not None and _is_plain(old) and _is_plain(new) and old.numel() == new.numel():
            old.copy_(new.view_as(old))
        else:
            device = old.device if old is not None else next(model.parameters()).device
            module._buffers[key] = new.to(device, copy=True)


def _is_plain(buffer: torch.Tensor) -> bool:
    return buffer.layout is torch.strided and buffer.is_contiguous()


@contextmanager
def replaced(
    model: torch.nn.Module, buffers: Mapping[str, torch.Tensor | None]
) -> Iterator[torch.nn.Module]:
    """Yield the model with these values of buffers; then it has its own values of them again."""
    before = buffers_of(model, buffers)
    load_buffers(model, buffers)
    try:
        yield model
    finally:
        load_buffers(model, before)


def differing_buffers(model: torch.nn.Module, exchange: Exchange) -> list[str]:
    """Collective: return the names of the buffers that are not rank 0's on all ranks, in order.

    Those of batch norm are left out, as they have a rule of their own (`averaged_statistics`).
    """
    if exchange.size == 1:
        return []
    digests = {
        name: tensors_sha256({name: buffer})
        for name, module, key in slots_of(model)
        if not isinstance(module, _BatchNorm) and (buffer := module._buffers[key]) is not None
    }
    each = exchange.all_gather_object(digests, "hvdtrain.buffers")
    names = dict.fromkeys(name for held in each for name in held)
    return [name for name in names if any(held.get(name) != each[0].get(name) for held in each)]


def with_buffers_of_rank_0(
    model: torch.nn.Module, exchange: Exchange
) -> AbstractContextManager[torch.nn.Module]:
    """Collective: return a context in which all ranks have rank 0's `differing_buffers`."""
    if not (names := differing_buffers(model, exchange)):
        return nullcontext(model)
    held = buffers_of(model, names)
    differing = copied_to_cpu({name: held.get(name) for name in names})
    return replaced(model, exchange.broadcast_object(differing, "hvdtrain.buffers.of_rank_0"))


def exchanged(
    buffers: dict[int, Buffers], shares: VirtualShares, exchange: Exchange
) -> dict[int, Buffers]:
    """Collective: send the buffers of virtual workers that belong to another rank now, and remove
    them; return those of the workers that belong to this rank now.
    """
    local = shares.of_rank(exchange.rank)
    leaving = {n: copied_to_cpu(buffers.pop(n)) for n in list(buffers) if n not in local}
    of_ranks = exchange.all_gather_object(leaving, "hvdtrain.virtual.moved")
    return {n: held for of_rank in of_ranks for n, held in of_rank.items() if n in local}


def check_model(model: torch.nn.Module) -> None:
    """Raise UsageError for a model that virtual workers cannot share."""
    check_types(model)
    storages = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
    for name, buffer in model.named_buffers():
        dense = buffer.layout is torch.strided and buffer.numel()
        if dense and (parameter := storages.get(buffer.untyped_storage().data_ptr())):
            raise UsageError(
                f"--virtual-workers: the buffer {name} shares memory with the parameter "
                f"{parameter}: each virtual worker has its own buffers, but all share the "
                "parameters. Clone it"
            )


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
