"""One step of training: passes over this rank's batches, the reduction, and the update.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from hvdtrain.data import VirtualShares
from hvdtrain.data.feeding import Loaded, StepData, may_skip
from hvdtrain.errors import TrainingError, UsageError, name_ranks
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.distributed_optimizer import parameters_of
from hvdtrain.tasks import Sums, as_sums, check_sums
from hvdtrain.tasks.means import mean_in
from hvdtrain.train.batchnorm import counting
from hvdtrain.train.clock import PhaseClock
from hvdtrain.train.gathering import BatchSlice, Gathering, VirtualGathering
from hvdtrain.train.guard import GradientGuard
from hvdtrain.train.job import Job
from hvdtrain.train.metering import COUNT, LEFT, StepSums
from hvdtrain.train.update import not_finite

OptimizerIndices = tuple[int, ...]  # of optimizers among those of the job


class Audit(Protocol):
    """An audit or a trace of chosen steps (`hvdtrain.audit`)."""

    def begin(self, step: int, data: StepData) -> None:
        """Prepare for a step (counted from 1), before its first backward pass."""

    def begin_pass(self, share: int, batch: Any) -> None:
        """Prepare for a backward pass over a batch of `share`; passes of a share are adjacent."""

    def reduced(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Collective: examine the gradients of these optimizers once they are reduced."""

    def updated(self, step: int, sums: StepSums) -> None:
        """Collective: examine the step once all parameters are updated."""

    def close(self) -> None:
        """Collective: end, after the last step."""


class Pass(NamedTuple):
    """A forward and backward pass of this rank."""

    share: int
    number: int  # within the share
    is_last: bool  # of this rank in the step
    loaded: Loaded


