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

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hvdtrain.data.feeding import Loaded, StepData, may_skip
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.tasks import Sums, as_sums, check_sums
from hvdtrain.train.batchnorm import counting
from hvdtrain.train.clock import PhaseClock
from hvdtrain.train.gathering import BatchSlice, gathering_of
from hvdtrain.train.interfaces import Audit
from hvdtrain.train.job import Job
from hvdtrain.train.metering import COUNT, END, LEFT, StepSums
from hvdtrain.train.passes import (
    GradientGuard,
    Pass,
    checked_count,
    ends_run,
    others_frozen,
    refuse_gradients,
    refuse_mean,
    summed_loss,
)

OptimizerIndices = tuple[int, ...]  # of optimizers among those of the job


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
        stop_requested: Callable[[], bool] = lambda: False,
        is_first: bool = False,
    ) -> None:
        """Begin step `number` (from 1). `data`: this rank's part of the global batch.
        `stop_requested`: asked of this rank as late as all ranks can learn of it with the sums of
        the step. `is_first`: of this process, so that mistakes of a script are looked for.
        """
        self.number, self._is_first = number, is_first
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
        self.end_requested = self.end_agreed = False  # of the run: by this rank, by all ranks
        self._sums: StepSums  # of the passes since `batches` was called
        self._guard = GradientGuard(job, exchange, number)
        self._gathering = gathering_of(exchange, job.feed.shares) if job.gathers else None
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
            raise self._refusal("call step.update() after the passes over its batches")
        self._active = indices = job.indices_of(optimizer)
        self.first_trained = self.first_trained or indices
        for index in indices:
            job.optimizers[index].zero_grad()
        self._sums = StepSums(job.device, job.task.metrics, job.feed.shares.rows)
        self._passes_done = []
        job.workers.begin_step(indices)
        if not self._made:
            self._audit.begin(self.number, self._data)
        with others_frozen(job, indices):
            for _ in self._gathering.trials() if self._gathering else ():
                self._is_trial = True
                with job.workers.kept():
                    for pass_ in self._passes():
                        job.workers.repeat_pass(self.number, pass_.share, pass_.drawn)
                        yield from self._body(pass_, pass_.loaded.on(job.device))
            self._is_trial = False
            for pass_ in self._passes():
                batch = pass_.loaded.on(job.device)
                clock.enter("compute")
                if pass_.loaded.samples or job.feed.everyone:  # synchronised layers need every rank
                    self._guard.check()
                    job.workers.begin_pass(self.number, pass_.share, pass_.drawn, pass_.is_last)
                    self._audit.begin_pass(pass_.share, batch)
                    yield from self._body(pass_, batch)
                    if self._exchange.size > 1:  # to find the rank of a gradient that is not finite
                        self._passes_done.append(pass_)
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
        other functions of torch by default). `count`: what the step's loss is a mean over, and that
        of the batch a sum or mean over: the number of samples, or of tokens, or the sum of their
        weights. `loss`, without a name, is a sum; one that is found to be a mean in
        the first step of this process is refused. `metrics`: further sums, by name; a script may
        leave some out. Raises UsageError unless there is one loss and a count, and TrainingError
        for metrics that were not declared.
        """
        job, pass_ = self.job, self._pass
        if pass_ is None:
            raise self._refusal(
                "step.backward(mean=loss, count=count) is called once for each batch"
            )
        counted, metric_sums = checked_count(count, self.number), dict(metrics or {})
        if not pass_.loaded.samples:  # the sample of the batch only stands in
            counted, metric_sums = 0.0, {n: torch.zeros_like(t) for n, t in metric_sums.items()}
        losses = [tensor for tensor in (loss, sum, mean) if tensor is not None]
        if len(losses) != 1:
            raise self._refusal("step.backward takes one loss of the batch: sum=, or mean=")
        if not job.task.computes_loss:
            if self._is_first:
                refuse_mean(loss, counted, self.number)
            if missing := [name for name in job.task.metrics if name not in metric_sums]:
                metric_sums |= dict.fromkeys(missing, torch.zeros((), device=job.device))
        total = summed_loss(loss, sum, mean, counted, pass_, job)
        self._pass = None
        self._add(Sums(total, counted, metric_sums), pass_)

    def _add(self, sums: Sums, pass_: Pass) -> None:
        """Make the gradients of a pass, and add its sums to those of the step."""
        job = self.job
        check_sums(sums, job.task, pass_.loaded.samples, training=True)
        if self._gathering is None:  # the weight is that of the loss, without an operation for it
            sums.loss.backward(job.update.scale(torch.full_like(sums.loss, self._weight)))
        else:
            scaled = job.update.scale(sums.loss * self._weight)
            self._gathering.backward(scaled, self._slice_of(pass_))
        if not self._is_trial:
            self._guard.note(self._active or ())
            self._sums.add(sums, pass_.loaded.bad, job.feed.shares.row(pass_.share))

    def all_gather(self, features: torch.Tensor) -> torch.Tensor:
        """Collective: return the features of all samples of the micro-batch (`Loop.all_gather`)."""
        if self._gathering is None or self._pass is None:
            raise self._refusal(
                "loop.all_gather is called in the passes over step.batches(), before "
                "step.backward(), in a loop with the option gathers=True"
            )
        batch_slice = self._slice_of(self._pass)
        rows, samples = len(features), max(batch_slice.samples, 1)
        if rows != samples:
            raise self._refusal(
                "loop.all_gather takes the features of each sample of the batch: "
                f"{rows} rows for {samples} samples"
            )
        return self._gathering.gather(features, batch_slice)

    @property
    def offset(self) -> int:
        """Return the number of the batch's first sample in the global batch (with accumulation, in
        the micro-batch); 0 for a batch that counts nothing.
        """
        if self._pass is None:
            raise self._refusal("step.offset is of a pass over step.batches()")
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

    def update(self) -> None:
        """Collective: reduce the gradients, and make one step of each optimizer that was trained.

        Raises TrainingError on all ranks if a gradient is not finite.
        """
        if self._active is None:
            raise self._refusal("iterate over step.batches() before step.update()")
        self._refuse_missing_backward()
        self._guard.check()
        job, exchange, sums = self.job, self._exchange, self._sums
        clock, number = self._clock, self.number
        optimizers, self._active = [job.optimizers[index] for index in self._active], None
        clock.enter("exchange")
        sums.mark(END, self.end_requested)
        sums.start(exchange, number, self._stop_requested(), clock.take(), len(self._made))
        finite = job.workers.reduce_gradients()
        self.end_agreed |= ends_run(job, exchange, sums, number)
        self._audit.reduced(number, optimizers)
        if not job.task.counts_samples or may_skip(job.data.train):  # the count is known only now
            factor = job.update.rescale(optimizers, self._data.samples, sums.total()[COUNT])
            finite &= factor <= 1
        clock.enter("update")
        is_logged = number % job.intervals.log == 0
        names = [] if finite and not is_logged else job.update.not_finite(optimizers, is_logged)
        if names:
            refuse_gradients(names, job, exchange, sums, number, self._passes_done, self._weight)
        sums.gradient_norm = job.update.apply(optimizers, measure=is_logged)
        self._made.append(sums)

    def leave(self, trained: OptimizerIndices) -> None:
        """Collective: leave the loop in place of this step, for which there are no batches.

        `trained`: the optimizers of its first passes on ranks that do not leave it. Raises
        TrainingError on all ranks unless all leave it here.
        """
        job, exchange = self.job, self._exchange
        for _ in self.batches(job.optimizers[trained[0]] if len(trained) == 1 else None):
            raise self._refusal("it has batches")
        self._sums.mark(LEFT)
        self._sums.start(exchange, self.number, self._stop_requested(), self._clock.take())
        job.workers.reduce_gradients()
        ends_run(job, exchange, self._sums, self.number)

    def close(self) -> StepSums:
        """Collective: end the step. Returns its sums, whose reduction may still be in progress."""
        if not self.is_updated:
            raise self._refusal(
                "call step.update(), in place of optimizer.step(), once its batches are used"
            )
        sums = self._made[0]
        for further in self._made[1:]:
            sums.join(further)
        self.job.update.end_step()
        self._audit.updated(self.number, sums)
        self._clock.leave()
        return sums

    def _passes(self) -> Iterator[Pass]:
        """Read and yield the passes of this rank, one after another."""
        data, keep = self._data, len(self.job.optimizers) > 1 or self._gathering is not None
        # The passes of a further optimizer draw other random numbers.
        drawn_before, last = len(self._made) * self.job.feed.micro_batches, len(data.passes) - 1
        for index, (share, number) in enumerate(data.passes):
            self.job.workers.seed(self.number, share, number, reading=True)
            loaded = self._loaded[index] if index < len(self._loaded) else next(data.batches)
            if keep and index == len(self._loaded):
                self._loaded.append(loaded)
            yield Pass(share, number, number + drawn_before, index == last, loaded)

    def _refusal(self, text: str) -> UsageError:
        return UsageError(f"step {self.number}: {text}")

    def _refuse_missing_backward(self) -> None:
        if self._pass is not None:
            raise self._refusal(
                "call step.backward(mean=loss, count=...), in place of loss.backward(), for each "
                "of its batches"
            )


def compute(step: Step) -> None:
    """Collective: make the passes and the update of a step with the loss of its job's task."""
    job = step.job
    for batch in step.batches():
        with job.update.autocast():
            sums = as_sums(job.task.loss(job.model, batch), job.task, training=True)
        step.backward(sums.loss, sums.samples, sums.metrics)
    step.update()


def compute_all(steps: Iterator[Step]) -> Any:
    """Collective: compute each step as `compute` does; return what their generator returns."""
    while True:
        try:
            step = next(steps)
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
