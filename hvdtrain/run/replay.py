"""`hvdtrain replay`: recorded steps of a run, computed again on one process and compared.

A step computed again has the same bits, so the digests of its record must be found again: with
virtual workers whatever the number of workers was; without, if the order is known in which its
workers were added (see `hvdtrain.ring.orders`). If it is not, the first step after each checkpoint
can be computed again: all local gradients have the same bits, and their sums are within the bound
of rounding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hvdtrain.audit.digests import digest_of, text_of
from hvdtrain.audit.trace import Tracer, TraceRecord, first_difference
from hvdtrain.config import TrainConfig
from hvdtrain.config.options import MAY_NAME_CODE, build_config, train_options
from hvdtrain.data import Shares, VirtualShares
from hvdtrain.data.splits import difference
from hvdtrain.errors import EXIT_OK, ReplayMismatch, UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.files import write_json
from hvdtrain.log import counted, say
from hvdtrain.plugins import refuse_code_of
from hvdtrain.ring.orders import KNOWN_ORDERS, KnownOrder
from hvdtrain.run.machine import changes, machine
from hvdtrain.run.prepare import prepare
from hvdtrain.run.tasks import find_source
from hvdtrain.run.trace_file import RecordedRun, origin_of
from hvdtrain.topology import Topology
from hvdtrain.train.checkpoint import DamagedCheckpoint, load_checkpoint
from hvdtrain.train.job import Job
from hvdtrain.train.loop import Audit, State, steps_from, train_step
from hvdtrain.train.metering import Meter
from hvdtrain.train.simulated import SimulatedRanks
from hvdtrain.train.state import restore


@dataclass(frozen=True)
class Choice:
    """The recorded steps to compute again: all, a range, or some at random."""

    first: int = 1
    last: int = 2**62
    sample: int | None = None
    seed: int = 0

    def of(self, steps: Sequence[int], recorded: int) -> list[int]:
        """Return those of `steps` that are chosen. Raises UsageError if there is none.

        `steps`: that can be computed again, ascending, of so many that are `recorded`.
        """
        found = [step for step in steps if self.first <= step <= self.last]
        if not found:
            text = f"--steps={self.first}-{self.last}: none of these is recorded; recorded are "
            if len(steps) < recorded:
                text = (
                    f"none of the chosen steps can be computed again: of {recorded} recorded steps "
                    "only those after the beginning, or a checkpoint that is still there, as the "
                    "order is not known in which the workers were added. They are "
                )
            ends = f" from {steps[0]} to {steps[-1]}" if steps else ""
            raise UsageError(f"{text}{counted(len(steps), 'step')}{ends}")
        if self.sample is not None and self.sample < len(found):
            found = sorted(random.Random(self.seed).sample(found, self.sample))
        return found


def replay(arguments: dict[str, Any], overrides: Sequence[str], choice: Choice) -> int:
    """Check the chain, the checkpoints and the data of a run, then compute steps again.

    `overrides`: the training options that `arguments` may replace. Returns the exit code; raises
    UsageError for a run that cannot be computed again.
    """
    run = RecordedRun(Path(arguments["source"]))
    config = config_of(run, arguments, overrides)
    ranks = Ranks.of(run)
    steps = choice.of(ranks.computable(run), len(run.records))
    agreed: list[int] = []
    report: dict[str, Any] = {"run": str(run.path), "steps": agreed, "difference": None}
    try:
        run.check()
        say(
            f"replay: {run.path}: {counted(len(run.records), 'record')}, to step "
            f"{run.records[-1].step}: an unbroken chain"
        )
        replayer = Replayer(run, config)
        for line, found in replayer.compare(steps):
            say(line)
            agreed += found
    except ReplayMismatch as error:
        report["difference"] = str(error)
        write_json(arguments["json"], report)
        say(f"replay: {error}")
        return error.exit_code
    shares, names = len(run.records[0].batches), replayer.names
    gradients = f"gradients ({counted(shares, 'share')} of {counted(len(names), 'parameter')})"
    end = ", update"
    if not ranks.add_alike:
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


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run that one process must compute as they did; 1: as a single one does."""

    count: int = 1
    order: KnownOrder | None = None  # of their sums, if it is known

    @classmethod
    def of(cls, run: RecordedRun) -> Ranks:
        """Return the ranks of a run. Raises UsageError if their number changed during the run."""
        if run.config.get("virtual_workers") is not None:
            return cls()
        first = len(run.records[0].batches)
        for record in run.records:
            if len(record.batches) != first:
                raise UsageError(
                    f"{run.path}: trained on {first} workers, and from step {record.step} on "
                    f"{len(record.batches)}: without --virtual-workers such a run cannot be "
                    "computed again"
                )
        order = KNOWN_ORDERS["Open MPI's ring"] if first == 2 else None  # a + b = b + a
        return cls(first, order or KNOWN_ORDERS.get(run.summary.get("summation_order") or ""))

    @property
    def add_alike(self) -> bool:
        """Return whether one process can add the gradients to the same bits."""
        return self.count == 1 or self.order is not None

    def computable(self, run: RecordedRun) -> list[int]:
        """Return the recorded steps that can be computed again."""
        after = {0, *run.checkpoints}
        steps = [record.step for record in run.records]
        return [step for step in steps if self.add_alike or step - 1 in after]


