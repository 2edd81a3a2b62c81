"""A torch optimizer whose `step` first waits until its gradients are reduced over ranks.

Horovod's DistributedOptimizer is a new optimizer of the same class: it drops state, defaults and
hooks of the original, and existing schedulers keep controlling the original. Here it only reduces
gradients (the reducer), and the user's own optimizer makes the steps: it stays the same object,
with its state, hooks and schedulers.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.exchange.buckets import Bucket
from hvdtrain.exchange.gradients import ADDED_AS, has_finite_sum, laid_out_as, parameters_of

Optimizer = torch.optim.Optimizer
NEVER = 1 << 62  # passes before Horovod's hook begins to reduce a gradient


def reduce_before_step(
    optimizer: Optimizer,
    reducer: Any,
    buckets: Sequence[Bucket],
    reduce: Callable[[Optimizer], object],
    copies: int = 0,
) -> None:
    """Make `optimizer.step()` call `reduce` first, unless that was done since the backward pass.

    `reducer`: Horovod's DistributedOptimizer over the same parameters, but with the flat tensors of
    `buckets` in place of their parameters. Its `step` is never called. It is stored as
    `optimizer.reducer`; `optimizer.synchronize` and `skip_synchronize` are set as on Horovod's
    optimizers. `copies`: see `GradientsInFlight`.
    """
    reducer.flight = flight = GradientsInFlight(reducer, buckets, copies)
    hook = optimizer.register_step_pre_hook(partial(_before_step, reducer, reduce))
    # First, because the user's own hooks may change gradients.
    optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
    attributes = {
        "reducer": reducer,
        "synchronize": flight.synchronize,
        "skip_synchronize": reducer.skip_synchronize,
        "zero_grad": partial(_zero_grad, reducer, optimizer.zero_grad),
    }
    vars(optimizer).update(attributes)

    def undo() -> None:
        hook.remove()
        flight.close()
        for name in attributes:
            vars(optimizer).pop(name)

    reducer.undo = undo


def _before_step(
    reducer: Any,
    reduce: Callable[[Optimizer], object],
    optimizer: Optimizer,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Reduce the gradients before `optimizer.step(*args[1:], **options)`."""
    if any(argument is not None for argument in (*args[1:], options.get("closure"))):
        raise UsageError(
            "optimizer.step(closure): the gradients of the closure would not be averaged over "
            "ranks. Call backward() first, then step() without a closure"
        )
    if reducer._should_synchronize and not is_reduced(reducer):
        reduce(optimizer)
    reducer._synchronized = False


def _zero_grad(reducer: Any, zero_grad: Callable[[bool], None], set_to_none: bool = True) -> None:
    """Call the optimizer's own `zero_grad`, unless gradients are being reduced."""
    if reducer._handles and not reducer.flight.is_announced:  # such a loop checks all itself
        raise TrainingError(
            "optimizer.zero_grad() between backward() and optimizer.step(): the gradients are "
            "still being reduced. To drop them call workers.reduce_gradients(optimizer) first"
        )
    reducer._synchronized = False
    zero_grad(set_to_none)


def reducer_of(optimizer: Optimizer) -> Any:
    """Return the reducer of `optimizer`. Raises UsageError unless it was distributed."""
    reducer = getattr(optimizer, "reducer", None)
    if reducer is None:
        raise UsageError(
            "this optimizer does not reduce gradients: call "
            "optimizer = hvdtrain.distribute(model, optimizer) first"
        )
    return reducer


def is_reduced(reducer: Any) -> bool:
    """Return whether every gradient has been reduced since the last backward pass and step."""
    return (
        reducer._synchronized
        and not reducer._handles
        # If there is none, `model.zero_grad()` has dropped the reduced ones.
        and any(parameter.grad is not None for parameter in reducer.flight.parameters)
    )


def looks_finite(message: torch.Tensor, compressed_from: torch.dtype | None) -> bool:
    """Return whether the elements of a reduced gradient have a finite sum. On a device, or while it
    is compressed, it is not looked at: False.
    """
    if compressed_from or message.device.type != "cpu" or message.grad is None:
        return False
    return has_finite_sum(message.grad)