class Step:
    """One step: for each batch of `batches` a call of `backward`, then `update`, then `close`.

    Several optimizers are trained by the same passes, or these follow one another for each of them,
    over the same batches.
    """

    def __init__(
        self,
        job: Job,
        exchange: Exchange,
        audit: Audit,
        number: int,
        data: StepData,
        clock: PhaseClock,
        stop_requested: bool = False,
        is_first: bool = False,
    ) -> None:
        """Begin step `number` (from 1). `data`: this rank's part of the global batch.

        `stop_requested`: of this rank; all ranks learn of it with the sums of the step. `is_first`:
        of this process, so that mistakes of a script are looked for.
        """
        self._is_first = is_first
        self.number = number  # from 1
        self.job, self._exchange, self._audit = job, exchange, audit
        self._data, self._clock, self._stop_requested = data, clock, stop_requested
        self._weight = job.reduction.weight(exchange.size) / max(data.samples, 1)
        self._loaded: list[Loaded] = []  # read so far, for further passes over the same batches
        self._is_trial = False  # the passes make no gradients of parameters
        self._passes_done: list[Pass] = []  # of the current optimizers
        self._pass: Pass | None = None  # which waits for its backward pass
        self._active: OptimizerIndices | None = None  # the optimizers whose passes are made
        self.first_trained: OptimizerIndices = ()  # those of the first passes
        self._made: list[StepSums] = []  # of each update
        self._sums = StepSums(job.device)
        self._guard = GradientGuard(job, exchange, number)
        self._gathering = _gathering_of(job, exchange)
        job.set_lr(number)

    @property
    def epoch(self) -> int:
        """Return the number of the epoch, from 0."""
        return (self.number - 1) // self.job.sampler.steps_per_epoch

    @property
    def begins_epoch(self) -> bool:
        """Return whether this is the first step of its epoch."""
        return (self.number - 1) % self.job.sampler.steps_per_epoch == 0

    @property
    def ends_epoch(self) -> bool:
        """Return whether this is the last step of its epoch."""
        return self.number % self.job.sampler.steps_per_epoch == 0

    @property
    def samples(self) -> int:
        """Return the number of samples in the global batch."""
        return self._data.samples

    @property
    def is_begun(self) -> bool:
        """Return whether passes were made that no update has used."""
        return self._active is not None

    @property
    def is_updated(self) -> bool:
        """Return whether the body of the step is done."""
        return self._active is None and bool(self._made)

    def batches(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Any]:
        """Yield each batch of this rank, on its device: none if its share is empty.

        `optimizer`: the one to train, of several; only its parameters have gradients meanwhile.
        None: all are trained by these passes.
        """
        job, clock = self.job, self._clock
        if self._active is not None:
            raise UsageError(
                f"step {self.number}: call step.update() after the passes over its batches"
            )
        self._active = indices = _indices_of(optimizer, job.optimizers)
        self.first_trained = self.first_trained or indices
        for trained in self._trained(indices):
            trained.zero_grad()
        self._sums = StepSums(job.device, job.task.metrics, job.feed.shares.rows)
        self._passes_done = []
        # The passes of a further optimizer draw other random numbers.
        drawn = len(self._made) * job.feed.micro_batches
        job.workers.begin_step(indices)
        if not self._made:
            self._audit.begin(self.number, self._data)
        with _others_frozen(job, indices):
            for _ in self._gathering.trials() if self._gathering else ():
                self._is_trial = True
                with job.workers.kept():
                    for pass_ in self._passes():
                        job.workers.repeat_pass(self.number, pass_.share, pass_.number + drawn)
                        yield from self._body(pass_, pass_.loaded.on(job.device))
            self._is_trial = False
            for pass_ in self._passes():
                batch = pass_.loaded.on(job.device)
                clock.enter("compute")
                if pass_.loaded.samples or job.feed.everyone:  # synchronised layers need every rank
                    self._guard.check()
                    job.workers.begin_pass(
                        self.number, pass_.share, pass_.number + drawn, pass_.is_last
                    )
                    self._audit.begin_pass(pass_.share, batch)
                    yield from self._body(pass_, batch)
                    if self._exchange.size > 1:  # to find the rank of a gradient that is not finite
                        self._passes_done.append(pass_._replace(number=pass_.number + drawn))
                clock.enter("data")

    def backward(
        self,
        loss: torch.Tensor | None = None,
        count: float | torch.Tensor | None = None,
        metrics: Mapping[str, torch.Tensor] | None = None,
        *,
        sum: torch.Tensor | None = None,  # noqa: A002
        mean: torch.Tensor | None = None,
    ) -> None:
        """Add the weighted gradient of the current batch to `.grad`, and its sums to the step's.

        The loss of the batch, a scalar, is given as `sum` or as `mean` (of cross_entropy and most
        other functions of torch by default). `count`: what the step's loss is a mean
        over, and that of the batch a sum or mean over: the number of samples, or of tokens, or the
        sum of their weights. `loss`, without a name, is a sum; one that is found to be a mean in
        the first step of this process is refused. `metrics`: further sums, by name; a script may
        leave some out. Raises UsageError unless there is one loss and a count, and TrainingError
        for metrics that were not declared.
        """
        job, pass_ = self.job, self._pass
        if pass_ is None:
            raise UsageError(
                f"step {self.number}: step.backward(mean=loss, count=count) is called once for "
                "each batch"
            )
        counted, metric_sums = self._counted(count), dict(metrics or {})
        if not pass_.loaded.samples:  # the sample of the batch only stands in
            counted, metric_sums = 0.0, {n: torch.zeros_like(t) for n, t in metric_sums.items()}
        loss = self._summed(loss, sum, mean, counted)
        self._pass = None
        if not job.task.computes_loss:
            nothing = torch.zeros((), device=job.device)
            metric_sums = dict.fromkeys(job.task.metrics, nothing) | metric_sums
        sums = Sums(loss, counted, metric_sums)
        sums = check_sums(sums, job.task, pass_.loaded.samples, training=True)
        scaled = job.update.scale(sums.loss * self._weight)
        if self._gathering is None:
            scaled.backward()
        else:
            self._gathering.backward(scaled, self._slice_of(pass_))
        if self._is_trial:
            return
        self._guard.note(self._trained(self._active or ()))
        self._sums.add(sums, pass_.loaded.bad, job.feed.shares.row(pass_.share))

    def all_gather(self, features: torch.Tensor) -> torch.Tensor:
        """Collective: return the features of all samples of the micro-batch (`Loop.all_gather`)."""
        if self._gathering is None or self._pass is None:
            raise UsageError(
                f"step {self.number}: loop.all_gather is called in the passes over step.batches(), "
                "before step.backward(), in a loop with the option gathers=True"
            )
        batch_slice = self._slice_of(self._pass)
        if len(features) != max(batch_slice.samples, 1):
            raise UsageError(
                f"step {self.number}: loop.all_gather takes the features of each sample of the "
                f"batch: {len(features)} rows for {max(batch_slice.samples, 1)} samples"
            )
        return self._gathering.gather(features, batch_slice)

    @property
    def offset(self) -> int:
        """Return the number of the batch's first sample in the global batch (with accumulation, in
        the micro-batch); 0 for a batch that counts nothing.
        """
        if self._pass is None:
            raise UsageError(f"step {self.number}: step.offset is of a pass over step.batches()")
        return self._slice_of(self._pass).first

    def _slice_of(self, pass_: Pass) -> BatchSlice:
        rows, total = self.job.feed.extent(self.samples, pass_.share, pass_.number)
        return BatchSlice(pass_.share, pass_.number, rows.start, len(rows), total)

    def _body(self, pass_: Pass, batch: Any) -> Iterator[Any]:
        """Yield the batch of a pass, whose body gives its loss to `backward`."""
        self._pass = pass_
        if self._gathering:
            self._gathering.begin_pass()
        with counting(self.job.model, pass_.loaded.samples):
            yield batch
        self._refuse_missing_backward()

    def _counted(self, count: float | torch.Tensor | None) -> float:
        """Return the count of a batch. Raises UsageError unless it is a number that can be one."""
        try:
            counted = float(count)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            counted = math.nan
        if not (counted >= 0 and math.isfinite(counted)):
            shown = "none" if count is None else repr(count)
            raise UsageError(
                f"step {self.number}: step.backward needs a count, and got {shown}: give count=, "
                "the number of samples (or tokens) that the loss is a sum or mean over"
            )
        return counted

    def _summed(
        self,
        loss: torch.Tensor | None,
        total: torch.Tensor | None,
        mean: torch.Tensor | None,
        count: float,
    ) -> torch.Tensor:
        """Return the sum of the losses of a batch. Raises UsageError unless one of them is given,
        or if `loss` is a mean.
        """
        losses = [tensor for tensor in (loss, total, mean) if tensor is not None]
        if len(losses) != 1:
            raise UsageError(
                f"step {self.number}: step.backward takes one loss of the batch: sum=, or mean="
            )
        (batch_loss,) = losses
        is_own = self._pass is None or self._pass.loaded.samples > 0
        if mean is None:
            looks = loss is not None and self._is_first and not self.job.task.computes_loss
            if (
                looks
                and isinstance(batch_loss, torch.Tensor)
                and (op := mean_in(batch_loss, count))
            ):
                raise UsageError(
                    f"step {self.number}: step.backward(loss, count) takes the sum of the losses "
                    f"of a batch, and this is a mean ({op}): updates would be {count:g} times "
                    "too small. Give step.backward(mean=loss, count=...), or make it a sum: "
                    'reduction="sum". If it is one, give step.backward(sum=loss, count=...)'
                )
            return batch_loss if is_own else batch_loss.nan_to_num() * 0.0
        if count == 0 and self.job.feed.everyone:
            return mean.nan_to_num() * 0.0  # through the model, whose layers wait for every rank
        if count == 0:  # a mean over nothing is not a number
            trained = (p for p in self.job.model.parameters() if p.requires_grad)
            return sum((p.sum() * 0.0 for p in trained), mean.new_zeros(()))
        return mean * count

    def update(self) -> None:
        """Collective: reduce the gradients, and make one step of each optimizer that was trained.

        Raises TrainingError on all ranks if a gradient is not finite.
        """
        if self._active is None:
            raise UsageError(
                f"step {self.number}: iterate over step.batches() before step.update()"
            )
        self._refuse_missing_backward()
        self._guard.check()
        job, sums, clock, number = self.job, self._sums, self._clock, self.number
        optimizers, self._active = self._trained(self._active), None
        clock.enter("exchange")
        sums.start(self._exchange, number, self._stop_requested, clock.take(), len(self._made))
        job.workers.reduce_gradients()
        self._refuse_leavers()
        self._audit.reduced(number, optimizers)
        if not job.task.counts_samples or may_skip(job.data.train):  # the count is known only now
            counted = float(sums.total()[COUNT])
            job.update.rescale(optimizers, self._data.samples / counted if counted else 1.0)
        clock.enter("update")
        is_logged = number % job.intervals.log == 0
        if names := job.update.not_finite(optimizers, measure=is_logged):
            self._refuse_gradients(names)
        sums.gradient_norm = job.update.apply(optimizers, measure=is_logged)
        self._made.append(sums)

    def leave(self, trained: OptimizerIndices) -> None:
        """Collective: leave the loop in place of this step, for which there are no batches.

        `trained`: the optimizers of its first passes on ranks that do not leave it. Raises
        TrainingError on all ranks unless all leave it here.
        """
        alone = self.job.optimizers[trained[0]] if len(trained) == 1 else None
        for _ in self.batches(alone):
            raise UsageError(f"step {self.number}: it has batches")
        self._sums.leave()
        self._sums.start(self._exchange, self.number, self._stop_requested, self._clock.take())
        self.job.workers.reduce_gradients()
        self._refuse_leavers()

    def close(self) -> StepSums:
        """Collective: end the step. Returns its sums, whose reduction may still be in progress."""
        if not self.is_updated:
            raise UsageError(
                f"step {self.number}: call step.update(), in place of optimizer.step(), once its "
                "batches are used"
            )
        sums = self._made[0]
        for further in self._made[1:]:
            sums.join(further)
        self.job.update.end_step()
        self._audit.updated(self.number, sums)
        self._clock.leave()
        return sums

    def _trained(self, indices: OptimizerIndices) -> tuple[torch.optim.Optimizer, ...]:
        return tuple(self.job.optimizers[index] for index in indices)

    def _passes(self) -> Iterator[Pass]:
        """Read and yield the passes of this rank, one after another."""
        data, keep = self._data, len(self.job.optimizers) > 1 or self._gathering is not None
        for index, (share, number) in enumerate(data.passes):
            self.job.workers.seed(self.number, share, number, reading=True)
            loaded = self._loaded[index] if index < len(self._loaded) else next(data.batches)
            if keep and index == len(self._loaded):
                self._loaded.append(loaded)
            yield Pass(share, number, index + 1 == len(data.passes), loaded)

    def _refuse_leavers(self) -> None:
        """Collective: raise TrainingError on all ranks if only some have left a script's loop."""
        if self.job.task.computes_loss or self._exchange.size == 1:
            return
        left, is_leaving = int(self._sums.total()[LEFT]), self._sums.has_left
        if 0 < left < self._exchange.size:
            each = self._exchange.all_gather_object(is_leaving, "hvdtrain.left")
            ranks = [rank for rank, has_left in enumerate(each) if has_left]
            raise TrainingError(
                f"{name_ranks(ranks)} left the loop before step {self.number}, and others did not. "
                "Decide by what is equal on all of them, such as loop.evaluation or loop.mean"
            )

    def _refuse_missing_backward(self) -> None:
        if self._pass is not None:
            raise UsageError(
                f"step {self.number}: call step.backward(mean=loss, count=...), in place of "
                "loss.backward(), for each of its batches"
            )

    def _refuse_gradients(self, names: list[str]) -> NoReturn:
        """Collective: raise TrainingError on all ranks for the parameters `names`.

        Their reduced gradients are not finite. If a loss is not finite, that is reported as the
        cause.
        """
        job, exchange, step = self.job, self._exchange, self.number
        faulty = exchange.size == 1 or self._own_are_faulty(names)
        self._sums.check_losses(exchange, step)
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

    def _own_are_faulty(self, names: list[str]) -> bool:
        """Recompute this rank's own gradients, which the reduction has overwritten. Returns whether
        a gradient of `names` is not finite. Collective if layers are synchronised.
        """
        job, faulty = self.job, False
        if not job.task.computes_loss:
            return False
        parameters = [job.model.get_parameter(name) for name in names]
        for pass_ in self._passes_done:
            job.workers.repeat_pass(self.number, pass_.share, pass_.number)
            with job.update.autocast(), counting(job.model, pass_.loaded.samples):
                loss = job.task.loss(job.model, pass_.loaded.on(job.device)).loss
            gradients = torch.autograd.grad(loss * self._weight, parameters, allow_unused=True)
            present = {str(i): grad for i, grad in enumerate(gradients) if grad is not None}
            faulty = faulty or bool(pass_.loaded.samples and not_finite(present))
        return faulty


