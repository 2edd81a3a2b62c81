"""Learning rates as pure functions of the step, so that checkpoints hold nothing of them.

A schedule is a linear warm-up to the peak rate, then a shape: the fraction of the peak at a step.
"""

import math
from collections.abc import Callable

Schedule = Callable[[int], float]  # learning rate at a step, counted from 0
Shape = Callable[[int, int, int], float]  # of step, warmup_steps, total_steps; step >= warmup_steps
STEP_DECAY = 0.1
# Parts of the run, warm-up included: Goyal et al. (arXiv:1706.02677), epochs 30, 60 and 80 of 90.
STEP_MILESTONES = (30 / 90, 60 / 90, 80 / 90)


def constant(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return 1: the rate stays at the peak."""
    return 1.0


def cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return a fraction that falls from 1 to 0 (Loshchilov and Hutter, arXiv:1608.03983)."""
    return 0.5 * (1 + math.cos(math.pi * ((step - warmup_steps) / (total_steps - warmup_steps))))


def decay_in_steps(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the product of STEP_DECAY for each milestone of the run that has been passed."""
    return STEP_DECAY ** sum(step >= milestone * total_steps for milestone in STEP_MILESTONES)


SCHEDULES: dict[str, Shape] = {"constant": constant, "cosine": cosine, "step": decay_in_steps}


def make_schedule(
    shape: str, peak_lr: float, total_steps: int, warmup_steps: int, min_lr: float = 0.0
) -> Schedule:
    """Return the learning rate as a function of steps 0 .. total_steps - 1.

    After the warm-up it falls from `peak_lr` to `min_lr`, as far as the shape falls to 0. Raises
    ValueError for a shape that is not in SCHEDULES.
    """
    if shape not in SCHEDULES:
        raise ValueError(f"{shape}: must be one of {', '.join(SCHEDULES)}")

    def schedule(step: int) -> float:
        if step < warmup_steps:
            return peak_lr * (step + 1) / warmup_steps
        return min_lr + (peak_lr - min_lr) * SCHEDULES[shape](step, warmup_steps, total_steps)

    return schedule


def scaled_lr(lr: float, rule: str, global_batch_size: int, base_batch_size: int) -> float:
    """Return `lr` scaled for the global batch: `linear` (Goyal et al. 2017), `sqrt` or `none`."""
    ratio = global_batch_size / base_batch_size
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
