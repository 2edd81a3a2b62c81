"""`hvdtrain diff`: the first difference between two runs, by their files.

What was configured, installed and read is compared first, as the likely cause; then the
traces, and without steps that both recorded, the final parameters. `hvdtrain.evidence.bisect`
computes steps again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.audit.trace import RecordDifference, first_difference
from hvdtrain.config.fields import flag_of
from hvdtrain.config.options import train_options
from hvdtrain.data.splits import difference
from hvdtrain.errors import (
    EXIT_MISMATCH,
    EXIT_OK,
    ReplayMismatch,
    UsageError,
    attempt,
    refuse,
)
from hvdtrain.evidence.bisect import bisect
from hvdtrain.evidence.replay import config_of
from hvdtrain.files import write_json
from hvdtrain.log import counted, say
from hvdtrain.records.trace_file import RecordedRun
from hvdtrain.train.checkpoint import DamagedCheckpoint, load_state

Pairs = dict[str, tuple[Any, Any]]  # two values by name
UNEXPLAINED = (
    "nothing that was recorded explains it: other code, a fault of the computation, or a changed "
    "trace"
)
LENGTH = ("epochs", "max_steps")  # by which a schedule decides what is learned


def diff(arguments: dict[str, Any]) -> int:
    """Compare two runs, print how they differ, and return the exit code. Raises UsageError."""
    one, other = runs = _read([Path(arguments[name]) for name in ("one", "other")])
    states = [_newest_state(run) for run in runs]
    around, names = Circumstances.of(runs, states), _parameter_names(runs, states)
    traces = Traces.of(one, other, names)
    if arguments["bisect"] and not traces.common:
        raise UsageError("--bisect: the runs recorded no common step: train with --trace-every")
    if arguments["bisect"] and (scripts := [run for run in runs if "script" in run.config]):
        raise UsageError(
            f"--bisect: {scripts[0].path} is the run of a script with a loop of its own, which "
            "cannot be computed next to another one. Compute each: hvdtrain replay"
        )
    configs = [config_of(run, arguments) for run in runs] if arguments["bisect"] else []
    same, verdict = _verdict(runs, around, traces)
    for letter, run in zip("AB", runs, strict=True):
        steps, records = run.summary.get("steps", 0), len(run.records)
        say(f"{letter}: {run.path}: {counted(steps, 'step')}, {counted(records, 'record')}")
    say("\n".join([*around.lines(), *traces.lines()]))
    report: dict[str, Any] = {
        "runs": [str(run.path) for run in runs],
        "same": same,
        "circumstances": asdict(around),
        "trace": asdict(traces),
        "verdict": verdict,
    }
    say(f"diff: {verdict}")
    last = traces.step or (runs[0].summary["steps"] if _same_end(runs) is False else 0)
    if configs and last > traces.agreed:
        report["bisect"] = bisect(runs, configs, traces.agreed, last)
    write_json(arguments["json"], report)
    return EXIT_OK if same else EXIT_MISMATCH


@dataclass(frozen=True)
class Circumstances:
    """The differences in what two runs recorded about themselves, as pairs of values by name."""

    options: Pairs  # that decide what is learned, by flag
    versions: Pairs  # of software and hardware
    workers: Pairs
    data: Sequence[str]  # a line for each split that differs
    virtual: bool  # the workers should not matter

    @classmethod
    def of(cls, runs: Sequence[RecordedRun], states: Sequence[Mapping[str, Any]]) -> Circumstances:
        """Compare configurations and summaries; `states`: a checkpoint of each, for the data."""
        options = train_options()
        # An option that is newer than a run had its default value.
        configs = [
            {name: option.default for name, option in options.items()} | run.config for run in runs
        ]
        scheduled = any(config["sched"] != "constant" for config in configs)
        learning = [
            name for name in options if options[name].learns or (scheduled and name in LENGTH)
        ]
        installed = [
            run.summary.get("machine", {}) | run.summary.get("versions", {}) for run in runs
        ]
        return cls(
            options={flag_of(name): pair for name, pair in _pairs(configs, learning).items()},
            versions=_pairs(installed, dict.fromkeys([*installed[0], *installed[1]])),
            workers=_pairs([run.summary for run in runs], ("world_size", "controller")),
            data=_data_lines(states),
            virtual=all(config["virtual_workers"] for config in configs),
        )

    def lines(self) -> list[str]:
        """Return what to print: what differs, and what is the same."""
        note = " (should not matter: --virtual-workers)" if self.virtual else ""
        differences = {
            "configuration": _named(self.options),
            "versions": _named(self.versions),
            "workers": [f"{text}{note}" for text in _named(self.workers)],
            "data": self.data,
        }
        lines = [f"  {kind:13}  {text}" for kind, texts in differences.items() for text in texts]
        equal = ", ".join(kind for kind, texts in differences.items() if not texts)
        return [*lines, f"  {'the same':13}  {equal}"] if equal else lines

    def reasons(self) -> list[str]:
        """Return the differences that may be the cause of others."""
        named = {"configurations": self.options, "versions": self.versions}
        reasons = [
            f"their {kind} differ in {', '.join(_named(pairs))}"
            for kind, pairs in named.items()
            if pairs
        ]
        reasons += [f"their data differ: {line}" for line in self.data]
        rounded = "without --virtual-workers other workers round differently"
        return [*reasons, rounded] if self.workers and not self.virtual else reasons


@dataclass(frozen=True)
class Traces:
    """The comparison of two traces."""

    common: Sequence[int]  # the steps that both recorded
    agreed: int  # the last one before any difference; 0: there is none
    step: int | None  # the first that differs
    parting: RecordDifference | None
    broken: Sequence[str]  # a line for each trace that was changed or cut

    @classmethod
    def of(cls, one: RecordedRun, other: RecordedRun, names: Sequence[str]) -> Traces:
        """Compare the records of each step, in order."""
        common, broken = sorted(one.by_step.keys() & other.by_step.keys()), []
        for run in (one, other):
            try:
                run.check()
            except ReplayMismatch as error:
                broken.append(str(error))
        agreed = 0
        for step in common:
            if parting := first_difference(one.by_step[step], other.by_step[step], names):
                return cls(common, agreed, step, parting, broken)
            agreed = step
        return cls(common, agreed, None, None, broken)

    def lines(self) -> list[str]:
        texts = [*self.broken]
        if self.parting:
            before = f"step {self.agreed} agrees" if self.agreed else "the first that is recorded"
            texts.append(
                f"step {self.step} differs first ({before}): {self.parting.what}: "
                f"{self.parting.text}"
            )
        elif self.common:
            steps = counted(len(self.common), "step")
            texts.append(f"all {steps} that both recorded agree, the last is step {self.agreed}")
        return [f"  {'trace':13}  {text}" for text in texts]


def _verdict(
    runs: Sequence[RecordedRun], around: Circumstances, traces: Traces
) -> tuple[bool, str]:
    """Return whether the runs are the same, and why. Raises UsageError if no record shows it."""
    ends, why = _same_end(runs), around.reasons()
    if traces.parting and traces.step:
        text = f"the runs part at step {traces.step}, in the {traces.parting.what}"
        if traces.step > traces.agreed + 1:
            text = (
                f"the runs part in one of the steps {traces.agreed + 1} to {traces.step}; at step "
                f"{traces.step} the first difference is in the {traces.parting.what}"
            )
    elif ends is False and traces.agreed == runs[0].summary["steps"]:
        text = (
            f"all recorded steps agree, to the last, step {traces.agreed}, but the final hashes "
            "(params_sha256) do not: running statistics or a moving average differ, or a summary "
            "was changed"
        )
    elif ends is False and traces.common:
        text = f"the runs part after step {traces.agreed}, the last that both recorded"
    elif ends is False:
        text = (
            "the final parameters differ; without steps that both recorded (--trace-every), the "
            "step cannot be named"
        )
    elif around.options or around.data:
        agree = f"the {counted(len(traces.common), 'step')} that both recorded agree, but "
        return False, agree * bool(traces.common) + "; ".join(why)
    elif traces.broken:
        return False, traces.broken[0]
    elif not traces.common and ends is None:
        raise UsageError(
            f"{runs[0].path} and {runs[1].path}: have no recorded steps in common (--trace-every), "
            "and did not both end at the same step, so there is nothing to compare"
        )
    else:
        recorded = f"in {counted(len(traces.common), 'recorded step')}" if traces.common else ""
        end = f"in the parameters after step {runs[0].summary['steps']}" if ends else ""
        return True, f"the runs agree bit for bit {' and '.join(filter(None, (recorded, end)))}"
    return False, f"{text}; {'; '.join(why) or UNEXPLAINED}"


def _read(paths: Sequence[Path]) -> list[RecordedRun]:
    """Return the runs. Raises UsageError with the problems of all."""
    problems: list[str] = []
    reads = (partial(RecordedRun, path, needs_trace=False) for path in paths)
    runs = [run for read in reads if (run := attempt(problems, read))]
    refuse(problems)
    return runs


def _newest_state(run: RecordedRun) -> dict[str, Any]:
    """Return what the newest good checkpoint says of parameters and data; nothing without one."""
    for _, path in sorted(run.checkpoints.items(), reverse=True):
        with suppress(DamagedCheckpoint):
            state = load_state(path)
            return {name: state.get(name) or [] for name in ("parameters", "frozen", "data")}
    return {}


def _parameter_names(runs: Sequence[RecordedRun], states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the trainable parameters, or numbers if no checkpoint has them."""
    count = max((len(run.records[0].reduced) for run in runs if run.records), default=0)
    for state in states:
        names = [name for name in state.get("parameters", ()) if name not in state["frozen"]]
        if len(names) == count:
            return names
    return [f"parameter {number}" for number in range(count)]


def _data_lines(states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each split whose number of samples, names or labels differ."""
    one, other = (state.get("data") or [] for state in states)
    if not (one and other):
        return []
    if len(one) != len(other):
        return [f"parts of {len(one)} and of {len(other)} hosts"]
    return [
        f"{part} (then: A, now: B): {changed}"
        for ours, theirs in zip(one, other, strict=True)
        for part in ("train", "valid")
        if (changed := difference(ours[part], theirs[part], None))
    ]


def _same_end(runs: Sequence[RecordedRun]) -> bool | None:
    """Return whether the final parameters agree; None if the runs ended at different steps."""
    one, other = ((run.summary.get("steps"), run.summary.get("params_sha256")) for run in runs)
    return one == other if one[0] == other[0] and one[1] and other[1] else None


def _pairs(both: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Pairs:
    """Return the values that differ, by name."""
    one, other = both
    return {
        name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)
    }


def _named(pairs: Pairs) -> list[str]:
    return [
        f"{name.replace('_', ' ')}: "
        + " and ".join("not given" if value is None else str(value) for value in pair)
        for name, pair in pairs.items()
    ]
