"""Detection of a mean loss where a sum is expected.

Losses of torch are means by default. Weighted as sums, they would train at a rate that is smaller
by the size of the batch, with the same wrong result on every number of workers. The autograd graph
of a loss shows what it is, down to the first operation over several values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.tensors import tensors_in

MEAN, SUM = 1, 2  # torch.nn.functional's codes of `reduction`
# Operations on one value that leave it as it is, but for its sign, type and shape.
UNCHANGING = (
    *("Neg", "ToCopy", "Squeeze", "Unsqueeze", "View", "Reshape", "Clone", "Alias", "Expand"),
)
DEEPEST = 64  # operations


@dataclass
class Operation:
    """An operation that has made a value."""

    name: str  # of torch's, such as Mean or NllLoss
    inputs: Callable[[], Sequence[Operation | None]]  # None: of one that is not known
    reduction: int | None = None
    number: float = math.nan  # by which it multiplies or divides
    is_of_one: bool = False  # its input is one value already


def mean_in(loss: torch.Tensor, count: float) -> str | None:
    """Return the operation that makes `loss` a mean over `count`, or None if it may be a sum.

    What is multiplied by the count again is a sum; what is divided by it is a mean. Of several
    losses that are added, all must be means: a penalty beside a sum may be one.
    """
    return None if loss.grad_fn is None else _mean_at(_of_graph(loss.grad_fn), count)


class Recorder(TorchDispatchMode):
    """A context that records how values are made, also where no gradients are: in evaluations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, Operation] = {}
        self._held: list[torch.Tensor] = []  # so that no other tensor gets the same identity

    def mean_in(self, loss: torch.Tensor, count: float) -> str | None:
        """Return what the function of this name does, for a value that was made in the context."""
        return _mean_at(self._made.get(id(loss)), count)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        made = result[0] if isinstance(result, tuple) and result else result
        if isinstance(made, torch.Tensor) and made.is_floating_point():
            name = func._schema.name.rpartition(":")[2]
            if made.numel() == 1 or name == "stack":
                self._note(name, func, args, kwargs or {}, made)
        return result

    def _note(
        self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], made: torch.Tensor
    ) -> None:
        arguments = func._schema.arguments
        defaults = {arg.name: arg.default_value for arg in arguments if arg.has_default_value()}
        positional = dict(zip((arg.name for arg in arguments), args, strict=False))
        reduction = {**defaults, **positional, **kwargs}.get("reduction")
        tensors = [*tensors_in(args)]
        recorded = [self._made[id(tensor)] for tensor in tensors if id(tensor) in self._made]
        if not recorded and name not in ("mean", "sum") and reduction not in (MEAN, SUM):
            return  # a number that no loss is part of
        number = math.nan
        if name in ("mul", "div") and len(recorded) == 1:
            others = [arg for arg in args if self._made.get(id(arg)) is None]
            single = not isinstance(others[0], torch.Tensor) or others[0].numel() == 1
            number = float(others[0]) if len(others) == 1 and single else math.nan
        self._held.append(made)
        self._made[id(made)] = Operation(
            name="".join(part.capitalize() for part in name.split("_")),
            inputs=lambda: recorded or [None] * len(tensors),
            reduction=reduction,
            number=number,
            is_of_one=bool(tensors) and tensors[0].numel() == 1,
        )


def _of_graph(node: Any) -> Operation:
    """Return the operation of a node of the autograd graph."""
    size = getattr(node, "_saved_self_sym_sizes", None)
    return Operation(
        name=node.name().partition("Backward")[0],
        inputs=lambda: [
            _of_graph(grad_fn) for grad_fn, _ in node.next_functions if grad_fn is not None
        ],
        reduction=getattr(node, "_saved_reduction", None),
        number=_number(node),
        is_of_one=size is not None and math.prod(size) == 1,
    )


def _mean_at(
    operation: Operation | None, count: float, power: int = 0, depth: int = 0
) -> str | None:
    """Return the operation that makes a value a mean, times `count` to `power`."""
    if operation is None or not operation.name or depth > DEEPEST or not count > 1:
        return None
    name, reduction = operation.name, operation.reduction
    of_one = name in ("Mean", "Sum") and operation.is_of_one
    if of_one or name in ("Mul", "Div") or name.startswith(UNCHANGING):
        inputs = operation.inputs()
        if name in ("Mul", "Div"):
            power += _power(operation.number, count, name == "Div")
        return _mean_at(inputs[0], count, power, depth + 1) if len(inputs) == 1 else None
    added: Sequence[Operation | None] = operation.inputs() if name in ("Add", "Sub", "Sum") else ()
    if name == "Sum" and len(added) == 1 and added[0] and added[0].name.startswith("Stack"):
        name, added = "Add", added[0].inputs()
    if name in ("Add", "Sub"):
        means = [_mean_at(term, count, power, depth + 1) for term in added]
        return means[0] if means and all(means) else None
    if name == "Mean" or reduction == MEAN:
        return name if power == 0 else None
    is_sum = name == "Sum" or reduction == SUM
    return "division by the count" if is_sum and power < 0 else None


def _number(node: Any) -> float:
    """Return the number that a node multiplies by, or divides by; NaN if there is none."""
    for name in ("_saved_other", "_saved_self"):
        value = getattr(node, name, None)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value.detach())
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
    return -int(round(times) == 1) if divides else 1
