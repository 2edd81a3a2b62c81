"""Learning rates as pure functions of the step, so checkpoints need no schedule state."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]

STEP_DECAY = 0.1
# Goyal et al. 2017 (arXiv:1706.02677) decay at epochs 30, 60 and 80 of 90.
STEP_MILESTONES = (30 / 90, 60 / 90, 80 / 90)


def scaled_lr(lr: float, rule: str, global_batch_size: int, base_batch_size: int) -> float:
    """Return `lr` scaled for the global batch by `rule`.

    `rule`: `linear` (Goyal et al. 2017), `sqrt` or `none`.
    """
    ratio = global_batch_size / base_batch_size
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def make_schedule(shape: str, peak_lr: float, total_steps: int, warmup_steps: int) -> Schedule:
    """Return the learning rate as a function of steps 0 .. total_steps - 1.

    It is a linear warm-up, then `shape`: constant; cosine (from the end of warm-up to 0 at
    total_steps; Loshchilov and Hutter, arXiv:1608.03983); or step (times 0.1 at each milestone of
    the whole run).
    """
    after = {"constant": _constant, "cosine": _cosine, "step": _step}[shape]

    def schedule(step: int) -> float:
        if step < warmup_steps:
            return peak_lr * (step + 1) / warmup_steps
        return peak_lr * after(step, total_steps, warmup_steps)

    return schedule


def _constant(step: int, total_steps: int, warmup_steps: int) -> float:
    return 1.0


def _cosine(step: int, total_steps: int, warmup_steps: int) -> float:
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def _step(step: int, total_steps: int, warmup_steps: int) -> float:
    passed = sum(step >= milestone * total_steps for milestone in STEP_MILESTONES)
    return STEP_DECAY**passed
