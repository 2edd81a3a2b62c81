"""The training loop, independent of how ranks exchange data.

A step's update uses the gradient of the mean loss over the *global* batch. Rank r computes the sum
of its own samples' losses and divides it by B, the number of samples in this global batch, so that
the sum over ranks is sum_r (1/B) sum_i loss_i = (1/B) sum_i loss_i, even if ranks hold different
numbers of samples, or none. (Gradients sent in float16 are N times as large, and averaged over the
N ranks: otherwise they would underflow float16 as N grows.) With accumulation the global batch is
first cut into micro-batches, and each of them is divided among the ranks, so micro-batches are the
same for every N. If the loss counts something else (tokens), or samples were skipped, the reduced
gradient is multiplied by B / (count over all ranks) before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from hvdtrain.data.feeding import Loaded, StepData, may_skip, to_device
from hvdtrain.errors import TrainingError, name_ranks
from hvdtrain.exchange import Exchange, check_equal_on_all_ranks
from hvdtrain.tasks import check_sums
from hvdtrain.train.evaluate import Evaluation, Interrupted, evaluate
from hvdtrain.train.job import Job
from hvdtrain.train.metering import COUNT, Meter, PhaseClock, StepSums, Totals
from hvdtrain.train.update import not_finite

_NOTHING_READ = "{data}: none of the samples to {part} could be read. See what was skipped"


class StepHook(Protocol):
    """A profiler of chosen steps."""

    def begin(self, step: int) -> None:
        """Prepare for a step (counted from 1), before its backward pass."""

    def end(self, step: int) -> None:
        """Collective: end the step."""


class Audit(Protocol):
    """An audit or a trace of chosen steps (`hvdtrain.audit`)."""

    def begin(self, step: int, data: StepData) -> None:
        """Prepare for a step (counted from 1), before its backward pass."""

    def begin_pass(self, share: int, batch: Any) -> None:
        """Prepare for a backward pass over a batch of `share`; passes of a share are adjacent."""

    def end(self, step: int) -> None:
        """Collective: examine the gradients once they are reduced."""

    def updated(self, step: int, sums: StepSums) -> None:
        """Collective: examine the step once the parameters are updated."""

    def close(self) -> None:
        """Collective: end, after the last step."""


class Observer(Protocol):
    """A receiver of the results of intervals and epochs, which records or prints them."""

    def interval_end(self, totals: Totals, lr: float) -> None: ...

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None: ...


class Keeper(Protocol):
    """The part of a run that saves its state and receives stop requests."""

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to stop; called at each step and in evaluations."""

    def save(self, job: Job, state: State, evaluation: Evaluation | None) -> None:
        """Collective: save the state between two steps."""

    def stop(self) -> NoReturn:
        """Collective: end the run, whose state is saved, by raising Stopped."""


@dataclass(frozen=True)
class Hooks:
    """The objects that the loop calls at each step, interval and epoch."""

    audit: Audit
    observer: Observer
    keeper: Keeper
    profiler: StepHook  # called before and after the whole step


class Pass(NamedTuple):
    """A forward and backward pass of this rank."""

    share: int
    number: int  # within the share
    is_last: bool  # of this rank in the step
    loaded: Loaded


