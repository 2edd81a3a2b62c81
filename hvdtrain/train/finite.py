"""Search for infinities and NaN in gradients and in the state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

RUNNING = ("running_mean", "running_var")  # normalisation statistics; other buffers may be infinite


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors with an element that is infinite or NaN.

    If there are none, memory is read once: a sum with such an element is never finite.
    """
    sums = [_values(tensor).sum() for tensor in tensors.values()]
    if not sums or bool(torch.stack([total.double() for total in sums]).isfinite().all()):
        return []
    # A sum of finite values may have overflowed, so check each element.
    return [name for name, tensor in tensors.items() if not _values(tensor).isfinite().all()]


def find_not_finite(state: Mapping[str, Any]) -> str | None:
    """Return a description of the first tensor of a captured state that must be finite but is not.

    Returns None if there is none. Trainable parameters, optimizer state, the moving average and
    running statistics must be finite; frozen parameters and other buffers may hold infinities (for
    example, a mask).
    """
    names = _parameter_names(state)
    of_model = (
        set(state["model"]) - set(state["ranks"][0]["buffers"]) - set(state.get("frozen", ()))
    )
    tensors = {f"the parameter {name}": state["model"][name] for name in sorted(of_model)}
    for number, held in state["optimizer"]["state"].items():
        of = names[number] if number < len(names) else f"parameter number {number}"
        tensors |= {f"the optimizer's {key} of {of}": value for key, value in held.items()}
    average = state["update"]["average"] or {}
    tensors |= {
        f"the moving average of {name}": average[f"module.{name}"] for name in of_model if average
    }
    for rank, own in enumerate(state["ranks"]):
        for name, value in own["buffers"].items():
            if name.endswith(RUNNING):
                tensors[f"{name} of rank {rank}"] = value
    found = not_finite({name: value for name, value in tensors.items() if _is_floating(value)})
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    return f"{found[0]} is not finite{more}" if found else None


def _parameter_names(state: Mapping[str, Any]) -> list[str]:
    """Return the parameter names in the optimizer's order; [] if an old checkpoint lacks them."""
    if "parameters" in state:
        return list(state["parameters"])
    buffers = state["ranks"][0]["buffers"]
    names = [name for name in state["model"] if name not in buffers]
    groups = state["optimizer"]["param_groups"]
    return names if len(names) == sum(len(group["params"]) for group in groups) else []


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _values(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor._values() if tensor.is_sparse else tensor.detach()
    return torch.view_as_real(values) if values.is_complex() else values
