"""A script's own training loop, with all that `hvdtrain train` does around it.

with hvdtrain.Loop(model, optimizer, train_set, global_batch_size=100, epochs=3) as loop:
    for step in loop:
        for x, y in step.batches():
            step.backward(mean=cross_entropy(model(x), y), count=len(y))
        step.update()
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hvdtrain.config import TrainConfig
from hvdtrain.config.options import (
    LOOP_OPTIONS,
    build_config,
    from_python,
    nearest,
    train_options,
)
from hvdtrain.data import Split, Splits, TensorSplit
from hvdtrain.data.adapters import batch_size_of, order_problem, split_of
from hvdtrain.data.splits import check_split
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange, SingleProcess
from hvdtrain.log import report_uncaught
from hvdtrain.run.resume import take_last_state
from hvdtrain.run.script import (
    OPTIONS,
    Evaluate,
    LoopEnded,
    Script,
    ScriptTask,
    as_one,
    directed_steps,
    is_directed,
    next_loop,
    optimizer_problems,
)
from hvdtrain.run.training import Session, TrainingRun, join_session, of_this_job, training_run
from hvdtrain.run.wording import in_words_of_script
from hvdtrain.topology import Topology
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.job import Stateful
from hvdtrain.train.loop import TrainingLoop
from hvdtrain.train.state import keep_saved_weights
from hvdtrain.train.step import Step

Samples = Split | Dataset[Any] | DataLoader[Any] | Sequence[Any]
NOTHING = TensorSplit(torch.empty(0, 1), torch.empty(0, dtype=torch.int64))


class Loop:
    """The steps of a script's own loop, as a context manager.

    It hands out each step's own samples, weights the losses, reduces, audits, clips, counts, saves,
    resumes, stops on signals, evaluates and reports, and leaves the same run folder as
    `hvdtrain train`. In the context, on every rank: `for step in loop`, and for each step a pass
    over `step.batches()` with one call of `step.backward` each, then `step.update()`.
    """

    @in_words_of_script()
    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        train: Samples,
        valid: Samples | None = None,
        evaluate: Evaluate | None = None,
        *,
        metrics: Sequence[str] = (),
        valid_metrics: Sequence[str] | None = None,
        best: str = "loss",
        best_is_highest: bool = False,
        state: Sequence[Stateful] = (),
        save_frozen: bool = True,
        gathers: bool = False,
        **options: Any,
    ) -> None:
        """Check what is given; raises UsageError with every problem.

        `model`: one, or several by name; they are moved to the device of the rank, and those of
        rank 0 are broadcast. `optimizer`: one, or several, which `step.batches()` trains
        together and `step.batches(optimizer)` one by one. `train`,
        `valid`: the samples, as a split, a map-style data set, or a DataLoader, of which the
        samples, their collation and, as default for the global batch, its size are taken.
        `evaluate`: returns the Sums of a batch of `valid`, as
        `Task.evaluate` does; it is called at the end of every `eval_interval`-th epoch. `metrics`:
        names of the sums that `step.backward` is given; `valid_metrics`: of those that `evaluate`
        returns (default: `metrics`). `best`: the one by which the best checkpoint is chosen.
        `state`: objects to save and restore too, such as learning rate schedulers. `save_frozen`:
        False: checkpoints leave out parameters that are frozen (`requires_grad_(False)`), such as
        those that an adapter is for. The script makes them again at each start; a resume with other
        ones is refused. `gathers`: the loop calls `all_gather` for each batch.

        `options`: those of `hvdtrain train` by name, such as `epochs`, `global_batch_size`,
        `virtual_workers`, `clip_grad`, `amp`, `audit_every`, `output`, `experiment` (default: the
        name of the script), `seed` and `resume`. Not those of the model, the data, the optimizer
        and the learning rate, which are the script's own. The environment variable HVDTRAIN_OPTIONS
        replaces some of them, as JSON: `{"virtual_workers": 6}`.
        """
        report_uncaught()
        if isinstance(train, DataLoader) and "batch_size" not in options:
            options = {"global_batch_size": batch_size_of(train), **options}
        self._config, self._is_named = _read_options(options)
        path = Path(sys.argv[0])
        problems = []
        if (valid is None) != (evaluate is None):
            problems.append("hvdtrain.Loop: give `valid` and `evaluate` together, or none of them")
        optimizers = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
        whole = as_one(model)
        problems += optimizer_problems(whole, optimizers, state)
        loaders = [loader for loader in (train, valid) if isinstance(loader, DataLoader)]
        problems += [
            f"hvdtrain.Loop: {text}" for loader in loaders if (text := order_problem(loader))
        ]
        if not save_frozen and all(p.requires_grad for p in whole.parameters()):
            problems.append("hvdtrain.Loop: save_frozen=False: no parameter is frozen")
        names = ("loss", *(metrics if valid_metrics is None else valid_metrics))
        if best not in names:
            problems.append(f"hvdtrain.Loop: best={best!r}: choose from {', '.join(names)}")
        if problems:
            raise UsageError(*problems)
        seed = self._config.run.seed
        data = Splits(
            path.name, split_of(train, seed), NOTHING if valid is None else split_of(valid, seed)
        )
        for name, split in (("train", data.train), ("valid", data.valid)):
            if split is not NOTHING:
                check_split("hvdtrain.Loop", name, name, split)
        task = ScriptTask(evaluate, metrics, valid_metrics, best, best_is_highest)
        self._script = Script(
            path=path,
            model=whole,
            optimizers=optimizers,
            further_state=tuple(state),
            task=task,
            data=data,
            save_frozen=save_frozen,
            gathers=gathers,
        )
        self._stack = ExitStack()
        self._is_iterated = False
        self._session: Session | None = None
        self._directed: Iterator[Step] | None = None  # the steps in place of those of a training
        self._run: TrainingRun | None = None
        self._loop: TrainingLoop | None = None
        self._last: Evaluation | None = None  # of the finished run that is resumed

    def __enter__(self) -> Loop:
        """Collective: join the other workers, prepare the run, and resume it if that is wanted."""
        with ExitStack() as stack, in_words_of_script():
            self._script = replace(self._script, loop=stack.enter_context(next_loop()))
            self._directed = directed_steps(self._script)
            if self._directed is not None:
                self._stack = stack.pop_all()
                return self
            topology = Topology.from_environment()
            command = ["python", *sys.argv]
            self._session = stack.enter_context(
                join_session(self._config, topology, command, self._script)
            )
            exchange = self._session.exchange
            number = 0 if self._is_named else self._script.loop
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

    The first loop of a script has the script's name, each further one its number too; 0: the script
    has named it. A restarted job resumes the run that it has begun itself, if it has.
    """
    name, run = config.run.experiment, config.run
    run = replace(run, experiment=f"{name}-loop-{number}") if number > 1 else run
    return of_this_job(replace(config, run=run), exchange)


