"""Any optimizer of torch.optim, by its name in lower case."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from hvdtrain.errors import UsageError

# Why these of torch.optim cannot be used here.
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
    name: str,
    model: torch.nn.Module,
    lr: float,
    momentum: float,
    weight_decay: float,
    amp: str = "none",
) -> torch.optim.Optimizer:
    """The optimizer over the model's parameters; frozen ones are in it, and left alone.

    Momentum and weight decay are given to those that have them, and the step that goes once over
    memory instead of once for each of its operations (`fused`). Raises UsageError.
    """
    optimizer_class = BY_NAME.get(name.lower())
    if optimizer_class is None or name.lower() in UNSUITABLE:
        suitable = ", ".join(sorted(BY_NAME.keys() - UNSUITABLE.keys()))
        reason = UNSUITABLE.get(name.lower(), "unknown")
        raise UsageError(f"--opt={name}: {reason}; choose from {suitable}")
    accepted = inspect.signature(optimizer_class).parameters
    wanted: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    # A fused step would be left to find infinite gradients itself (fp16), after it has made its
    # state.
    wanted["fused"] = amp != "fp16"
    settings = {key: value for key, value in wanted.items() if key in accepted}
    return optimizer_class(model.parameters(), **settings)
