"""The passes of this rank in a step: the loss that a script gives, and reports of faults.

Faults include lines of a script's former loop that are left beside `step.backward` and `update`.
Without the guards here such a line is refused on several workers alone, where gradients are being
reduced, or on none: the run then learns something else, with an exit code of 0.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch

from hvdtrain.data.feeding import Loaded
from hvdtrain.errors import TrainingError, UsageError, name_ranks
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.gradients import parameters_of
from hvdtrain.tasks.means import mean_in
from hvdtrain.train.batchnorm import counting
from hvdtrain.train.job import Job
from hvdtrain.train.metering import END, LEFT, StepSums
from hvdtrain.train.update import not_finite


class Pass(NamedTuple):
    """A forward and backward pass of this rank."""

    share: int
    number: int  # of the micro-batch
    drawn: int  # number of its random numbers, within the share
    is_last: bool  # of this rank in the step
    loaded: Loaded


def checked_count(count: float | torch.Tensor | None, step: int) -> float:
    """Return the count of a batch. Raises UsageError unless it is a number that can be one."""
    try:
        checked = float(count)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        checked = math.nan
    if not (checked >= 0 and math.isfinite(checked)):
        shown = "none" if count is None else repr(count)
        raise UsageError(
            f"step {step}: step.backward needs a count, and got {shown}: give count=, "
            "the number of samples (or tokens) that the loss is a sum or mean over"
        )
    return checked


def summed_loss(
    loss: torch.Tensor | None,
    total: torch.Tensor | None,
    mean: torch.Tensor | None,
    count: float,
    pass_: Pass,
    job: Job,
) -> torch.Tensor:
    """Return the sum of the losses of a batch, of which one is not None: `loss` or `total`, a sum,
    or `mean`. It has no effect if the sample of the batch only stands in.
    """
    if mean is None:
        batch_loss = loss if total is None else total
        assert batch_loss is not None
        return batch_loss if pass_.loaded.samples > 0 else batch_loss.nan_to_num() * 0.0
    if count > 0:
        return mean * count
    if job.feed.everyone:
        return mean.nan_to_num() * 0.0  # through the model, whose layers wait for every rank
    # A mean over nothing is not a number.
    trained = (p for p in job.model.parameters() if p.requires_grad)
    return sum((p.sum() * 0.0 for p in trained), mean.new_zeros(()))


def refuse_mean(loss: object, count: float, step: int) -> None:
    """Raise UsageError for a loss that is a mean over its batch, where a sum is to be given."""
    if isinstance(loss, torch.Tensor) and (operation := mean_in(loss, count)):
        raise UsageError(
            f"step {step}: step.backward(loss, count) takes the sum of the losses "
            f"of a batch, and this is a mean ({operation}): updates would be {count:g} times "
            "too small. Give step.backward(mean=loss, count=...), or make it a sum: "
            'reduction="sum". If it is one, give step.backward(sum=loss, count=...)'
        )


def ends_run(job: Job, exchange: Exchange, sums: StepSums, step: int) -> bool:
    """Collective: return whether any rank asks to end the run with this step of a script. Raises
    TrainingError on all ranks if only some have left its loop.
    """
    if job.task.computes_loss:
        return False
    if exchange.size == 1:
        return sums.is_marked(END)
    if 0 < int(sums.total()[LEFT]) < exchange.size:
        each = exchange.all_gather_object(bool(sums.local[LEFT]), "hvdtrain.left")
        ranks = [rank for rank, has_left in enumerate(each) if has_left]
        raise TrainingError(
            f"{name_ranks(ranks)} left the loop before step {step}, and others did not. "
            "End the run by loop.stop(), or decide by what is equal on all of them, such as "
            "loop.evaluation or loop.mean"
        )
    return bool(sums.total()[END])


def refuse_gradients(
    names: list[str],
    job: Job,
    exchange: Exchange,
    sums: StepSums,
    step: int,
    passes: Sequence[Pass],
    weight: float,
) -> NoReturn:
    """Collective: raise TrainingError on all ranks for the parameters `names`.

    Their reduced gradients are not finite. If a loss is not finite, that is reported as the cause.
    `passes`: those of this rank; `weight`: of each loss.
    """
    faulty = exchange.size == 1 or _has_faulty_gradients(names, job, passes, step, weight)
    sums.check_losses(exchange, step)
    faulty_ranks = exchange.all_gather_object(faulty, "hvdtrain.own_gradients")
    ranks = [rank for rank, at_fault in enumerate(faulty_ranks) if at_fault]
    where = "after summation, although finite on each rank"
    if ranks or not job.task.computes_loss:
        where = f"on {name_ranks(ranks)}" if ranks else "on at least one rank"
    parameters = sum(1 for _ in job.model.parameters())
    advice = "look for functions without a derivative where they are used (sqrt or a norm at 0)"
    if not ranks and job.reduction.compression != "none":
        advice = f"leave --compression={job.reduction.compression} out, which overflows early"
    raise TrainingError(
        f"the gradient of {names[0]} is not finite at step {step} {where}, while the loss is "
        f"({len(names)} of {parameters} parameters; the last is {names[-1]}). The step was not "
        f"applied, and nothing of it is saved. Lower --lr, or {advice}"
    )


def _has_faulty_gradients(
    names: Sequence[str], job: Job, passes: Sequence[Pass], step: int, weight: float
) -> bool:
    """Compute the gradients of these passes again, which the reduction has overwritten. Returns
    whether one of `names` is not finite. Collective if layers are synchronised.

    Nothing is computed for a script, whose losses are in its own loop.
    """
    faulty, parameters = False, [job.model.get_parameter(name) for name in names]
    for pass_ in passes if job.task.computes_loss else ():
        job.workers.repeat_pass(step, pass_.share, pass_.drawn)
        with job.update.autocast(), counting(job.model, pass_.loaded.samples):
            loss = job.task.loss(job.model, pass_.loaded.on(job.device)).loss
        gradients = torch.autograd.grad(loss * weight, parameters, allow_unused=True)
        present = {str(i): grad for i, grad in enumerate(gradients) if grad is not None}
        faulty = faulty or bool(pass_.loaded.samples and not_finite(present))
    return faulty


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


def others_frozen(job: Job, indices: Sequence[int]) -> AbstractContextManager[None]:
    """Let only the parameters of these optimizers have gradients, if there are others."""
    if len(indices) == len(job.optimizers):
        return nullcontext()  # quick
    trained_ids = set(map(id, parameters_of(*(job.optimizers[index] for index in indices))))
    trainable = (p for p in job.model.parameters() if p.requires_grad)
    return _frozen([p for p in trainable if id(p) not in trained_ids])


@contextmanager
def _frozen(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
