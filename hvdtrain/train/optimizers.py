"""Optimizers by name, and learning rates as functions of the step, without state to save."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.config import SCHEDULES
from hvdtrain.errors import UsageError

Schedule = Callable[[int], float]
STEP_DECAY = 0.1
# Goyal et al. 2017 (arXiv:1706.02677) decay at epochs 30, 60 and 80 of 90.
STEP_MILESTONES = (30 / 90, 60 / 90, 80 / 90)

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
    name: str,
    model: torch.nn.Module,
    lr: float,
    momentum: float,
    weight_decay: float,
    amp: str = "none",
) -> torch.optim.Optimizer:
    """Return the optimizer over all parameters of the model; frozen ones are included but unused.

    Momentum, weight decay and the fused step (one pass over memory instead of one per operation)
    are set where the optimizer supports them. Raises UsageError for an unsuitable name.
    """
    optimizer_class = BY_NAME.get(name.lower())
    if optimizer_class is None or name.lower() in UNSUITABLE:
        suitable = ", ".join(sorted(BY_NAME.keys() - UNSUITABLE.keys()))
        close = difflib.get_close_matches(name.lower(), BY_NAME.keys() - UNSUITABLE.keys(), n=3)
        unknown = f"unknown (did you mean {' or '.join(close)}?)" if close else "unknown"
        reason = UNSUITABLE.get(name.lower(), unknown)
        raise UsageError(f"--opt={name}: {reason}; choose from {suitable}")
    accepted = inspect.signature(optimizer_class).parameters
    wanted: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    # With fp16, a fused step would detect infinite gradients only after it has made its state.
    wanted["fused"] = amp != "fp16"
    settings = {key: value for key, value in wanted.items() if key in accepted}
    return optimizer_class(model.parameters(), **settings)


def scaled_lr(lr: float, rule: str, global_batch_size: int, base_batch_size: int) -> float:
    """Return `lr` scaled for the global batch: `linear` (Goyal et al. 2017), `sqrt` or `none`."""
    ratio = global_batch_size / base_batch_size
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def make_schedule(shape: str, peak_lr: float, total_steps: int, warmup_steps: int) -> Schedule:
    """Return the learning rate as a function of steps 0 .. total_steps - 1.

    It is a linear warm-up, then `shape`: constant; cosine (from the end of warm-up to 0 at
    total_steps; Loshchilov and Hutter, arXiv:1608.03983); or step (times 0.1 at each milestone of
    the whole run). Raises ValueError for another.
    """
    if shape not in SCHEDULES:
        raise ValueError(f"{shape}: must be one of {', '.join(SCHEDULES)}")
    after_warmup = max(1, total_steps - warmup_steps)

    def schedule(step: int) -> float:
        if step < warmup_steps:
            return peak_lr * (step + 1) / warmup_steps
        if shape == "cosine":
            progress = (step - warmup_steps) / after_warmup
            return peak_lr * (0.5 * (1 + math.cos(math.pi * progress)))
        if shape == "step":
            passed = sum(step >= milestone * total_steps for milestone in STEP_MILESTONES)
            return peak_lr * STEP_DECAY**passed
        return peak_lr

    return schedule
