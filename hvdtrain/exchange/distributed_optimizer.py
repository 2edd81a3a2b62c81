"""A torch optimizer whose `step` first waits until its gradients are reduced over ranks.

Horovod's DistributedOptimizer is a new optimizer of the same class: state, defaults and hooks of
the one it is made from are dropped, and schedulers built before go on to steer that one. Here it
only carries the gradients of the parameters, and the user's own optimizer makes the steps: it stays
the object that it was, with all that belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.errors import TrainingError, UsageError

Optimizer = torch.optim.Optimizer


def reduce_before_step(
    optimizer: Optimizer, carrier: Any, reduce: Callable[[Optimizer], None]
) -> None:
    """Make `optimizer.step()` call `reduce` first, unless that was done since the backward pass.

    `carrier`: Horovod's DistributedOptimizer over the same parameters, which is never stepped. It
    stays at hand as `optimizer.carrier`; `optimizer.synchronize` and `skip_synchronize` are as
    with Horovod.
    """
    flight = Flight(carrier)

    def before_step(_: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if any(it is not None for it in (*args[1:], options.get("closure"))):
            raise UsageError(
                "optimizer.step(closure): what the closure computes would not be averaged over "
                "ranks. Call backward() before, and step() without a closure"
            )
        if carrier._should_synchronize and not is_reduced(carrier):
            reduce(optimizer)
        carrier._synchronized = False

    zero_grad = optimizer.zero_grad

    def guarded_zero_grad(set_to_none: bool = True) -> None:
        if carrier._handles:
            raise TrainingError(
                "optimizer.zero_grad() between backward() and optimizer.step(): the gradients are "
                "still being reduced. To drop them call reduce_gradients(optimizer) before"
            )
        carrier._synchronized = False
        zero_grad(set_to_none)

    hook = optimizer.register_step_pre_hook(before_step)
    # Before the user's own hooks, which may change gradients.
    optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
    own = {"carrier": carrier, "synchronize": flight.synchronize, "zero_grad": guarded_zero_grad}
    vars(optimizer).update(own, skip_synchronize=carrier.skip_synchronize)


def load_exactly(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a `state_dict` of the same optimizer elsewhere, each value in the type that it had.

    (`load_state_dict` gives it that of its parameter: ASGD, for one, would then compute otherwise.)
    """
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        own = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and own[name].dtype != value.dtype:
                own[name] = value.to(own[name].device)


def carrier_of(optimizer: Optimizer) -> Any:
    """Return what carries the gradients. Raises UsageError unless `optimizer` was distributed."""
    carrier = getattr(optimizer, "carrier", None)
    if carrier is None:
        raise UsageError(
            "this optimizer does not reduce gradients: call "
            "optimizer = hvdtrain.distribute(model, optimizer) before"
        )
    return carrier


def is_reduced(carrier: Any) -> bool:
    """Return whether every gradient has been reduced since the last backward pass and step.

    Where there is none at all, `model.zero_grad()` has dropped what was reduced.
    """
    return (
        carrier._synchronized
        and not carrier._handles
        and any(parameter.grad is not None for parameter in carrier._requires_update)
    )


class Flight:
    """The gradients that Horovod is reducing, which nobody else may change meanwhile."""

    def __init__(self, carrier: Any) -> None:
        self._carrier = carrier
        self._begun: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._submit = carrier._allreduce_grad_async
        carrier._allreduce_grad_async = self._submit_and_note

    def synchronize(self) -> None:
        """Collective: wait until every gradient is reduced.

        Raises TrainingError if code has changed one since its reduction began: replaced it, or
        written into it by an operation of torch. (Writes by way of `.data` leave no trace.)
        """
        changed = [
            self._carrier._parameter_names[parameter]
            for parameter, (gradient, version) in self._begun.items()
            if parameter.grad is not gradient or gradient._version != version
        ]
        self._begun.clear()
        if changed:
            raise TrainingError(
                f"code changed parameter {changed[0]}'s .grad between the backward pass and "
                f"optimizer.step(), while it was being reduced ({len(changed)} parameters in "
                "all). Clip by hvdtrain.clip_grad_norm_(optimizer, max_norm); before any other "
                "change call reduce_gradients(optimizer) of what hvdtrain.init() gave"
            )
        self._carrier.synchronize()
        self._begun.clear()  # those that were begun and ended just now

    def _submit_and_note(self, parameter: torch.Tensor) -> Any:
        handle = self._submit(parameter)
        assert parameter.grad is not None
        self._begun[parameter] = parameter.grad, parameter.grad._version
        return handle
