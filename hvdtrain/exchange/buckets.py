"""Buckets: small gradients that are reduced as one message, in groups that never change.

A message has a cost of its own: a turn of Horovod's cycle on every rank, and round trips on a
network. Small gradients are therefore copied into one flat tensor, which is reduced once the last
of them is made; larger ones are reduced alone, and copied nowhere. Which gradients share a bucket
depends on the model and the size of buckets, never on timing as in Horovod's tensor fusion. So the
order of addition is that of one tensor (`hvdtrain.ring.orders`), known and repeatable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hvdtrain.errors import TrainingError
from hvdtrain.exchange.distributed_optimizer import parameters_of
from hvdtrain.exchange.dtypes import added_dtype, as_real, real_length

LEAST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES_PER_RANK = 64 << 10

Message = Mapping[str, torch.nn.Parameter]  # by name, in the order of the model


def suitable_bucket_bytes(ring_size: int) -> int:
    """Return the size of buckets for a ring of so many ranks, or hosts.

    A ring of N sends 2 (N - 1) messages of B / N bytes, one after another. With 64 KiB each, the
    usual latency of TCP (50 us) takes as long as the bytes do at 10 Gbit/s, so a bucket goes at
    half of that speed or faster. It depends on N alone and is not measured: a run that is repeated
    has the same buckets, and the same bits.
    """
    return max(LEAST_BUCKET_BYTES, BUCKET_BYTES_PER_RANK * ring_size)


def messages_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, bucket_bytes: int
) -> list[Message]:
    """Return the trainable parameters of an optimizer in groups that are reduced together, by
    `grouped`. Only parameters of one type and device share a group.
    """
    owned = set(map(id, parameters_of(optimizer)))
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) in owned
    ]
    named.reverse()  # backward passes begin with the last layer
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
        first, self._lengths = self._parameters[0], list(map(real_length, self._parameters))
        length, dtype = sum(self._lengths), added_dtype(first.dtype)
        self.flat = torch.nn.Parameter(torch.zeros(length, dtype=dtype, device=first.device))
        self.flat.grad = torch.zeros_like(self.flat)
        self._views: list[torch.Tensor] = []
        self._passes = passes
        self._missing: list[int] = []  # passes of each parameter
        self._missing_in_all = 0
        self.begin()

    def begin(self) -> None:
        """Begin a step, without any gradient."""
        self._missing = [self._passes] * len(self._parameters)
        self._missing_in_all = sum(self._missing)

    @property
    def is_complete(self) -> bool:
        """Return whether all gradients of the step are made."""
        return self._missing_in_all == 0

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
        self._missing_in_all -= 1
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
            shapes = [as_real(parameter.detach()).shape for parameter in self._parameters]
            parts = zip(message.split(self._lengths), shapes, strict=True)
            self._views = [part.view(shape) for part, shape in parts]
        return self._views