def _read_options(options: Mapping[str, Any]) -> tuple[TrainConfig, bool]:
    """Return the configuration of a script's options, and whether it names the run. Raises
    UsageError with every problem.
    """
    outer = os.environ.get(LOOP_OPTIONS, "{}")
    try:
        replaced = json.loads(outer)
    except ValueError:
        replaced = None
    if not isinstance(replaced, dict):
        raise UsageError(f'{LOOP_OPTIONS}={outer}: expected JSON, such as {{"virtual_workers": 6}}')
    problems = []
    if "auto" in (options.get("rank_weights"), replaced.get("rank_weights")):
        problems.append(
            "hvdtrain.Loop: rank_weights='auto': a script computes in its loop, so speeds cannot "
            "be measured before: give weights, such as '1,1,2'"
        )
    for source, names in (("hvdtrain.Loop", options), (LOOP_OPTIONS, replaced)):
        for name in names:
            if name not in OPTIONS:
                near = nearest(name, OPTIONS)
                hint = f": did you mean {near}?" if near in OPTIONS else ". See help(hvdtrain.Loop)"
                if name in train_options() or near not in (None, *OPTIONS):
                    hint = ": model, data, optimizer and learning rate are the script's own"
                problems.append(f"{source}: unknown option {name!r}{hint}")
    parsed = {}
    for name, value in {**options, **replaced}.items():
        if name in OPTIONS:
            try:
                parsed[name] = from_python(name, value)
            except ValueError as error:
                problems.append(f"hvdtrain.Loop: {error}")
    config = build_config({"experiment": Path(sys.argv[0]).stem or "script", **parsed}, problems)
    return config, "experiment" in options and "experiment" not in replaced
