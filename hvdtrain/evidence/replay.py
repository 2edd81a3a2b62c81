"""`hvdtrain replay`: recorded steps of a run, computed again on one process and compared.

A step computed again has the same bits, so the digests of its record must be found again: with
virtual workers whatever the number of workers was; without, if the order is known in which its
workers were added (see `hvdtrain.ring.orders`). If it is not, the first step after each checkpoint
can be computed again: all local gradients have the same bits, and their sums are within the bound
of rounding.
"""

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hvdtrain.audit.digests import digest_of, text_of
from hvdtrain.audit.trace import Tracer, TraceRecord, first_difference
from hvdtrain.config import TrainConfig
from hvdtrain.config.options import (
    MAY_NAME_CODE,
    build_config,
    explicit_options,
    train_options,
)
from hvdtrain.config.plugins import refuse_code_of
from hvdtrain.data import Shares, VirtualShares
from hvdtrain.data.splits import difference
from hvdtrain.errors import EXIT_OK, ReplayMismatch, UsageError, every_problem, refuse
from hvdtrain.exchange import SingleProcess
from hvdtrain.files import write_json
from hvdtrain.log import counted, say
from hvdtrain.records.provenance import changes, machine
from hvdtrain.records.trace_file import RecordedRun, RecordedSegment, origin_of, segments
from hvdtrain.run.prepare import prepare
from hvdtrain.run.script import Script, run_script
from hvdtrain.run.tasks import find_source
from hvdtrain.topology import Topology
from hvdtrain.train.built import refuse_another_base
from hvdtrain.train.checkpoint import DamagedCheckpoint, load_checkpoint
from hvdtrain.train.interfaces import Audit
from hvdtrain.train.job import Job
from hvdtrain.train.loop import steps_from
from hvdtrain.train.metering import Meter
from hvdtrain.train.progress import State
from hvdtrain.train.simulated import SimulatedRanks
from hvdtrain.train.state import restore
from hvdtrain.train.step import Step, compute_all

ROUNDED = (
    "; the sums of the gradients within the bound of rounding (their order is not known, so "
    "updates could not be compared)"
)


def replay(arguments: dict[str, Any], overrides: Sequence[str], span: range) -> int:
    """Check the chain, the checkpoints and the data of a run, then compute steps again.

    `overrides`: the training options that `arguments` may replace. `span`: the steps from which to
    choose. Returns the exit code; raises UsageError for a run that cannot be computed again.
    """
    run = RecordedRun(Path(arguments["source"]))
    config = config_of(run, arguments, overrides)
    if command := run.config.get("script"):
        return run_script(
            command,
            lambda script: _replay(arguments, run, config, span, script),
            run.path,
            run.config.get("loop", 1),
        )
    exit_code: int = compute_all(_replay(arguments, run, config, span))
    return exit_code


def _replay(
    arguments: dict[str, Any],
    run: RecordedRun,
    config: TrainConfig,
    span: range,
    script: Script | None = None,
) -> Generator[Step, None, int]:
    """Yield the steps to compute again; return the exit code."""
    each = segments(run)
    possible = [step for stretch in each for step in stretch.computable(run.checkpoints)]
    steps = _chosen(possible, len(run.records), span)
    if arguments["sample"] is not None and arguments["sample"] < len(steps):
        steps = sorted(random.Random(arguments["seed"]).sample(steps, arguments["sample"]))
    agreed: list[int] = []
    report: dict[str, Any] = {"run": str(run.path), "steps": agreed, "difference": None}
    try:
        run.check()
        say(
            f"replay: {run.path}: {counted(len(run.records), 'record')}, to step "
            f"{run.records[-1].step}: an unbroken chain"
        )
        check_checkpoints(run)
        for stretch in each:
            if within := [step for step in steps if step in stretch.steps]:
                yield from Replayer(run, config, stretch, script).compare(within, agreed)
    except ReplayMismatch as error:
        report["difference"] = str(error)
        write_json(arguments["json"], report)
        say(f"replay: {error}")
        return error.exit_code
    first = run.records[0]
    say(
        f"replay: {counted(len(agreed), 'step')} agreed bit for bit: sample numbers, batches, "
        f"gradients ({counted(len(first.batches), 'share')} of "
        f"{counted(len(first.parameters), 'parameter')})"
        f"{', update' if all(stretch.add_alike for stretch in each) else ROUNDED}"
    )
    write_json(arguments["json"], report)
    return EXIT_OK


