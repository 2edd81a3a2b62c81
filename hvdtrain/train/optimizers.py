"""Optimizers by name."""

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
FLAGS = {
    "nesterov": "--nesterov",
    "betas": "--opt-betas",
    "eps": "--opt-eps",
    "weight_decay": "--no-decay-norm-bias",
}
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
    optimizer_class = _class_of(name)
    accepted = inspect.signature(optimizer_class).parameters
    wanted: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    # With fp16, a fused step would detect infinite gradients only after it has made its state.
    wanted["fused"] = amp != "fp16"
    settings = {key: value for key, value in wanted.items() if key in accepted}
    explicit = {
        "nesterov": nesterov or None,
        "betas": betas and tuple(betas),
        "eps": eps,
        "weight_decay": None if decays_all else weight_decay,
    }
    chosen = {key: value for key, value in explicit.items() if value is not None}
    if missing := [key for key in chosen if key not in accepted]:
        names = " and ".join(FLAGS[key] for key in missing)
        raise UsageError(f"{names}: --opt={name} has no {' and no '.join(missing)}")
    groups = model.parameters() if decays_all else _groups_by_decay(model, weight_decay)
    try:
        return optimizer_class(groups, **(settings | chosen))
    except (ValueError, IndexError) as error:
        raise UsageError(f"--opt={name}: {error}") from error


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer of this name. Raises UsageError for an unsuitable one."""
    suitable = BY_NAME.keys() - UNSUITABLE_ALONE.keys()
    if name.lower() in suitable:
        return BY_NAME[name.lower()]
    near = closest(name.lower(), suitable)
    unknown = f"unknown (did you mean {near}?)" if near else "unknown"
    reason = UNSUITABLE_ALONE.get(name.lower(), unknown)
    raise UsageError(f"--opt={name}: {reason}; choose from {', '.join(sorted(suitable))}")


def _groups_by_decay(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return groups of parameters without and with weight decay, those without first.

    Vectors and scalars have none: biases, and the weights of norms (as in timm,
    timm/optim/_param_groups.py, `param_groups_weight_decay`).
    """
    without = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    with_decay = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    groups = ((without, 0.0), (with_decay, weight_decay))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
