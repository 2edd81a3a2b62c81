"""A script's own training loop, with all that `hvdtrain train` does around it.

with hvdtrain.Loop(model, optimizer, train_set, global_batch_size=100, epochs=3) as loop:
    for step in loop:
        for x, y in step.batches():
            step.backward(mean=cross_entropy(model(x), y), count=len(y))
        step.update()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from torch.utils.data import DataLoader
from typing_extensions import Unpack  # which torch requires

from hvdtrain.config import TrainConfig
from hvdtrain.config.keywords import LoopOptions, lists_options
from hvdtrain.data.adapters import batch_size_of
from hvdtrain.data.loader_order import has_batch_size
from hvdtrain.errors import UsageError, refuse
from hvdtrain.exchange import Exchange, SingleProcess
from hvdtrain.log import report_uncaught
from hvdtrain.run.recall import of_this_job
from hvdtrain.run.resume import take_last_state
from hvdtrain.run.script import (
    Evaluate,
    LoopEnded,
    Script,
    ScriptTask,
    TrialLoss,
    as_one,
    directed_steps,
    in_words_of_script,
    is_directed,
    next_loop,
)
from hvdtrain.run.script_input import Samples, problems_of, read_options, read_samples
from hvdtrain.run.training import Session, TrainingRun, join_session, training_run
from hvdtrain.tasks import Finalize
from hvdtrain.topology import Topology
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.job import Stateful
from hvdtrain.train.loop import TrainingLoop
from hvdtrain.train.state import keep_saved_weights
from hvdtrain.train.step import Step


class Loop:
    """The steps of a script's own loop, as a context manager.

    It hands out each step's own samples, weights the losses, reduces, audits, clips, counts, saves,
    resumes, stops on signals, evaluates and reports, and leaves the same run folder as
    `hvdtrain train`. In the context, on every rank: `for step in loop`, and for each step a pass
    over `step.batches()` with one call of `step.backward` each, then `step.update()`.

    `model`: one, or several by name; they are moved to the device of the rank, and those of rank 0
    are broadcast. `optimizer`: one, or several, which `step.batches()` trains together and
    `step.batches(optimizer)` one by one. `train`, `valid`: the samples, as a split, a map-style
    data set, or a DataLoader, of which the samples, their collation and, as default for the global
    batch, its size are taken. `evaluate`: returns the Sums of a batch of `valid`, as
    `Task.evaluate` does; it is called at the end of every `eval_interval`-th epoch. `metrics`:
    names of the sums that `step.backward` is given; `valid_metrics`: of those that `evaluate`
    returns (default: `metrics`). `finalize`: computes metrics that are no sums, such as AUC, of
    outputs of all samples of `valid`, as `Task.finalize` does; name them in `valid_metrics` too.
    `best`: the metric by which the best checkpoint is chosen. `state`:
    objects to save and restore too, such as learning rate schedulers. `save_frozen`: False:
    checkpoints leave out parameters that are frozen (`requires_grad_(False)`), such as those that
    an adapter is for. The script makes them again at each start; a resume with other ones is
    refused. `gathers`: the loop calls `all_gather` for each batch. `on_evaluation`: called on every
    worker with each evaluation of the run (`.loss`, `.metrics`, and `.step` and `.epoch`, numbered
    as of the step), before the state is saved; after a resume not with those that were made before.
    `trial_loss`: returns the loss of a batch, given the model, as the loop does; with it
    `micro_batch="auto"` tries what fits in memory, before the loop.

    `options`: those of `hvdtrain train` by name, with its defaults (`experiment`: the name of the
    script). Not those of the model, the data, the optimizer and the learning rate, which are the
    script's own. The environment variable HVDTRAIN_OPTIONS replaces some of them, as JSON:
    `{"virtual_workers": 6}`.
    """

    _is_iterated = False
    _session: Session | None = None
    _directed: Iterator[Step] | None = None  # the steps in place of those of a training
    _run: TrainingRun | None = None
    _loop: TrainingLoop | None = None
    _last: Evaluation | None = None  # of the finished run that is resumed

    @lists_options
    @in_words_of_script()
    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        train: Samples,
        valid: Samples | None = None,
        evaluate: Evaluate | None = None,
        *,
        finalize: Finalize | None = None,
        metrics: Sequence[str] = (),
        valid_metrics: Sequence[str] | None = None,
        best: str = "loss",
        best_is_highest: bool = False,
        state: Sequence[Stateful] = (),
        save_frozen: bool = True,
        gathers: bool = False,
        on_evaluation: Callable[[Evaluation], object] | None = None,
        trial_loss: TrialLoss | None = None,
        **options: Unpack[LoopOptions],
    ) -> None:
        """Check what is given; raises UsageError with every problem."""
        report_uncaught()
        if isinstance(train, DataLoader) and "batch_size" not in options and has_batch_size(train):
            options = {"global_batch_size": batch_size_of(train), **options}
        self._config, self._is_named = read_options(options, trial_loss)
        self._stack = ExitStack()
        self._script = Script(
            path=Path(sys.argv[0]),
            model=as_one(model),
            optimizers=tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,),
            further_state=tuple(state),
            task=ScriptTask(evaluate, metrics, valid_metrics, best, best_is_highest, finalize),
            save_frozen=save_frozen,
            gathers=gathers,
            on_evaluation=on_evaluation,
        )
        problems = problems_of(self._script, train, valid, (valid is None) != (evaluate is None))
        refuse(f"hvdtrain.Loop: {problem}" for problem in problems)
        data = read_samples(self._script.path.name, train, valid, self._config.run.seed)
        self._script = replace(self._script, data=data, trial_loss=trial_loss)

    def __enter__(self) -> Loop:
        """Collective: join the other workers, prepare the run, and resume it if that is wanted."""
        with ExitStack() as stack, in_words_of_script():
            self._script = replace(self._script, loop=stack.enter_context(next_loop()))
            self._directed = directed_steps(self._script)
            if self._directed is not None:
                self._stack = stack.pop_all()
                return self
            joined = join_session(
                self._config, Topology.from_environment(), ["python", *sys.argv], self._script
            )
            self._session = stack.enter_context(joined)
            exchange = self._session.exchange
            number = 1 if self._is_named else self._script.loop
            self._config = _of_this_loop(self._config, number, exchange)
            run = stack.enter_context(training_run(self._config, self._session))
            if run is None:
                self._last = take_last_state(self._script, self.folder, exchange)
            else:
                self._loop = TrainingLoop(run.job, run.state, exchange, run.hooks)
                self._run = run
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        """Collective: end the run: evaluate and save, if the loop was left early, and report."""
        with self._stack, in_words_of_script():
            if error is not None:
                raise error
            if self._directed is not None:
                next(self._directed, None)  # if the script has no use for steps
            if is_directed(self._script):
                raise LoopEnded
            if self._loop is not None and self._run is not None:
                if self._loop.outcome is None:
                    self._loop.end()
                assert self._loop.outcome is not None
                self._run.finish(self._loop.outcome)
                keep_saved_weights(self._loop.job)
        return None

    def __iter__(self) -> Iterator[Step]:
        """Collective: yield the steps that are left; none if a finished run is resumed."""
        if self._directed is not None:
            return self._directed
        self._demand_context()
        if self._loop is None:
            return iter(())
        if self._is_iterated:
            raise UsageError(
                "hvdtrain.Loop: iterate over it once: its steps are those of all `epochs`"
            )
        self._is_iterated = True
        return self._loop.steps()

    @property
    def exchange(self) -> Exchange:
        """Return the collectives over all workers."""
        return SingleProcess() if self._directed else self._demand_context().exchange

    @property
    def rank(self) -> int:
        """Return the number of this worker, from 0."""
        return self.exchange.rank

    @property
    def size(self) -> int:
        """Return the number of workers."""
        return self.exchange.size

    @property
    def local_rank(self) -> int:
        """Return the number of this worker on its host, from 0."""
        return 0 if self._directed else self._demand_context().topology.local_rank

    @property
    def device(self) -> torch.device:
        """Return the device of this worker, which has the models and each batch."""
        return next(self._script.model.parameters()).device

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        return self._config.folder if self._run is None else self._run.folder

    @property
    def evaluation(self) -> Evaluation | None:
        """Return the newest evaluation; None before the first one."""
        return self._last if self._loop is None else self._loop.state.evaluation

    def stop(self, reason: str = "loop.stop()") -> None:
        """End the run after this step on every worker, whichever of them call this: it is
        evaluated, saved and finished, with the reason in its summary, and a resume does not train
        on.

        Workers learn of it with the sums of the next `step.update()`: after that of the current
        step, the run goes on for one step. In `on_evaluation` it ends without a further one.
        """
        if self._directed is None:
            self._demand_context()
        if self._loop is not None:
            self._loop.request_end(str(reason) or "loop.stop()")

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context for forward passes with the option `amp`."""
        if self._loop is None:
            return torch.autocast(self.device.type, enabled=False)
        return self._loop.job.update.autocast()

    def mean(self, total: torch.Tensor | float, count: float) -> float:
        """Collective: return the sum of `total` over all workers, divided by that of `count`.

        Both are added in float64. NaN if there is nothing to count.
        """
        local_sums = torch.tensor([float(total), float(count)], dtype=torch.float64)
        both = self.exchange.sum_later(local_sums, "hvdtrain.loop.mean")()
        return float(both[0] / both[1])

    def all_gather(self, features: torch.Tensor) -> torch.Tensor:
        """Collective: return the features of all samples of the global batch (with
        `grad_accum_steps`, of the micro-batch), given those of this worker's batch, (samples, ...).

        Row k is of the k-th sample, on any number of workers; those of this worker's batch begin at
        `step.offset`. Gradients flow back to the features of every worker. Call it once for each
        kind of features in every pass over `step.batches()`; the option `gathers=True` is needed,
        so that workers without samples take part, whose batch is one sample that counts nothing.
        With virtual workers the body of the pass runs three times. Raises UsageError.
        """
        self._demand_context()
        step = None if self._loop is None else self._loop.step
        if step is None:
            raise UsageError("loop.all_gather: call it in the passes over step.batches()")
        return step.all_gather(features)

    def barrier(self) -> None:
        """Collective: wait until every worker is here."""
        self.exchange.all_gather_object(None, "hvdtrain.loop.barrier")

    def _demand_context(self) -> Session:
        if self._session is None:
            raise UsageError("hvdtrain.Loop: use it as `with hvdtrain.Loop(...) as loop:`")
        return self._session


def _of_this_loop(config: TrainConfig, number: int, exchange: Exchange) -> TrainConfig:
    """Collective: return the configuration with the name of this loop's run.

    The first loop of a script, and one that the script has named (`number` 1), keeps its name, each
    further one gets its number too. A restarted job resumes the run that it has begun itself, if it
    has.
    """
    if number > 1:
        name = f"{config.run.experiment}-loop-{number}"
        config = replace(config, run=replace(config.run, experiment=name))
    return of_this_job(config, exchange)
