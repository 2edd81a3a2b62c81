"""Detection of a mean loss where a sum is expected.

Losses of torch are means by default. Weighted as sums, they would train at a rate that is smaller
by the size of the batch, with the same wrong result on every number of workers. The autograd graph
of a loss shows what it is, down to the first operation over several values.
"""

from __future__ import annotations

import math
from typing import Any

import torch

MEAN, SUM = 1, 2  # torch.nn.functional's codes of `reduction`
# Operations on one value that leave it as it is, but for its sign, type and shape.
UNCHANGING = (
    *("Neg", "ToCopy", "Squeeze", "Unsqueeze", "View", "Reshape", "Clone", "Alias", "Expand"),
)
DEEPEST = 64  # operations


def mean_in(loss: torch.Tensor, count: float) -> str | None:
    """Return the operation that makes `loss` a mean over `count`, or None if it may be a sum.

    What is multiplied by the count again is a sum; what is divided by it is a mean. Of several
    losses that are added, all must be means: a penalty beside a sum may be one.
    """
    if count <= 1 or loss.grad_fn is None:  # of one, the mean is the sum
        return None
    return _mean_at(loss.grad_fn, count, 0, 0)


def _mean_at(node: Any, count: float, power: int, depth: int) -> str | None:
    """Return the operation that makes the value of a node a mean, times `count` to `power`."""
    name = "" if node is None else node.name().partition("Backward")[0]
    if not name or depth > DEEPEST:
        return None
    inputs = [it for it, _ in node.next_functions if it is not None]
    size = getattr(node, "_saved_self_sym_sizes", None)
    of_one = name in ("Mean", "Sum") and size is not None and math.prod(size) == 1
    if of_one or name.startswith(UNCHANGING):
        return _mean_at(inputs[0], count, power, depth + 1) if len(inputs) == 1 else None
    if name == "Sum" and len(inputs) == 1 and inputs[0].name().startswith("Stack"):
        name, inputs = "Add", [it for it, _ in inputs[0].next_functions if it is not None]
    if name in ("Add", "Sub"):
        found = [_mean_at(it, count, power, depth + 1) for it in inputs]
        return found[0] if found and all(found) else None
    if name in ("Mul", "Div"):
        if len(inputs) != 1:
            return None
        power += _power(_number(node), count, name == "Div")
        return _mean_at(inputs[0], count, power, depth + 1)
    reduction = getattr(node, "_saved_reduction", None)
    if name == "Mean" or reduction == MEAN:
        return name if power == 0 else None
    is_sum = name == "Sum" or reduction == SUM
    return "division by the count" if is_sum and power < 0 else None


def _number(node: Any) -> float:
    """Return the number that a node multiplies by, or divides by; NaN if there is none."""
    for name in ("_saved_other", "_saved_self"):
        value = getattr(node, name, None)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        if isinstance(value, int | float):
            return float(value)
    return math.nan


def _power(number: float, count: float, divides: bool) -> int:
    """Return 1 for a product with a multiple of the count, such as the number of elements, -1 for a
    division by the count, else 0: for a weight, which may be the inverse of any number.
    """
    if not math.isfinite(number):
        return 0
    times = abs(number) / count
    if round(times) < 1 or not math.isclose(times, round(times), rel_tol=1e-5):
        return 0
    if not divides:
        return 1
    return -1 if round(times) == 1 else 0