def _chosen(steps: Sequence[int], recorded: int, span: range) -> list[int]:
    """Return those of `steps` that are in `span`. Raises UsageError if there is none.

    `steps`: that can be computed again, ascending, of so many that are `recorded`.
    """
    if chosen := [step for step in steps if step in span]:
        return chosen
    text = f"--steps={span.start}-{span.stop - 1}: none of these is recorded; recorded are "
    if len(steps) < recorded:
        text = (
            f"none of the chosen steps can be computed again: of {recorded} recorded steps only "
            "those after a checkpoint that is still there. Where the order is not known in which "
            "the workers were added, it must be that of the step before. They are "
        )
    ends = f" from {steps[0]} to {steps[-1]}" if steps else ""
    raise UsageError(f"{text}{counted(len(steps), 'step')}{ends}")


def config_of(
    run: RecordedRun, arguments: dict[str, Any], overrides: Sequence[str] = ()
) -> TrainConfig:
    """Return the run's configuration for one process. Raises UsageError if it cannot have one."""
    options = train_options()
    stored = {name: value for name, value in run.config.items() if name in options}
    explicit = explicit_options(arguments, overrides)
    if not arguments["trust_code"]:
        left = {f"--{name}": stored.get(name) for name in MAY_NAME_CODE if name not in explicit}
        refuse_code_of(run.path, left, run.config.get("script"))
    alone = {"resume": None, "rank_weights": None, "workers": 0}
    config = build_config(explicit, recorded=stored | alone)
    placement, precision = config.data.data_placement, config.precision
    several = len(run.records[0].batches) > 1
    problems = every_problem(
        (
            placement != "shared",
            f"--data-placement={placement}: its samples are on several hosts, and one process "
            "cannot read them",
        ),
        (
            several and precision.sync_bn,
            "--sync-bn: its layers normalise over ranks, and not in one process",
        ),
        (
            several and precision.compression != "none",
            f"--compression={precision.compression}: its sums are not made in one process",
        ),
    )
    refuse(f"{run.path}: {problem}" for problem in problems)
    return config


