"""`hvdtrain replay`: recorded steps of a run, computed again on one process and compared.

A step computed again has the same bits, so the digests of its record must be found again: with
virtual workers whatever the number of workers was; without, if the order is known in which its
workers were added (see `hvdtrain.ring.orders`). If it is not, the first step after each checkpoint
can be computed again: all local gradients have the same bits, and their sums are within the bound
of rounding.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hvdtrain.audit.digests import digest_of, text_of
from hvdtrain.audit.trace import Tracer, TraceRecord, first_difference
from hvdtrain.config import TrainConfig
from hvdtrain.config.options import MAY_NAME_CODE, build_config, train_options
from hvdtrain.config.plugins import refuse_code_of
from hvdtrain.data import Shares, VirtualShares
from hvdtrain.data.splits import difference
from hvdtrain.errors import EXIT_OK, ReplayMismatch, UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.files import write_json
from hvdtrain.log import counted, say
from hvdtrain.records.machine import changes, machine
from hvdtrain.records.trace_file import RecordedRun, RecordedSegment, origin_of, segments
from hvdtrain.run.prepare import prepare
from hvdtrain.run.script import Script, run_script
from hvdtrain.run.tasks import find_source
from hvdtrain.topology import Topology
from hvdtrain.train.checkpoint import DamagedCheckpoint, load_checkpoint
from hvdtrain.train.frozen import refuse_another_base
from hvdtrain.train.job import Job
from hvdtrain.train.loop import State, steps_from
from hvdtrain.train.metering import Meter
from hvdtrain.train.simulated import SimulatedRanks
from hvdtrain.train.state import restore
from hvdtrain.train.step import Audit, Step, compute_all


@dataclass(frozen=True)
class StepChoice:
    """The recorded steps to compute again: all, a range, or some at random."""

    first: int = 1
    last: int = 2**62
    sample: int | None = None
    seed: int = 0

    def of(self, steps: Sequence[int], recorded: int) -> list[int]:
        """Return those of `steps` that are chosen. Raises UsageError if there is none.

        `steps`: that can be computed again, ascending, of so many that are `recorded`.
        """
        chosen = [step for step in steps if self.first <= step <= self.last]
        if not chosen:
            text = f"--steps={self.first}-{self.last}: none of these is recorded; recorded are "
            if len(steps) < recorded:
                text = (
                    f"none of the chosen steps can be computed again: of {recorded} recorded steps "
                    "only those after a checkpoint that is still there. Where the order is not "
                    "known in which the workers were added, it must be that of the step before. "
                    "They are "
                )
            ends = f" from {steps[0]} to {steps[-1]}" if steps else ""
            raise UsageError(f"{text}{counted(len(steps), 'step')}{ends}")
        if self.sample is not None and self.sample < len(chosen):
            chosen = sorted(random.Random(self.seed).sample(chosen, self.sample))
        return chosen


def replay(arguments: dict[str, Any], overrides: Sequence[str], choice: StepChoice) -> int:
    """Check the chain, the checkpoints and the data of a run, then compute steps again.

    `overrides`: the training options that `arguments` may replace. Returns the exit code; raises
    UsageError for a run that cannot be computed again.
    """
    run = RecordedRun(Path(arguments["source"]))
    config = config_of(run, arguments, overrides)
    if command := run.config.get("script"):
        return run_script(
            command,
            lambda script: _replay(arguments, run, config, choice, script),
            run.path,
            run.config.get("loop", 1),
        )
    exit_code: int = compute_all(_replay(arguments, run, config, choice))
    return exit_code


def _replay(
    arguments: dict[str, Any],
    run: RecordedRun,
    config: TrainConfig,
    choice: StepChoice,
    script: Script | None = None,
) -> Generator[Step, None, int]:
    """Yield the steps to compute again; return the exit code."""
    each = segments(run)
    possible = [step for stretch in each for step in stretch.computable(run.checkpoints)]
    steps = choice.of(possible, len(run.records))
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
            stretch_steps = [step for step in steps if step in stretch.steps]
            if stretch_steps:
                replayer = Replayer(run, config, stretch, script)
                yield from replayer.compare(stretch_steps, agreed)
    except ReplayMismatch as error:
        report["difference"] = str(error)
        write_json(arguments["json"], report)
        say(f"replay: {error}")
        return error.exit_code
    first = run.records[0]
    shares, parameters = len(first.batches), len(first.parameters)
    gradients = f"gradients ({counted(shares, 'share')} of {counted(parameters, 'parameter')})"
    end = ", update"
    if not all(stretch.add_alike for stretch in each):
        end = (
            "; the sums of the gradients within the bound of rounding (their order is not known, "
            "so updates could not be compared)"
        )
    say(
        f"replay: {counted(len(agreed), 'step')} agreed bit for bit: sample numbers, batches, "
        f"{gradients}{end}"
    )
    write_json(arguments["json"], report)
    return EXIT_OK


def config_of(
    run: RecordedRun, arguments: dict[str, Any], overrides: Sequence[str] = ()
) -> TrainConfig:
    """Return the run's configuration for one process. Raises UsageError if it cannot have one."""
    options = train_options()
    stored = {name: value for name, value in run.config.items() if name in options}
    explicit = {name: arguments[name] for name in overrides if arguments.get(name) is not None}
    if not arguments["trust_code"]:
        left = {f"--{name}": stored.get(name) for name in MAY_NAME_CODE if name not in explicit}
        refuse_code_of(run.path, left, run.config.get("script"))
    alone = {"resume": None, "rank_weights": None, "workers": 0}
    config = build_config(stored | alone | explicit)
    problems = []
    if config.data.data_placement != "shared":
        problems.append(
            f"--data-placement={config.data.data_placement}: its samples are on several hosts, and "
            "one process cannot read them"
        )
    several = len(run.records[0].batches) > 1
    if config.precision.sync_bn and several:
        problems.append("--sync-bn: its layers normalise over ranks, and not in one process")
    if config.precision.compression != "none" and several:
        compression = config.precision.compression
        problems.append(f"--compression={compression}: its sums are not made in one process")
    if problems:
        raise UsageError(*(f"{run.path}: {problem}" for problem in problems))
    return config


