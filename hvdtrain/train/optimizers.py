"""Optimizers by name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from hvdtrain.errors import UsageError, closest

# Optimizers of torch.optim that cannot be used, with the reason.
UNSUITABLE = {
    "optimizer": "the base class",
    "lbfgs": "needs step(closure), whose gradients Horovod does not average",
    "sparseadam": "needs sparse gradients",
    "muon": "takes matrices only",
}
BY_NAME: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
}


def build_optimizer(
    name: str, model: nn.Module, lr: float, momentum: float, weight_decay: float, amp: str = "none"
) -> torch.optim.Optimizer:
    """Return the optimizer over all parameters of the model; frozen ones are included but unused.

    Momentum, weight decay and the fused step (one pass over memory instead of one per operation)
    are set where the optimizer supports them. Raises UsageError for an unsuitable name.
    """
    optimizer_class = BY_NAME.get(name.lower())
    if optimizer_class is None or name.lower() in UNSUITABLE:
        suitable = ", ".join(sorted(BY_NAME.keys() - UNSUITABLE.keys()))
        near = closest(name.lower(), BY_NAME.keys() - UNSUITABLE.keys())
        unknown = f"unknown (did you mean {near}?)" if near else "unknown"
        reason = UNSUITABLE.get(name.lower(), unknown)
        raise UsageError(f"--opt={name}: {reason}; choose from {suitable}")
    accepted = inspect.signature(optimizer_class).parameters
    wanted: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    # With fp16, a fused step would detect infinite gradients only after it has made its state.
    wanted["fused"] = amp != "fp16"
    settings = {key: value for key, value in wanted.items() if key in accepted}
    return optimizer_class(model.parameters(), **settings)