class Replayer:
    """A run's job on one process, which computes steps again from the run's checkpoints.

    `start_before` chooses the checkpoint, before any step is computed.
    """

    def __init__(
        self,
        run: RecordedRun,
        config: TrainConfig,
        stretch: RecordedSegment,
        script: Script | None = None,
    ) -> None:
        """Build the job. Raises ReplayMismatch if the data are not those of the run."""
        self._run, self._stretch, self._exchange = run, stretch, SingleProcess()
        config = replace(
            config,
            schedule=replace(config.schedule, max_steps=stretch.setting.total_steps, epochs=None),
        )
        source = find_source(config, self._exchange, 0, script)
        self._data, self._splits = source.fingerprints, source.data
        if run.origin != origin_of(run.config, source.fingerprints):
            states = (_load(path)[1] for path in run.checkpoints.values())
            changed = next(filter(None, map(self._changed_data, states)), None)
            raise ReplayMismatch(
                changed
                or f"{run.path}: the trace began with another configuration, or with other data: "
                "config.yaml or the data were changed since"
            )
        job = prepare(
            config, run.config["global_batch_size"], source, self._exchange, Topology(), script
        )
        torch.set_num_threads(stretch.setting.threads)
        job = job.distributed(self._exchange)
        if (count := stretch.ranks) > 1:  # the job computes the shares of all of them
            messages = job.messages(stretch.setting.bucket_bytes)
            ranks = SimulatedRanks(
                job.model, count, stretch.order, job.device, config.run.seed, messages
            )
            shares = VirtualShares(Shares(count, stretch.setting.weights), [count])
            job = replace(job, feed=replace(job.feed, shares=shares), workers=ranks)
        self.job: Job = job
        self.names = [name for name, p in job.model.named_parameters() if p.requires_grad]

    def compare(self, steps: Sequence[int], agreed: list[int]) -> Iterator[Step]:
        """Compare these recorded steps with what they give now; add those that agree to `agreed`.

        Like all that computes, it yields the steps, whose passes and update the caller makes.
        Raises ReplayMismatch at the first step that is not found again.
        """
        groups: dict[int, list[int]] = {}
        for step in steps:
            groups.setdefault(self._run.start_before(step), []).append(step)
        for start, group in groups.items():
            self.start_before(group[0])
            for step in group:
                (replayed,) = yield from self.records(step, step)
                recorded, workers = self._run.by_step[step], self.job.workers
                bounds = workers.bounds if isinstance(workers, SimulatedRanks) else None
                if parting := first_difference(recorded, replayed, self.names, bounds):
                    raise ReplayMismatch(
                        f"step {step}, computed from {place_of(start)}: {parting.what}: "
                        f"{parting.text} (recorded, and computed again). {self._since(start, step)}"
                    )
            listed = ", ".join(map(str, group[:8])) + (f", ... {group[-1]}" if group[8:] else "")
            say(f"from {place_of(start)}: {counted(len(group), 'step')} ({listed}) agreed")
            agreed += group

    def start_before(self, step: int) -> int:
        """Continue from the nearest checkpoint before `step`, if any, and return its step, or 0.

        Raises ReplayMismatch if it is not what was written.
        """
        start, job = self._run.start_before(step), self.job
        self._state = State(Meter(self._exchange, job.sampler.samples, job.task.metrics))
        if start:
            _, state = _load(self._run.checkpoints[start])
            if changed := self._changed_data(state):
                raise ReplayMismatch(changed)
            refuse_another_base(state, job.model)
            for line in changes(state["progress"].get("machine", {}), machine(job.device)):
                say(f"replay: {line}: bits may differ")
            restore(state, job, self._state)
        return start

    def records(self, first: int, last: int) -> Generator[Step, None, list[TraceRecord]]:
        """Compute up to and including step `last`; return the records from step `first` on."""
        records: list[TraceRecord] = []
        is_due, stretch = range(first, last + 1).__contains__, self._stretch
        yield from self.advance(
            last,
            Tracer(
                self.job,
                self._exchange,
                stretch.setting,
                is_due,
                records.append,
                keeps_sums=not stretch.add_alike,
            ),
        )
        return records

    def advance(self, last: int, audit: Audit) -> Iterator[Step]:
        """Compute up to and including step `last`, each step with the audit."""
        state, clock = self._state, self._state.meter.clock
        for data in steps_from(self.job, state, self._exchange):
            state.step += 1
            step = Step(self.job, self._exchange, audit, state.step, data, clock)
            yield step
            step.close()
            state.samples_seen += data.samples
            if state.step == last:
                break

    def _changed_data(self, state: dict[str, Any]) -> str | None:
        """Return how the data differ from those of a checkpoint, if they do."""
        for part, split in (("train", self._splits.train), ("valid", self._splits.valid)):
            if changed := difference(state["data"][0][part], self._data[0][part], split):
                return f"the {part} data are not those of the run: {changed}"
        return None

    def _since(self, start: int, step: int) -> str:
        """Return which steps may have caused a difference at `step`."""
        before = max([start, *(earlier for earlier in self._run.by_step if earlier < step)])
        if before == step - 1:
            return "The steps before it agree"
        return f"The cause may be in any step from {before + 1} on: those between are not recorded"


def check_checkpoints(run: RecordedRun) -> None:
    """Raise ReplayMismatch unless each checkpoint of a recorded step has the parameters of its
    record, in the state to resume from and, without a moving average, in its weights.
    """
    for step in sorted(run.checkpoints.keys() & run.by_step.keys()):
        path = run.checkpoints[step]
        weights, state = _load(path)
        names = [name for name in state["parameters"] if name not in state["frozen"]]
        for held in (state["model"], *([weights] if not state["update"]["average"] else [])):
            actual = [text_of(digest_of(held[name])) for name in names]
            pairs = zip(names, actual, run.by_step[step].parameters, strict=True)
            if wrong := [name for name, digest, recorded in pairs if digest != recorded]:
                raise ReplayMismatch(
                    f"{path}: {wrong[0]} ({len(wrong)} of {len(actual)} parameters) is not that of "
                    f"the record of step {step}"
                )


def _load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return weights and state of a checkpoint. Raises ReplayMismatch if it was changed."""
    try:
        return load_checkpoint(path)
    except DamagedCheckpoint as error:
        raise ReplayMismatch(str(error)) from error


def place_of(start: int) -> str:
    """Return the name of the place that a replay starts from."""
    return f"the checkpoint of step {start}" if start else "the beginning"