class Replayer:
    """A run's job on one process, which computes steps again from the run's checkpoints."""

    def __init__(
        self,
        run: RecordedRun,
        config: TrainConfig,
        stretch: RecordedSegment,
        script: Script | None = None,
    ) -> None:
        """Build the job. Raises ReplayMismatch if the data are not those of the run."""
        self._run, self._exchange, topology = run, SingleProcess(), Topology()
        self._stretch = stretch
        length = replace(config.schedule, max_steps=stretch.setting.total_steps, epochs=None)
        config = replace(config, schedule=length)
        source = find_source(config, self._exchange, 0, script)
        self._data, self._splits = source.fingerprints, source.data
        if run.origin != origin_of(run.config, source.fingerprints):
            raise ReplayMismatch(self._describe_origin())
        batch_size = run.config["global_batch_size"]
        job = prepare(config, batch_size, source, self._exchange, topology, script)
        torch.set_num_threads(stretch.setting.threads)
        self.job: Job = job.distributed(self._exchange)
        self._simulated: SimulatedRanks | None = None
        if stretch.ranks > 1:
            self._simulate(config.run.seed)
        self._state = self._new_state()
        self.names = [name for name, p in job.model.named_parameters() if p.requires_grad]

    def compare(self, steps: Sequence[int], agreed: list[int]) -> Iterator[Step]:
        """Compare these recorded steps with what they give now; add those that agree to `agreed`.

        Like all that computes, it yields the steps, whose passes and update the caller makes.
        Raises ReplayMismatch at the first step that is not found again.
        """
        groups: dict[int, list[int]] = {}
        for step in steps:
            groups.setdefault(self._start_of(step), []).append(step)
        recorded = {record.step: record for record in self._run.records}
        for start, group in groups.items():
            self.start_before(group[0])
            for step in group:
                (replayed,) = yield from self.records(step, step)
                bounds = self._simulated.bounds if self._simulated else None
                parting = first_difference(recorded[step], replayed, self.names, bounds)
                if parting:
                    raise ReplayMismatch(
                        f"step {step}, computed from {place_of(start)}: {parting.what}: "
                        f"{parting.text} (recorded, and computed again). "
                        + self._since(recorded, start, step)
                    )
            say(f"from {place_of(start)}: {_named(group)} agreed")
            agreed += group

    def start_before(self, step: int) -> int:
        """Continue from the nearest checkpoint before `step`, if any, and return its step, or 0.

        Raises ReplayMismatch if it is not what was written.
        """
        start = self._start_of(step)
        if start:
            self._restore(self._run.checkpoints[start])
        return start

    def records(self, first: int, last: int) -> Generator[Step, None, list[TraceRecord]]:
        """Compute up to and including step `last`; return the records from step `first` on."""
        records: list[TraceRecord] = []
        is_due = range(first, last + 1).__contains__
        setting, keeps_sums = self._stretch.setting, not self._stretch.add_alike
        tracer = Tracer(self.job, self._exchange, setting, is_due, records.append, keeps_sums)
        yield from self.advance(last, tracer)
        return records

    def advance(self, last: int, audit: Audit) -> Iterator[Step]:
        """Compute up to and including step `last`, each step with the audit."""
        state, clock = self._state, self._state.meter.clock
        for data in steps_from(self.job, state, 0):
            state.step += 1
            step = Step(self.job, self._exchange, audit, state.step, data, clock)
            yield step
            step.close()
            state.samples_seen += data.samples
            if state.step == last:
                break

    def _simulate(self, seed: int) -> None:
        """Let the job compute the shares of all ranks of the run."""
        count, job = self._stretch.ranks, self.job
        shares = VirtualShares(Shares(count, self._stretch.setting.weights), [count])
        messages, order = job.messages(self._stretch.setting.bucket_bytes), self._stretch.order
        ranks = SimulatedRanks(job.model, count, order, job.device, seed, messages)
        self._simulated = ranks
        self.job = replace(job, feed=replace(job.feed, shares=shares), workers=ranks)

    def _start_of(self, step: int) -> int:
        return max(start for start in (0, *self._run.checkpoints) if start < step)

    def _describe_origin(self) -> str:
        """Return why the trace does not begin with the run's configuration and these data."""
        for path in self._run.checkpoints.values():
            if changed := self._changed_data(_load(path)):
                return changed
        return (
            f"{self._run.path}: the trace began with another configuration, or with other data: "
            "config.yaml or the data were changed since"
        )

    def _changed_data(self, state: dict[str, Any]) -> str | None:
        """Return how the data differ from those of a checkpoint, if they do."""
        splits = {"train": self._splits.train, "valid": self._splits.valid}
        for part, split in splits.items():
            if changed := difference(state["data"][0][part], self._data[0][part], split):
                return f"the {part} data are not those of the run: {changed}"
        return None

    def _since(self, recorded: dict[int, TraceRecord], start: int, step: int) -> str:
        """Return which steps may have caused a difference at `step`."""
        before = max([start, *(earlier for earlier in recorded if start <= earlier < step)])
        if before == step - 1:
            return "The steps before it agree"
        return f"The cause may be in any step from {before + 1} on: those between are not recorded"

    def _restore(self, path: Path) -> None:
        """Continue from a checkpoint. Raises ReplayMismatch if it is not what was written."""
        state = _load(path)
        if changed := self._changed_data(state):
            raise ReplayMismatch(changed)
        refuse_another_base(state, self.job.model)
        for line in changes(state["progress"].get("machine", {}), machine(self.job.device)):
            say(f"replay: {line}: bits may differ")
        self._state = self._new_state()
        restore(state, self.job, self._state)

    def _new_state(self) -> State:
        job = self.job
        return State(Meter(self._exchange, job.sampler.samples, job.task.metrics))


