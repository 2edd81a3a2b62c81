"""Buffers of a model: copies, and those that forward passes change on each rank by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.exchange import Exchange, tensors_sha256
from hvdtrain.tensors import copied_to_cpu

Buffers = dict[str, torch.Tensor | None]


def _slots(model: torch.nn.Module) -> Iterator[tuple[str, Buffers, str]]:
    """Yield the full name of each buffer, the dictionary that holds it, and its key."""
    for path, module in model.named_modules():
        for key in module._buffers:
            yield f"{path}.{key}" if path else key, module._buffers, key


def buffers_of(model: torch.nn.Module) -> Buffers:
    """Return copies of all buffers by name; None for those that are not set."""
    return {
        name: None if (buffer := held[key]) is None else buffer.clone()
        for name, held, key in _slots(model)
    }


def load_buffers(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
    """Copy into the model's buffers; replace one that had none, another shape or another type."""
    for name, held, key in _slots(model):
        if name not in buffers:
            continue
        old, new = held[key], buffers[name]
        if new is None:
            held[key] = None
        elif old is not None and _is_plain(old) and _is_plain(new) and old.numel() == new.numel():
            old.copy_(new.view_as(old))
        else:
            device = old.device if old is not None else next(model.parameters()).device
            held[key] = new.to(device, copy=True)


def _is_plain(buffer: torch.Tensor) -> bool:
    return buffer.layout is torch.strided and buffer.is_contiguous()


def differing_buffers(model: torch.nn.Module, exchange: Exchange) -> list[str]:
    """Collective: return the names of the buffers that are not rank 0's on all ranks, in order.

    Those of batch norm are left out, as they have a rule of their own (`averaged_statistics`).
    """
    if exchange.size == 1:
        return []
    digests = {
        name: tensors_sha256({name: buffer})
        for name, buffer in _others(model).items()
        if buffer is not None
    }
    each = exchange.all_gather_object(digests, "hvdtrain.buffers")
    names = dict.fromkeys(name for held in each for name in held)
    return [name for name in names if any(held.get(name) != each[0].get(name) for held in each)]


@contextmanager
def with_buffers_of_rank_0(model: torch.nn.Module, exchange: Exchange) -> Iterator[None]:
    """Collective: within the context all ranks have rank 0's values of `differing_buffers`."""
    names = differing_buffers(model, exchange)
    if not names:
        yield
        return
    before = buffers_of(model)
    differing = copied_to_cpu({name: before.get(name) for name in names})
    load_buffers(model, exchange.broadcast_object(differing, "hvdtrain.buffers.of_rank_0"))
    try:
        yield
    finally:
        load_buffers(model, {name: before.get(name) for name in names})


def _others(model: torch.nn.Module) -> Buffers:
    """Return the buffers of all layers but batch norm, by name."""
    batch_norm = {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for key in module._buffers
    }
    return {name: held[key] for name, held, key in _slots(model) if name not in batch_norm}
