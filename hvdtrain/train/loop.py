"""The training loop, independent of how ranks exchange data: steps, epochs, evaluation, saving."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from hvdtrain.data.feeding import StepData
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import check_equal_on_all_ranks
from hvdtrain.log import say
from hvdtrain.train.evaluate import Evaluation, Interrupted, evaluate
from hvdtrain.train.interfaces import Hooks
from hvdtrain.train.job import Job
from hvdtrain.train.passes import steps_are_ours
from hvdtrain.train.progress import Outcome, State
from hvdtrain.train.step import Step, compute

_NOTHING_READ = "{data}: none of the samples to {part} could be read. See what was skipped"


class TrainingLoop:
    """The steps of a job from its state to the end; what a step computes is in the loop's body."""

    def __init__(self, job: Job, state: State, exchange: Exchange, hooks: Hooks) -> None:
        """Keep these; `state` is updated."""
        self.job, self.state, self._exchange, self._hooks = job, state, exchange, hooks
        self.outcome: Outcome | None = None  # once the run has ended
        self.step: Step | None = None  # whose body runs
        self._first_trained: tuple[int, ...] = (0,)  # by the first passes of a step: optimizers
        self._is_first_step = self._is_first_evaluation = True  # of this process
        self._evaluated_at = -1  # the step after which this process last evaluated the model
        self._new: Evaluation | None = None  # which is not followed up yet

    def steps(self) -> Iterator[Step]:
        """Collective: yield each step, and end it once its body is done; evaluate, save and stop.

        Raises TrainingError on all ranks if a loss, a gradient or the state to save is not finite,
        or if parameters differ between ranks; any exception of the audit; and Stopped, once all
        ranks have agreed to stop and the state is saved.
        """
        job, state, meter = self.job, self.state, self.state.meter
        with self._stops_when_asked(), steps_are_ours(job):
            if self._is_evaluation_due:  # stopped during it
                self._save(self._evaluate_if_due())
            for data in steps_from(job, state, self._exchange):
                yield self._begin_step(data)
                self._end_step()
                evaluated = self._evaluate_if_due()
                due = evaluated or job.intervals.is_due(job.intervals.checkpoint, state.step)
                in_memory = job.intervals.is_due(job.intervals.memory, state.step)
                if in_memory and not due and not meter.stop_agreed:
                    self._hooks.keeper.save_in_memory(job, state)  # may learn of a stop
                if due or meter.stop_agreed:
                    self._save(evaluated)
                if meter.stop_agreed and not (evaluated and self._is_over):
                    self._hooks.keeper.stop()
                if state.early_end.reason is not None:
                    break
        self.end()

    def end(self) -> None:
        """Collective: end the run here; evaluate and save what is not yet."""
        meter = self.state.meter
        with self._stops_when_asked():
            if self.step is not None:  # its body was left
                self._leave(self.step)
            is_saved = self._evaluated_at == self.state.step
            if meter.has_open_epoch:
                self._end_epoch(at_end=True)
            elif not is_saved:  # resumed from the checkpoint of the last step
                self._evaluate()
            self._follow_up()
            if not is_saved:
                self._save(True)
        totals, speed = meter.last_epoch or meter.totals(), meter.steady_samples_per_s
        reason = self.state.early_end.reason
        self.outcome = Outcome(totals, self.state.evaluation, speed, reason)

    def request_end(self, reason: str) -> None:
        """Let all ranks end the run: after the step whose update follows, or, in the script's hook
        on evaluations, after this one.
        """
        self.state.early_end.requested = reason
        if self.step is not None:
            self.step.end_requested = True

    def _leave(self, step: Step) -> None:
        """Collective: end the step whose body was left, and make sure that all ranks have left."""
        if step.is_begun:
            raise UsageError(
                f"step {step.number}: leave the loop after step.update(), or before step.batches()"
            )
        if was_updated := step.is_updated:
            self._end_step()
        self.step = None
        if not self._is_over:
            if was_updated:  # other ranks may have left at the top of the next step
                self._begin_meter()
            nothing = StepData(np.zeros(0, np.int64), [], iter(()))
            self._next_step(nothing).leave(self._first_trained)
            self.state.early_end.agree(self.state.early_end.requested, self._exchange)

    @contextmanager
    def _stops_when_asked(self) -> Iterator[None]:
        """Save and stop if an evaluation within is interrupted. The epoch stays open, and is
        evaluated when the run is resumed.
        """
        try:
            yield
        except Interrupted:
            self._save(False)
            self._hooks.keeper.stop()

    @property
    def _is_over(self) -> bool:
        """Return whether no step is left, or all ranks have agreed to make none."""
        return is_over(self.state, self.job)

    @property
    def _is_epoch_end(self) -> bool:
        return self.state.samples_seen % self.job.sampler.samples == 0 or self._is_over

    @property
    def _is_evaluation_step(self) -> bool:
        """Return whether an evaluation is due after this step, wherever its epoch ends."""
        every, state = self.job.intervals.evaluation_steps, self.state
        return bool(every and state.step and state.step % every == 0 and len(self.job.data.valid))

    @property
    def _is_evaluation_due(self) -> bool:
        """Return whether an epoch has ended, or an evaluation is due, and it is not done."""
        if self._is_epoch_end:
            return self.state.meter.has_open_epoch
        return self._is_evaluation_step and self.state.evaluated_at != self.state.step

    def _evaluate_if_due(self) -> bool:
        """Collective: end an epoch, or evaluate within one. Returns whether the model was
        evaluated. Raises Interrupted.
        """
        state = self.state
        if not self._is_evaluation_due:
            return False
        evaluated = True
        if self._is_epoch_end:
            evaluated = self._end_epoch()
        else:
            state.meter.collect()
            self._evaluate()
            assert state.evaluation is not None
            self._hooks.observer.evaluated(state.meter.totals(), state.evaluation)
        self._follow_up()
        return evaluated

    def _follow_up(self) -> None:
        """Collective: call the script's hook with a new evaluation, count it, and agree on whether
        the run ends here. A request after the update of the step waits for the next one.
        """
        job, early_end, evaluation = self.job, self.state.early_end, self._new
        if evaluation is None:
            return
        self._new, exhausted = None, None
        waiting, early_end.requested = early_end.requested, None
        if self._hooks.on_evaluation is not None:
            self._hooks.on_evaluation(evaluation)
        requested, early_end.requested = early_end.requested, waiting
        if job.patience and self._is_in_every_run:
            exhausted = early_end.count(evaluation, job.task, job.patience)
        if (job.patience or not job.task.computes_loss) and early_end.reason is None:
            early_end.agree(requested or exhausted, self._exchange)

    @property
    def _is_in_every_run(self) -> bool:
        """Return whether a longer run is evaluated after this step too, not only at its end."""
        epoch, rest = divmod(self.state.samples_seen, self.job.sampler.samples)
        is_due = epoch > 0 and rest == 0 and epoch % self.job.intervals.evaluation == 0
        return is_due or self._is_evaluation_step

    def _begin_step(self, data: StepData) -> Step:
        hooks, number = self._hooks, self.state.step + 1
        hooks.profiler.begin(number)
        self._begin_meter()
        self.step = self._next_step(data, self._is_first_step)
        self.step.end_requested = self.state.early_end.requested is not None
        return self.step

    def _begin_meter(self) -> None:
        """Collective: begin to measure the next step."""
        number = self.state.step + 1
        self.state.meter.begin_step(number, number % self.job.intervals.log == 0)

    def _next_step(self, data: StepData, is_first: bool = False) -> Step:
        """Return the next step, on its data."""
        return Step(
            self.job,
            self._exchange,
            self._hooks.audit,
            self.state.step + 1,
            data,
            self.state.meter.clock,
            self._hooks.keeper.stop_requested,
            is_first,
        )

    def _end_step(self) -> None:
        """Collective: count the step, and report and check what is due."""
        job, hooks, state, meter = self.job, self._hooks, self.state, self.state.meter
        assert self.step is not None
        step, self.step = self.step, None
        meter.end_step(step.close(), step.number, step.samples)
        self._first_trained = step.first_trained
        if self._is_first_step:
            self._is_first_step = False
            self._note_differing_buffers()
        hooks.profiler.end(step.number)
        state.step, state.samples_seen = step.number, state.samples_seen + step.samples
        if step.end_agreed:
            state.early_end.agree(state.early_end.requested, self._exchange)
        if step.number % job.intervals.log == 0:
            totals = meter.read_interval()
            hooks.observer.interval_end(totals, job.lr)
            if hooks.balancer is not None:
                hooks.balancer.interval_end(totals)
        if job.intervals.is_due(job.intervals.hash, step.number):
            check_equal_on_all_ranks(job.model, self._exchange, f"after step {step.number}")

    def _note_differing_buffers(self) -> None:
        """Collective: print a note on buffers that the first passes have changed on each rank."""
        names = self.job.workers.differing_buffers()
        if names and self._exchange.rank == 0:
            more = f" and {len(names) - 1} more" if names[1:] else ""
            say(
                f"note: forward passes change the buffer {names[0]}{more}: each worker has its "
                "own, so what is learned depends on their number, except with virtual workers. "
                "Evaluations, checkpoints and the end of the training take those of rank 0"
            )

    def _end_epoch(self, at_end: bool = False) -> bool:
        """Collective: report the epoch; evaluate and return whether that was due. Raises
        Interrupted.
        """
        job, meter = self.job, self.state.meter
        meter.collect()
        totals = meter.totals()
        if math.isnan(totals.loss):  # no samples: a loss that is not finite has raised already
            raise TrainingError(_NOTHING_READ.format(part="train on", data=job.data.name))
        at_end = at_end or self._is_over or self._is_evaluation_step
        due = totals.epoch % job.intervals.evaluation == 0 or at_end
        if due and self._evaluated_at != totals.step:
            self._evaluate()
        evaluation = self.state.evaluation if due else None
        self._hooks.observer.epoch_end(meter.close_epoch(), evaluation, job.lr)
        return due

    def _evaluate(self) -> None:
        """Collective: evaluate the model that would be saved, if there are samples to validate
        with. Raises Interrupted on a stop request.
        """
        job, meter, keeper = self.job, self.state.meter, self._hooks.keeper
        if len(job.data.valid):
            pulse = meter.clock.pulse
            pulse.beat("evaluate")
            with job.evaluated_model() as model:
                evaluation = evaluate(
                    model,
                    job.task,
                    job.data.valid,
                    job.valid_shares,
                    self._exchange,
                    job.device,
                    stop_requested=keeper.stop_requested,
                    seed=partial(job.workers.seed, 0),
                    waits=lambda: pulse.beat("exchange"),
                    looks=self._is_first_evaluation and not job.task.computes_loss,
                    batch_size=job.valid_batch,
                )
            self._is_first_evaluation = False
            if evaluation.samples == 0:
                raise TrainingError(_NOTHING_READ.format(part="validate with", data=job.data.name))
            if not math.isfinite(evaluation.loss):
                raise TrainingError(
                    f"the validation loss is {evaluation.loss} after step {meter.totals().step}: "
                    "the parameters are unusable and are not saved. Lower --lr, or add "
                    "--warmup-epochs"
                )
            self._take(evaluation)
        self._evaluated_at = self.state.step

    def _take(self, evaluation: Evaluation) -> None:
        """Keep an evaluation as the newest one; it is new unless it repeats one before a resume."""
        state, steps = self.state, self.job.sampler.steps_per_epoch
        epoch = max(state.step - 1, 0) // steps
        is_new = state.evaluation is None or state.evaluated_at != state.step
        state.evaluation = replace(evaluation, step=state.step, epoch=epoch)
        state.evaluated_at = state.step
        self._new = state.evaluation if is_new else None

    def _save(self, evaluated: bool) -> None:
        """Collective: save the state, with the evaluation that was just made, if so."""
        self._hooks.keeper.save(self.job, self.state, self.state.evaluation if evaluated else None)


def train(loop: TrainingLoop) -> Outcome:
    """Collective: make all steps of a loop, to the end of the run, with the loss of its job's task.

    Raises what `TrainingLoop.steps` does.
    """
    for step in loop.steps():
        compute(step)
    assert loop.outcome is not None
    return loop.outcome


def is_over(state: State, job: Job) -> bool:
    """Return whether no step is left, or all ranks have agreed to make none."""
    return state.step >= job.total_steps or state.early_end.reason is not None


def steps_from(job: Job, state: State, exchange: Exchange) -> Iterator[StepData]:
    """Collective: yield the data of each step from `state`, which the caller advances, to the end
    of the run.
    """
    while not is_over(state, job):
        job.begin_epoch(state.samples_seen // job.sampler.samples, exchange)
        yield from job.feed.epoch(state.samples_seen, job.total_steps - state.step, exchange.rank)