@dataclass
class State:
    """The progress and sums of a run; steps and samples seen determine the data that follow."""

    meter: Meter
    step: int = 0
    samples_seen: int = 0


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run."""

    totals: Totals
    evaluation: Evaluation
    steady_samples_per_s: float


def train(job: Job, state: State, exchange: Exchange, hooks: Hooks) -> Outcome:
    """Collective: run the job from `state`, which is updated, to its end.

    Raises TrainingError on all ranks if a loss, a gradient or the state to save is not finite, or
    if parameters differ between ranks; any exception of the audit; and Stopped, once all ranks have
    agreed to stop and the state is saved.
    """
    meter, keeper = state.meter, hooks.keeper
    job.model.train()
    evaluation = None
    try:
        if _epoch_ends(job, state) and meter.has_open_epoch:  # stopped during its evaluation
            evaluation = _end_epoch(job, meter, exchange, hooks)
            keeper.save(job, state, evaluation)
        for data in steps_from(job, state, exchange.rank):
            step = state.step + 1
            hooks.profiler.begin(step)
            meter.begin_step(step)
            stop = keeper.stop_requested()
            sums = train_step(job, exchange, hooks.audit, step, data, meter.clock, stop)
            meter.end_step(sums, step, data.samples)
            hooks.profiler.end(step)
            state.step, state.samples_seen = step, state.samples_seen + data.samples
            if step % job.intervals.log == 0:
                hooks.observer.interval_end(meter.read_interval(), _lr_in_use(job))
            if job.intervals.hash and step % job.intervals.hash == 0:
                check_equal_on_all_ranks(job.model, exchange, f"after step {step}")
            evaluation = None
            if _epoch_ends(job, state):
                evaluation = _end_epoch(job, meter, exchange, hooks)
            due = job.intervals.checkpoint and step % job.intervals.checkpoint == 0
            if due or evaluation or meter.stop_agreed:
                keeper.save(job, state, evaluation)
            if meter.stop_agreed and not (evaluation and step == job.total_steps):
                keeper.stop()
        if evaluation is None:  # resumed from the checkpoint of the last step
            evaluation = _evaluate(job, meter, exchange, keeper)
            keeper.save(job, state, evaluation)
    except Interrupted:  # the epoch stays open and is evaluated when the run is resumed
        keeper.save(job, state, None)
        keeper.stop()
    return Outcome(meter.last_epoch or meter.totals(), evaluation, meter.steady_samples_per_s)


def _epoch_ends(job: Job, state: State) -> bool:
    return state.samples_seen % job.sampler.samples == 0 or state.step == job.total_steps


def _end_epoch(job: Job, meter: Meter, exchange: Exchange, hooks: Hooks) -> Evaluation | None:
    """Collective: report the epoch; evaluate if due, else return None. Raises Interrupted."""
    meter.collect()
    if math.isnan(meter.totals().loss):  # no samples: a loss that is not finite has raised already
        raise TrainingError(_NOTHING_READ.format(part="train on", data=job.data.name))
    epoch, at_end = meter.totals().epoch, meter.totals().step == job.total_steps
    due = epoch % job.intervals.evaluation == 0 or at_end
    evaluation = _evaluate(job, meter, exchange, hooks.keeper) if due else None
    hooks.observer.epoch_end(meter.close_epoch(), evaluation, _lr_in_use(job))
    return evaluation


def _evaluate(job: Job, meter: Meter, exchange: Exchange, keeper: Keeper) -> Evaluation:
    """Collective: evaluate the model that would be saved. Raises Interrupted on a stop request."""
    pulse = meter.clock.pulse
    pulse.beat("evaluate")
    with job.evaluated_model() as model:
        evaluation = evaluate(
            model,
            job.task,
            job.data.valid,
            job.valid_shares,
            exchange,
            job.device,
            stop_requested=keeper.stop_requested,
            seed=partial(job.workers.seed, 0),
            waits=lambda: pulse.beat("exchange"),
        )
    if evaluation.samples == 0:
        raise TrainingError(_NOTHING_READ.format(part="validate with", data=job.data.name))
    if not math.isfinite(evaluation.loss):
        raise TrainingError(
            f"the validation loss is {evaluation.loss} after step {meter.totals().step}: "
            "the parameters are unusable and are not saved. Lower --lr, or add --warmup-epochs"
        )
    return evaluation


def _lr_in_use(job: Job) -> float:
    return float(job.optimizer.param_groups[0]["lr"])


def steps_from(job: Job, state: State, rank: int) -> Iterator[StepData]:
    """Yield the data of each step from `state`, which the caller advances, to the run's end."""
    while state.step < job.total_steps:
        yield from job.feed.epoch(state.samples_seen, job.total_steps - state.step, rank)


