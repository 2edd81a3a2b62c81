"""Guards against lines of a script's former loop that are left beside `step.backward` and `update`.

Without them such a line is refused on several workers alone, where gradients are being reduced, or
on none: the run then learns something else, with an exit code of 0.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.gradients import parameters_of
from hvdtrain.train.job import Job


class GradientGuard:
    """The gradients of a step of a script, which only `step.backward` and `step.update` change."""

    def __init__(self, job: Job, exchange: Exchange, step: int) -> None:
        self._job, self._step = job, step
        # Without NCCL, Horovod copies each sum to the GPU by an operation of torch.
        staged = exchange.size > 1 and job.device.type != "cpu"
        self._copies = int(staged and not getattr(exchange, "has_nccl", True))
        self._parameters: list[torch.nn.Parameter] = []
        self._gradients: list[torch.Tensor | None] = []
        self._versions: list[int] = []

    def note(self, optimizers: Sequence[int]) -> None:
        """Note the gradients that a backward pass has made for optimizers, by their indices."""
        if self._job.task.computes_loss:  # no code of a script runs between the passes
            return
        self._parameters = parameters_of(*(self._job.optimizers[index] for index in optimizers))
        self._gradients = [p.grad for p in self._parameters]
        self._versions = _versions(self._gradients)

    def check(self) -> None:
        """Raise UsageError if code has changed a gradient since it was noted, or dropped it. The
        gradients are forgotten: those of virtual workers are kept elsewhere between passes.
        """
        noted = self._parameters, self._gradients, self._versions
        self._parameters, self._gradients, self._versions = [], [], []
        now, last = [p.grad for p in noted[0]], _versions(noted[1])
        if last == noted[2] and all(map(operator.is_, now, noted[1])):  # quick, of many tensors
            return
        for parameter, gradient, before, after in zip(*noted, last, strict=True):
            if parameter.grad is not gradient or after > before + self._copies:
                names = {id(p): name for name, p in self._job.model.named_parameters()}
                raise UsageError(
                    f"step {self._step}: code has changed the gradient of "
                    f"{names.get(id(parameter), 'a parameter')} after step.backward(). Lines of "
                    "the loop as it was before, such as zero_grad() or clip_grad_norm_(), must go: "
                    "step.update() clips by the option clip_grad, makes the step of the optimizer, "
                    "and the next step begins without gradients"
                )


def _versions(gradients: list[torch.Tensor | None]) -> list[int]:
    return [0 if gradient is None else gradient._version for gradient in gradients]


@contextmanager
def steps_are_ours(job: Job) -> Iterator[None]:
    """Refuse `optimizer.step()` by the code of a script: `step.update()` makes the step."""

    def refuse(*_: Any) -> None:
        if not job.update.is_applied:
            raise UsageError(
                "hvdtrain.Loop: the script calls optimizer.step(), but step.update() has made, or "
                "will make, the step of this optimizer: remove that line"
            )

    with ExitStack() as stack:
        for optimizer in () if job.task.computes_loss else job.optimizers:
            hook = optimizer.register_step_pre_hook(refuse)
            # Before that of Horovod, which would reduce the gradients first.
            optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
            stack.callback(hook.remove)
        yield


@contextmanager
def others_frozen(job: Job, indices: Sequence[int]) -> Iterator[None]:
    """Let only the parameters of these optimizers have gradients, if there are others."""
    frozen: list[torch.nn.Parameter] = []
    if len(indices) < len(job.optimizers):
        trained_ids = set(map(id, parameters_of(*(job.optimizers[index] for index in indices))))
        frozen = [p for p in job.model.parameters() if p.requires_grad and id(p) not in trained_ids]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
