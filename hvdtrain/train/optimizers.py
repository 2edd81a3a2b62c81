"""Optimizers by name."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.errors import UsageError, closest

# Optimizers of torch.optim that cannot be used, with the reason.
UNSUITABLE = {
    "optimizer": "the base class",
    "lbfgs": "needs step(closure), whose gradients Horovod does not average",
    "sparseadam": "needs sparse gradients",
}
UNSUITABLE_ALONE = UNSUITABLE | {"muon": "takes matrices only"}  # over all parameters of a model
BY_NAME: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
}


def build_optimizer(
    name: str,
    model: nn.Module,
    lr: float,
    momentum: float,
    weight_decay: float,
    amp: str = "none",
    *,
    nesterov: bool = False,
    betas: Sequence[float] | None = None,
    eps: float | None = None,
    decays_all: bool = True,
) -> torch.optim.Optimizer:
    """Return the optimizer over all parameters of the model; frozen ones are included but unused.

    Momentum, weight decay and the fused step (one pass over memory instead of one per operation)
    are set where the optimizer supports them. `decays_all`: whether norms and biases have weight
    decay too. Raises UsageError for an unsuitable name, or one without what else is given.
    """
    optimizer_class = BY_NAME.get(name.lower())
    if optimizer_class is None or name.lower() in UNSUITABLE_ALONE:
        suitable = ", ".join(sorted(BY_NAME.keys() - UNSUITABLE_ALONE.keys()))
        near = closest(name.lower(), BY_NAME.keys() - UNSUITABLE_ALONE.keys())
        unknown = f"unknown (did you mean {near}?)" if near else "unknown"
        reason = UNSUITABLE_ALONE.get(name.lower(), unknown)
        raise UsageError(f"--opt={name}: {reason}; choose from {suitable}")
    accepted = inspect.signature(optimizer_class).parameters
    wanted: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    # With fp16, a fused step would detect infinite gradients only after it has made its state.
    wanted["fused"] = amp != "fp16"
    settings = {key: value for key, value in wanted.items() if key in accepted}
    chosen = {"nesterov": nesterov or None, "betas": betas and tuple(betas), "eps": eps}
    chosen |= {"weight_decay": None if decays_all else weight_decay}
    missing = [key for key, value in chosen.items() if value is not None and key not in accepted]
    if missing:
        flags = {"nesterov": "--nesterov", "betas": "--opt-betas", "eps": "--opt-eps"}
        flags["weight_decay"] = "--no-decay-norm-bias"
        names = " and ".join(flags[key] for key in missing)
        raise UsageError(f"{names}: --opt={name} has no {' and no '.join(missing)}")
    settings |= {key: value for key, value in chosen.items() if value is not None}
    groups = model.parameters() if decays_all else _groups_by_decay(model, weight_decay)
    try:
        return optimizer_class(groups, **settings)
    except (ValueError, IndexError) as error:
        raise UsageError(f"--opt={name}: {error}") from error


def _groups_by_decay(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return groups of parameters without and with weight decay, those without first.

    Vectors and scalars have none: biases, and the weights of norms (as in timm,
    timm/optim/_param_groups.py, `param_groups_weight_decay`).
    """
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
    ]
    return [group for group in groups if group["params"]]