def train_step(
    job: Job,
    exchange: Exchange,
    audit: Audit,
    step: int,
    data: StepData,
    clock: PhaseClock,
    stop_requested: bool = False,
) -> StepSums:
    """Collective: make one optimizer update from a global batch; `data` is this rank's part.

    Returns the sums of this step, whose reduction over ranks may still be in progress.
    """
    for group in job.optimizer.param_groups:
        group["lr"] = job.schedule(step - 1) * group.get("lr_scale", 1.0)
    job.optimizer.zero_grad()
    audit.begin(step, data)
    sums = StepSums(job.device, job.task.metrics, job.feed.shares.rows)
    weight = job.reduction.weight(exchange.size) / data.samples
    own: list[Pass] = []
    job.workers.begin_step()
    for it in _passes(job, step, data):
        clock.enter("compute")
        if it.loaded.samples or job.feed.everyone:  # synchronised layers need every rank
            job.workers.begin_pass(step, it.share, it.number, it.is_last)
            audit.begin_pass(it.share, it.loaded.batch)
            _backward(job, it, weight, sums)
            if exchange.size > 1:  # needed to find the rank of a gradient that is not finite
                own.append(it)
        clock.enter("data")
    clock.enter("exchange")
    sums.start(exchange, step, stop_requested, clock.take())
    job.workers.reduce_gradients()
    audit.end(step)
    if not job.task.counts_samples or may_skip(job.data.train):  # the count is known only now
        counted = float(sums.total()[COUNT])
        job.update.rescale(data.samples / counted if counted else 1.0)
    clock.enter("update")
    found = job.update.not_finite()
    if found:
        faulty = exchange.size == 1 or _own_are_faulty(job, step, found, own, weight)
        _refuse_gradients(job, exchange, step, sums, found, faulty)
    logged = step % job.intervals.log == 0
    sums.gradient_norm = job.update.apply(job.optimizer, measure=logged)
    audit.updated(step, sums)
    clock.leave()
    return sums


def _refuse_gradients(
    job: Job, exchange: Exchange, step: int, sums: StepSums, found: list[str], faulty: bool
) -> NoReturn:
    """Collective: raise TrainingError on all ranks for the parameters `found`.

    Their reduced gradients are not finite. `faulty`: whether this rank's own gradients are not
    finite. If a loss is not finite, that is reported as the cause.
    """
    sums.check_losses(exchange, step)
    faulty_ranks = exchange.all_gather_object(faulty, "hvdtrain.own_gradients")
    ranks = [rank for rank, at_fault in enumerate(faulty_ranks) if at_fault]
    where = f"on {name_ranks(ranks)}" if ranks else "after summation, although finite on each rank"
    parameters = sum(1 for _ in job.model.parameters())
    advice = "look for functions without a derivative where they are used (sqrt or a norm at 0)"
    if not ranks and job.reduction.compression != "none":
        advice = f"leave --compression={job.reduction.compression} out, which overflows early"
    raise TrainingError(
        f"the gradient of {found[0]} is not finite at step {step} {where}, while the loss is "
        f"({len(found)} of {parameters} parameters; the last is {found[-1]}). The step was not "
        f"applied, and nothing of it is saved. Lower --lr, or {advice}"
    )


def _own_are_faulty(job: Job, step: int, names: list[str], own: list[Pass], weight: float) -> bool:
    """Recompute this rank's own gradients, which the reduction has overwritten. Returns whether a
    gradient of `names` is not finite. Collective if layers are synchronised.
    """
    parameters = [job.model.get_parameter(name) for name in names]
    faulty = False
    for it in own:
        job.workers.repeat_pass(step, it.share, it.number)
        with job.update.autocast():
            loss = job.task.loss(job.model, to_device(it.loaded.batch, job.device)).loss
        gradients = torch.autograd.grad(loss * weight, parameters, allow_unused=True)
        known = {str(i): it for i, it in enumerate(gradients) if it is not None}
        faulty = faulty or bool(not_finite(known))
    return faulty


def _passes(job: Job, step: int, data: StepData) -> Iterator[Pass]:
    """Read and yield the passes of this rank, one after another."""
    for place, (share, number) in enumerate(data.passes, start=1):
        job.workers.seed(step, share, number, reading=True)
        yield Pass(share, number, place == len(data.passes), next(data.batches))


def _backward(job: Job, own: Pass, weight: float, sums: StepSums) -> None:
    """Add the weighted gradient of a part of a micro-batch to `.grad`, and its sums to `sums`."""
    batch = to_device(own.loaded.batch, job.device)
    with job.update.autocast():
        found = job.task.loss(job.model, batch)
    found = check_sums(found, job.task, own.loaded.samples, training=True)
    job.update.scale(found.loss * weight).backward()
    sums.add(found, own.loaded.bad, job.feed.shares.row(own.share))