def compute(step: Step) -> None:
    """Collective: make the passes and the update of a step with the loss of its job's task."""
    job = step.job
    for batch in step.batches():
        with job.update.autocast():
            sums = as_sums(job.task.loss(job.model, batch), job.task, training=True)
        step.backward(sums.loss, sums.samples, sums.metrics)
    step.update()


def compute_all(steps: Iterable[Step]) -> Any:
    """Collective: compute each step as `compute` does; return what their generator returns."""
    iterator = iter(steps)
    while True:
        try:
            step = next(iterator)
        except StopIteration as end:
            return end.value
        compute(step)


def train_step(
    job: Job, exchange: Exchange, audit: Audit, number: int, data: StepData, clock: PhaseClock
) -> StepSums:
    """Collective: make one optimizer update from a global batch; `data` is this rank's part.

    Returns the sums of this step, whose reduction over ranks may still be in progress.
    """
    step = Step(job, exchange, audit, number, data, clock)
    compute(step)
    return step.close()


def _gathering_of(job: Job, exchange: Exchange) -> Gathering | None:
    shares = job.feed.shares
    if not job.gathers:
        return None
    if isinstance(shares, VirtualShares):
        return VirtualGathering(exchange, shares.rows)
    return Gathering(exchange)


def _indices_of(
    optimizer: torch.optim.Optimizer | None, optimizers: tuple[torch.optim.Optimizer, ...]
) -> OptimizerIndices:
    """Return the index of an optimizer (None: all). Raises UsageError unless it is one of them."""
    indices = tuple(n for n, opt in enumerate(optimizers) if optimizer is None or opt is optimizer)
    if not indices:
        raise UsageError(
            "step.batches(optimizer): it is none of the optimizers that the loop was given. Leave "
            "it out to train all of them by the same passes"
        )
    return indices


@contextmanager
def _others_frozen(job: Job, indices: OptimizerIndices) -> Iterator[None]:
    """Let only the parameters of these optimizers have gradients, if there are others."""
    frozen = []
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