def check_checkpoints(run: RecordedRun) -> None:
    """Raise ReplayMismatch unless each checkpoint of a recorded step has the parameters of its
    record, in the state to resume from and, without a moving average, in its weights.
    """
    records = {record.step: record for record in run.records}
    for step, path in run.checkpoints.items():
        if step not in records:
            continue
        weights, state = _load_all(path)
        names = [name for name in state["parameters"] if name not in state["frozen"]]
        for held in (state["model"], *([weights] if not state["update"]["average"] else [])):
            actual = [text_of(digest_of(held[name])) for name in names]
            pairs = zip(names, actual, records[step].parameters, strict=True)
            if wrong := [name for name, digest, recorded in pairs if digest != recorded]:
                raise ReplayMismatch(
                    f"{path}: {wrong[0]} ({len(wrong)} of {len(actual)} parameters) is not that of "
                    f"the record of step {step}"
                )


def _load(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint. Raises ReplayMismatch if it is not what was written."""
    return _load_all(path)[1]


def _load_all(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        return load_checkpoint(path)
    except DamagedCheckpoint as error:
        raise ReplayMismatch(str(error)) from error


def _named(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:8])) + (f", ... {steps[-1]}" if steps[8:] else "")
    return f"{counted(len(steps), 'step')} ({shown})"


def place_of(start: int) -> str:
    """Return the name of the place that a replay starts from."""
    return f"the checkpoint of step {start}" if start else "the beginning"
