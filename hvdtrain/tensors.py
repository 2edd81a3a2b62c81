"""Nested structures of tensors, such as batches and states: their items, changed copies, hashes."""

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

CPU = torch.device("cpu")


def items_of(value: Any) -> Mapping[Any, Any] | None:
    """Return the items of a structure by key, place or field; None for what is no structure.

    Structures are mappings, lists, tuples, deques and dataclasses, also derived ones.
    """
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: getattr(value, field.name)
            for field in fields(value)
            if hasattr(value, field.name)
        }
    return None


def changed(
    value: Any, change: Callable[[Any], Any], applies: Callable[[Any], bool] = torch.is_tensor
) -> Any:
    """Return the same structure with what `applies` to replaced by its change.

    Structures keep their type and further attributes; other objects stay as they are.
    """
    if applies(value):
        return change(value)
    items = items_of(value)
    if items is None:
        return value
    return with_items(value, {key: changed(item, change, applies) for key, item in items.items()})


def with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    """Return a copy of a structure with other items, by the keys of `items_of`."""
    if type(value) in (dict, list, tuple):  # faster, as most are
        return dict(items) if isinstance(value, dict) else type(value)(items.values())
    if isinstance(value, tuple):
        values = list(items.values())
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    copied = copy.copy(value)
    is_container = isinstance(copied, MutableMapping | list | deque)
    for key, item in items.items():
        if is_container:
            copied[key] = item
        else:
            object.__setattr__(copied, key, item)  # a dataclass may be frozen
    return copied


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a structure, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    for item in (items_of(value) or {}).values():
        yield from tensors_in(item)


def copied_to_cpu(value: Any) -> Any:
    """Return the same structure with tensors copied to memory of their own on the CPU."""
    return changed(value, _copied_to_cpu)


def _copied_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().to("cpu", copy=True)
    return copied.contiguous() if copied.layout is torch.strided else copied


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of the elements in order, one-dimensional, on the CPU; of a sparse tensor
    those of its dense form.
    """
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    values = values.contiguous() if values.layout is torch.strided else values.to_dense()
    data: NDArray[np.uint8] = values.reshape(-1).view(torch.uint8).numpy()
    return data


def tensors_sha256(named: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over name, dtype, shape and little-endian bytes, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(bytes_of(tensor).data)
    return digest.hexdigest()


def params_sha256(model: torch.nn.Module, with_buffers: bool = True) -> str:
    """Return the `tensors_sha256` of a model's parameters, and of its buffers."""
    buffers = dict(model.named_buffers()) if with_buffers else {}
    return tensors_sha256(dict(model.named_parameters()) | buffers)
