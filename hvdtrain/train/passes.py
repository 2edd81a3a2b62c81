"""The passes of this rank in a step: the loss that a script gives, and reports of faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch

from hvdtrain.data.feeding import Loaded
from hvdtrain.errors import TrainingError, UsageError, name_ranks
from hvdtrain.exchange import Exchange
from hvdtrain.tasks.means import mean_in
from hvdtrain.train.batchnorm import counting
from hvdtrain.train.job import Job
from hvdtrain.train.metering import LEFT, StepSums
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


def refuse_leavers(job: Job, exchange: Exchange, sums: StepSums, step: int) -> None:
    """Collective: raise TrainingError on all ranks if only some have left a script's loop."""
    if job.task.computes_loss or exchange.size == 1:
        return
    left, is_leaving = int(sums.total()[LEFT]), sums.has_left
    if 0 < left < exchange.size:
        each = exchange.all_gather_object(is_leaving, "hvdtrain.left")
        ranks = [rank for rank, has_left in enumerate(each) if has_left]
        raise TrainingError(
            f"{name_ranks(ranks)} left the loop before step {step}, and others did not. "
            "Decide by what is equal on all of them, such as loop.evaluation or loop.mean"
        )


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
