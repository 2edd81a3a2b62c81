"""Buffers of a model: copies, and those that forward passes change on each rank by itself."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.canonical import check_types
from hvdtrain.tensors import copied_to_cpu, tensors_sha256

Buffers = dict[str, torch.Tensor | None]


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