class GradientsInFlight:
    """The gradients that Horovod is reducing, which no other code may change meanwhile.

    `copies`: how often Horovod itself changes one by an operation of torch: once, at a time of its
    own, where it copies a sum from the host to the GPU.

    A loop that announces its passes (`begin_pass`) may have some that make a gradient in several
    parts, as checkpointed activations of a layer that is used twice do. The first step shows it:
    its gradients are sent once all passes are done, and with such ones those of later steps too.
    """

    def __init__(self, reducer: Any, buckets: Sequence[Bucket] = (), copies: int = 0) -> None:
        self._reducer, self._copies = reducer, copies
        self._buckets: dict[torch.Tensor, Bucket] = {bucket.flat: bucket for bucket in buckets}
        self._names: dict[torch.Tensor, str] = dict(reducer._parameter_names) | {
            parameter: name for bucket in buckets for name, parameter in bucket.message.items()
        }
        self.parameters = [
            parameter
            for message in reducer._requires_update
            for parameter in self._members(message)
        ]
        self.are_as_added = all(parameter.dtype not in ADDED_AS for parameter in self.parameters)
        self._begun: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._submit = reducer._allreduce_grad_async
        reducer._allreduce_grad_async = self._submit_and_note
        self._nodes = [
            self._follow(parameter, bucket, index)
            for bucket in buckets
            for index, parameter in enumerate(bucket.message.values())
        ]
        self.is_announced = self._waits = self._in_parts = False
        self._made: set[torch.Tensor] = set()  # by this pass
        self._probes: list[Any] = []  # hooks of the first step

    def begin_pass(self) -> None:
        """Prepare for a backward pass of a loop that calls this before each."""
        self._made.clear()
        if not self.is_announced:
            self.is_announced = self._waits = True
            self._probes = [
                parameter.register_post_accumulate_grad_hook(self._probe)
                for parameter in self.parameters
            ]
        if self._waits:
            self._reducer._allreduce_delay.update(dict.fromkeys(self.parameters, NEVER))

    def _probe(self, parameter: torch.Tensor) -> None:
        self._in_parts = self._in_parts or parameter in self._made
        self._made.add(parameter)

    def _end_step(self) -> None:
        """Decide after the first step whether gradients are sent while a pass makes others."""
        for probe in self._probes:
            probe.remove()
        self._probes.clear()
        self._waits = self._in_parts

    def synchronize(self) -> None:
        """Collective: wait until every gradient is reduced.

        Raises TrainingError if code has replaced a gradient since its reduction began, or since it
        waits in a bucket, or has changed it by a torch operation. (Writes through `.data` cannot be
        detected.)
        """
        changed = [
            name
            for parameter, name in self._names.items()  # the same order on every rank
            if (begun := self._begun.get(parameter))
            and (parameter.grad is not begun[0] or begun[0]._version > begun[1] + self._copies)
        ]
        self._begun.clear()
        if changed:
            raise TrainingError(
                f"code changed parameter {changed[0]}'s .grad between the backward pass and "
                f"optimizer.step(), before it was reduced (changed in all: {len(changed)}). "
                "Between the last backward() and step() call hvdtrain.clip_grad_norm_(optimizer, "
                "max_norm) in place of torch's; before any other change to gradients there call "
                "workers.reduce_gradients(optimizer), with workers = hvdtrain.init()"
            )
        self._reducer.synchronize()
        self._begun.clear()  # of the reductions that synchronize() itself has begun and ended
        for bucket in self._buckets.values():
            bucket.empty()
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient.data = laid_out_as(gradient.data, parameter)
        self._end_step()

    def close(self) -> None:
        """Let gradients be made from now on without being reduced."""
        self._end_step()
        self._waits = True
        delays = self._reducer._allreduce_delay
        delays.update(dict.fromkeys(delays, NEVER))
        self._reducer._handles.clear()
        self._nodes.clear()

    def _submit_and_note(self, message: torch.Tensor) -> Any:
        if message in self._buckets:
            self._buckets[message].fill()
        gradient = message.grad
        if gradient is not None and not gradient.is_contiguous():  # which Horovod refuses
            gradient.data = gradient.data.contiguous()
        handle = self._submit(message)
        for parameter in self._members(message):
            if parameter not in self._begun:  # as those are that have waited in a bucket
                self._note(parameter)
        return handle

    def _note(self, parameter: torch.Tensor) -> None:
        """Note the gradient of a parameter, which no other code may change from now on."""
        gradient = parameter.grad
        if gradient is not None:  # a hook may have dropped it
            self._begun[parameter] = gradient, gradient._version

    def _members(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters whose gradients a tensor of the reducer is reduced for."""
        bucket = self._buckets.get(message)
        return list(bucket.message.values()) if bucket else [message]

    def _follow(self, parameter: torch.nn.Parameter, bucket: Bucket, index: int) -> Any:
        """Submit the bucket once the last of its gradients is made; return the node of the hook.

        `index`: of the parameter in the bucket. Each gradient is noted when its own last pass has
        made it: until the bucket is submitted, perhaps only by `synchronize`, a change would be
        reduced, too. Horovod's hooks are on the same kind of nodes, so that all other hooks run
        before them.
        """

        def gradient_is_made(*_: Any) -> None:
            if self._waits:
                return
            if bucket.made(index):
                self._note(parameter)
            self._reducer._handles[bucket.flat] = (
                (None, None) if bucket.missing else self._submit_and_note(bucket.flat)
            )

        node = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_hook(gradient_is_made)
        return node


class Trainable:
    """The trainable parameters of a model and an optimizer when the optimizer is distributed."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer) -> None:
        self._named = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        self._before = self._now(optimizer)
        reduced = set(self._before[0]).intersection(self._before[1])
        # Where they are: a conversion can put new parameters there (such as one to "meta").
        self._places = {
            id(parameter): (module._parameters, key, parameter.dtype, parameter.device)
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in reduced
        }

    def has_changed(self, optimizer: Optimizer) -> bool:
        """Return whether other parameters of the optimizer are trainable now."""
        now, before = _trainable(parameters_of(optimizer)), self._before[1]
        return now != before and set(now) != set(before)

    def check(self, optimizer: Optimizer) -> None:
        """Raise TrainingError if others are trainable now: Horovod would silently omit new ones.

        Also if any has been converted: its gradients would silently be converted back. Parameters
        of other optimizers may be frozen, as those of a discriminator are in a generator's passes.
        """
        now = self._now(optimizer)
        if now != self._before:  # lists, as sets take longer to make
            model, owned = map(set, now)
            if owned != set(self._before[1]) or model.difference(self._before[0]):
                raise TrainingError(
                    "the trainable parameters have changed since the optimizer was distributed: "
                    f"{self._changes(model, owned)}. Only the gradients of that time are reduced: "
                    "freeze and unfreeze before distribute(), or in a loop before step.batches()"
                )
        converted = [
            f"{self._names[old_id]} from {dtype} on {device} to {new.dtype} on {new.device}"
            for old_id, (parameters, key, dtype, device) in self._places.items()
            if (new := parameters.get(key)) is not None
            and (new.dtype != dtype or new.device != device)
        ]
        if converted:
            raise TrainingError(
                "parameters have been converted since the optimizer was distributed: "
                f"{converted[0]} (converted in all: {len(converted)}). Gradients are reduced in "
                "the type and on the device of that time: call model.to(...), model.double() and "
                "the like before distribute()"
            )

    def _changes(self, model: set[int], owned: set[int]) -> str:
        """Return a description of what is added to, or removed from, the trainable parameters."""
        now, before, names = (model, owned), tuple(map(set, self._before)), self._names
        changes = [
            f"{len(group)} {verb} (such as {names.get(min(group), 'one not in the model')})"
            for group, verb in (
                ((now[0] - before[0]) | (now[1] - before[1]), "added or unfrozen"),
                ((before[0] - now[0]) | (before[1] - now[1]), "removed or frozen"),
            )
            if group
        ]
        return " and ".join(changes)

    def _now(self, optimizer: Optimizer) -> tuple[list[int], list[int]]:
        """Return the ids of the trainable parameters of the model and of the optimizer."""
        owned, named = parameters_of(optimizer), list(self._named.values())
        trainable = _trainable(owned)
        is_same = len(owned) == len(named) and all(map(operator.is_, owned, named))
        return (trainable if is_same else _trainable(named)), trainable


def _trainable(parameters: Iterable[torch.nn.Parameter]) -> list[int]:
    return [id(parameter) for parameter in parameters if parameter.requires_grad]