def config_of(
    run: RecordedRun, arguments: dict[str, Any], overrides: Sequence[str] = ()
) -> TrainConfig:
    """Return the run's configuration for one process. Raises UsageError if it cannot have one."""
    known = train_options()
    stored = {name: value for name, value in run.config.items() if name in known}
    given = {name: arguments[name] for name in overrides if arguments.get(name) is not None}
    if not arguments["trust_code"]:
        left = {f"--{name}": stored.get(name) for name in MAY_NAME_CODE if name not in given}
        refuse_code_of(run.path, left)
    alone = {"resume": None, "rank_weights": None, "device": "auto", "workers": 0}
    config = build_config(stored | alone | given)
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

    def __init__(self, run: RecordedRun, config: TrainConfig) -> None:
        """Build the job. Raises ReplayMismatch if the data are not those of the run."""
        self._run, self._exchange, topology = run, SingleProcess(), Topology()
        self._ranks = Ranks.of(run)
        source = find_source(config, self._exchange, 0)
        self._data, self._splits = source.fingerprints, source.data
        if run.origin != origin_of(run.config, source.fingerprints):
            raise ReplayMismatch(self._describe_origin())
        batch_size = run.config["global_batch_size"]
        job = prepare(config, batch_size, source, self._exchange, topology)
        if threads := run.summary.get("machine", {}).get("compute_threads"):
            torch.set_num_threads(int(threads))
        self.job: Job = job.distributed(self._exchange)
        self._simulated: SimulatedRanks | None = None
        if self._ranks.count > 1:
            self._simulate(config)
        self._state = self._new_state()
        self.names = [name for name, it in job.model.named_parameters() if it.requires_grad]

    def compare(self, steps: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """Compute these recorded steps again; yield a line and the steps for each checkpoint used.

        Raises ReplayMismatch at the first step that is not found again.
        """
        groups: dict[int, list[int]] = {}
        for step in steps:
            groups.setdefault(self._start_of(step), []).append(step)
        recorded = {record.step: record for record in self._run.records}
        for start, own in groups.items():
            self.start_before(own[0])
            for step in own:
                (found,) = self.records(step, step)
                bounds = self._simulated.bounds if self._simulated else None
                parting = first_difference(recorded[step], found, self.names, bounds)
                if parting:
                    raise ReplayMismatch(
                        f"step {step}, computed from {place_of(start)}: {parting.what}: "
                        f"{parting.text} (recorded, and computed again). "
                        + self._since(recorded, start, step)
                    )
            yield f"from {place_of(start)}: {_named(own)} agreed", own

    def start_before(self, step: int) -> int:
        """Continue from the nearest checkpoint before `step`, if any, and return its step, or 0.

        Raises ReplayMismatch if it is not what was written.
        """
        start = self._start_of(step)
        if start:
            self._restore(self._run.checkpoints[start])
        return start

    def records(self, first: int, last: int) -> list[TraceRecord]:
        """Compute up to and including step `last`; return the records from step `first` on."""
        found: list[TraceRecord] = []
        is_due = range(first, last + 1).__contains__
        keeps_sums = not self._ranks.add_alike
        self.advance(last, Tracer(self.job, self._exchange, is_due, found.append, keeps_sums))
        return found

    def advance(self, last: int, audit: Audit) -> None:
        """Compute up to and including step `last`, each step with the audit."""
        state, clock = self._state, self._state.meter.clock
        for data in steps_from(self.job, state, 0):
            state.step += 1
            train_step(self.job, self._exchange, audit, state.step, data, clock)
            state.samples_seen += data.samples
            if state.step == last:
                break

    def _simulate(self, config: TrainConfig) -> None:
        """Let the job compute the shares of all ranks of the run."""
        count, job = self._ranks.count, self.job
        batch = replace(config.batch, rank_weights=self._run.config.get("rank_weights"))
        shares = VirtualShares(Shares(count, batch.weights(count)), [count])
        ranks = SimulatedRanks(job.model, count, self._ranks.order, job.device, config.run.seed)
        self._simulated = ranks
        self.job = replace(job, feed=replace(job.feed, shares=shares), workers=ranks)

    def _start_of(self, step: int) -> int:
        return max(it for it in (0, *self._run.checkpoints) if it < step)

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
        before = max([start, *(it for it in recorded if start <= it < step)])
        if before == step - 1:
            return "The steps before it agree"
        return f"The cause may be in any step from {before + 1} on: those between are not recorded"

    def _restore(self, path: Path) -> None:
        """Continue from a checkpoint. Raises ReplayMismatch if it is not what was written."""
        state = _load(path)
        self._compare_with_record(path, state)
        if changed := self._changed_data(state):
            raise ReplayMismatch(changed)
        for line in changes(state["progress"].get("machine", {}), machine()):
            say(f"replay: {line}: bits may differ")
        if self._simulated and len(state["ranks"]) != self._ranks.count:
            raise UsageError(
                f"{path}: of {len(state['ranks'])} workers, but the trace is of "
                f"{self._ranks.count}: without --virtual-workers it cannot be computed again"
            )
        self._state = self._new_state()
        restore(state, self.job, self._state)

    def _compare_with_record(self, path: Path, state: dict[str, Any]) -> None:
        """Raise ReplayMismatch unless a checkpoint has the parameters of its step's record."""
        record = next((it for it in self._run.records if it.step == state["step"]), None)
        if record is None:
            return
        own = [text_of(digest_of(state["model"][name])) for name in self.names]
        pairs = zip(self.names, own, record.parameters, strict=True)
        if names := [name for name, found, recorded in pairs if found != recorded]:
            raise ReplayMismatch(
                f"{path}: {names[0]} ({len(names)} of {len(own)} parameters) is not that of the "
                f"record of step {record.step}"
            )

    def _new_state(self) -> State:
        job = self.job
        return State(Meter(self._exchange, job.sampler.samples, job.task.metrics))


def _load(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint. Raises ReplayMismatch if it is not what was written."""
    try:
        return load_checkpoint(path)[1]
    except DamagedCheckpoint as error:
        raise ReplayMismatch(str(error)) from error


def _named(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:8])) + (f", ... {steps[-1]}" if steps[8:] else "")
    return f"{counted(len(steps), 'step')} ({shown})"


def place_of(start: int) -> str:
    """Return the name of the place that a replay starts from."""
    return f"the checkpoint of step {start}" if start else "the beginning"
