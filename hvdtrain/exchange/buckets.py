"""Buckets: small gradients that are reduced as one message, in groups that never change.

A message has a cost of its own: a turn of Horovod's cycle on every rank, and round trips on a
network. Small gradients are therefore copied into one flat tensor, which is reduced once the last
of them is made; larger ones are reduced alone, and copied nowhere. Which gradients share a bucket
depends on the model and the size of buckets, never on timing as in Horovod's tensor fusion. So the
order of addition is that of one tensor (`hvdtrain.ring.orders`), known and repeatable.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch

from hvdtrain.errors import TrainingError
from hvdtrain.exchange.gradients import (
    ADDED_AS,
    added_dtype,
    as_real,
    parameters_of,
    parts_of,
    real_length,
    trainable_of,
)

LEAST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES_PER_RANK = 64 << 10

Message = Mapping[str, torch.nn.Parameter]  # by name, in the order of the model


def suitable_bucket_bytes(ring_size: int, least: int = LEAST_BUCKET_BYTES) -> int:
    """Return the size of buckets for a ring of so many ranks, or hosts; `least` for few.

    A ring of N sends 2 (N - 1) messages of B / N bytes, one after another. With 64 KiB each, the
    usual latency of TCP (50 us) takes as long as the bytes do at 10 Gbit/s, so a bucket goes at
    half of that speed or faster. It depends on N alone and is not measured: a run that is repeated
    has the same buckets, and the same bits.
    """
    return max(least, BUCKET_BYTES_PER_RANK * ring_size)


def messages_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, bucket_bytes: int
) -> list[Message]:
    """Return the trainable parameters of an optimizer in groups that are reduced together, by
    `grouped`. Only parameters of one type and device share a group.
    """
    # Backward passes begin with the last layer.
    named = [*reversed(trainable_of(model, optimizer).items())]
    sizes = [parameter.nbytes for _, parameter in named]
    kinds = [(parameter.dtype, parameter.device) for _, parameter in named]
    groups = grouped(sizes, bucket_bytes, kinds)
    return [dict(named[index] for index in reversed(group)) for group in groups]


def grouped(
    sizes: Sequence[int], bucket_bytes: int, kinds: Sequence[object] | None = None
) -> list[list[int]]:
    """Return the places of gradients in groups, in the order in which the groups are complete.

    `sizes`: in bytes, in the order in which backward passes make the gradients. One of
    `bucket_bytes` or more is alone; others share up to `bucket_bytes`, if their kinds are equal.
    """
    groups: list[list[int]] = []
    bucket: list[int] = []  # the newest group of several
    room = 0
    for index, size in enumerate(sizes):
        if size >= bucket_bytes:
            groups.append([index])
            continue
        if not bucket or size > room or (kinds and kinds[bucket[0]] != kinds[index]):
            bucket, room = [], bucket_bytes
            groups.append(bucket)
        bucket.append(index)
        room -= size
    return sorted(groups, key=lambda group: group[-1])


class Bucket:
    """Parameters whose gradients are reduced as one flat tensor: `flat.grad`.

    `flat` is a parameter of Horovod's DistributedOptimizer in their place, in the type in which
    they are added. It has no use as a value.
    """

    def __init__(self, message: Message, passes: int) -> None:
        """Keep the message; `passes`: backward passes of a step, accumulated first."""
        self.message = message
        self._parameters = list(message.values())
        lengths = map(real_length, self._parameters)
        *self._starts, length = itertools.accumulate(lengths, initial=0)
        first = self._parameters[0]
        values = torch.zeros(length, dtype=added_dtype(first.dtype), device=first.device)
        self.flat = torch.nn.Parameter(values)
        self.flat.grad = torch.zeros_like(self.flat)
        self._views: list[torch.Tensor] = []
        self._passes = passes
        self.begin()

    def begin(self) -> None:
        """Begin a step, without any gradient."""
        self._missing = [self._passes] * len(self._parameters)  # passes of each parameter
        self.missing = sum(self._missing)

    def made(self, index: int) -> bool:
        """Note that a pass has made the gradient of the parameter at `index` of the message; return
        whether it was the last pass of the step for this parameter.

        Raises TrainingError after more passes than the bucket was made for.
        """
        if self._missing[index] == 0:
            raise TrainingError(
                f"{self._passes + 1} gradients of a parameter of shape "
                f"{list(self._parameters[index].shape)} "
                f"were made before optimizer.step(), with grad_accum_steps={self._passes}: give "
                "hvdtrain.distribute() the number of backward passes of a step as grad_accum_steps"
            )
        self._missing[index] -= 1
        self.missing -= 1
        return self._missing[index] == 0

    def fill(self) -> None:
        """Copy the gradients into the message; missing ones become zeros."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch._foreach_copy_(self._parts(), self._gradients())

    def empty(self) -> None:
        """Copy the reduced message into the gradients; then begin the next step."""
        torch._foreach_copy_(self._gradients(), self._parts())
        self.begin()

    def _gradients(self) -> list[torch.Tensor]:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return [*map(as_real, gradients)] if self._parameters[0].is_complex() else gradients

    def _parts(self) -> list[torch.Tensor]:
        """Return views of the message in the shapes of its parameters.

        They are kept as long as it is in the same memory: views of many small parameters take
        longer to make than to copy.
        """
        message = self.flat.grad
        assert message is not None
        if not self._views or self._views[0].data_ptr() != message.data_ptr():
            self._views = parts_of(message, self._starts, self._parameters)
        return self._views


def make_buckets(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, bucket_bytes: int, passes: int
) -> list[Bucket]:
    """Return the buckets of all parameters that share one or that are added in another type.

    `passes`: backward passes of a step.
    """
    return [
        Bucket(message, passes)
        for message in messages_of(model, optimizer, bucket_bytes)
        if len(message) > 1 or next(iter(message.values())).dtype in ADDED_AS
    ]


def with_buckets(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]
) -> tuple[dict[str, torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return the buckets' tensors and the model's other parameters by name, and the optimizer's
    other parameters.
    """
    bucketed = {parameter for bucket in buckets for parameter in bucket.message.values()}
    named = {f"bucket.{next(iter(bucket.message))}": bucket.flat for bucket in buckets}
    others = {name: other for name, other in model.named_parameters() if other not in bucketed}
    return named | others, [other for other in parameters_of(optimizer) if other not in bucketed]
