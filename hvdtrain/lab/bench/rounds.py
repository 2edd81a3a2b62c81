"""Rounds of contestants, one after the other, and what all benches are given."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from hvdtrain.data.feeding import StepData
from hvdtrain.errors import TrainingError
from hvdtrain.evidence.children import ChildFailure, guarded
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.gpus import synchronize
from hvdtrain.lab.bench.ratios import Ratio
from hvdtrain.lab.bench.saving import Used
from hvdtrain.launcher.processes import StopRequests
from hvdtrain.train.job import Job

WARM_UP_STEPS = 5
ENDLESS = 2**62  # steps
Key = TypeVar("Key")
Found = TypeVar("Found")


def plan_of(kind: type[Found], arguments: Mapping[str, Any]) -> Found:
    """Return the dataclass `kind`, whose fields are all among the arguments."""
    return kind(**{name: arguments[name] for name in kind.__annotations__})


@contextmanager
def scratch_folder(bench: str) -> Iterator[Path]:
    """Yield a folder for jobs, and end whatever is started within this context.

    A signal raises Stopped. Raises TrainingError for a ChildFailure.
    """
    StopRequests()
    with guarded(), tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        try:
            yield Path(folder)
        except ChildFailure as failure:
            raise TrainingError(f"bench {bench}: {failure}") from failure


def in_turn(contestants: Sequence[Key], number: int) -> Sequence[Key]:
    """Return the order of a round; every other one is reversed, to balance who follows whom."""
    return contestants if number % 2 == 0 else contestants[::-1]


def measure(
    contestants: Sequence[Key],
    rounds: int,
    run: Callable[[Key, Path], Found],
    folder: Path,
    report: Callable[[str], None],
) -> dict[Key, list[Found]]:
    """Run one contestant after the other; return results by contestant and round.

    Raises ChildFailure as `run`, which receives a new folder.
    """
    results: dict[Key, list[Found]] = {contestant: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in in_turn(contestants, number):
            run_folder = folder / f"{number}-{contestants.index(contestant)}"
            run_folder.mkdir(mode=0o700)
            results[contestant].append(run(contestant, run_folder))
            report(f"round {number + 1}: {contestant}: {results[contestant][-1]}")
    return results


@dataclass(frozen=True)
class Options:
    """Options of the benches within one job; each uses those that apply to it."""

    rounds: int
    steps: int  # per round
    model: str
    batch_size: int  # per worker
    megabytes: float
    virtual_workers: int | None = None
    device: str = "cpu"  # torch's name of this rank's device


@dataclass(frozen=True)
class Measured:
    """The results of a bench within one job."""

    seconds_per_step: dict[str, list[float]]  # by contestant and round
    ratios: dict[str, Ratio]
    megabytes: float | None = None  # summed in a step
    used: Mapping[str, Used] = field(default_factory=dict)  # by process, for a checkpoint


def run_rounds(
    contestants: Mapping[str, Callable[[], object]], options: Options, exchange: Exchange
) -> dict[str, list[float]]:
    """Collective: return the seconds per step on the slowest rank, by contestant and round.

    A step counts when the device has done all of it.
    """
    device, steps = torch.device(options.device), options.steps
    for step in contestants.values():
        # All ranks begin together: sums of the contestant before, in progress still, have the same
        # names.
        exchange.all_gather_object(None, "hvdtrain.bench.warm_up")
        for _ in range(WARM_UP_STEPS):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(options.rounds):
        for name in in_turn([*contestants], number):
            step = contestants[name]
            exchange.all_gather_object(None, "hvdtrain.bench.start")
            synchronize(device)
            started = time.perf_counter()
            for _ in range(steps):
                step()
            synchronize(device)
            step_s = (time.perf_counter() - started) / steps
            seconds[name].append(max(exchange.all_gather_object(step_s, "hvdtrain.bench.end")))
    return seconds


def endless_steps(job: Job, rank: int) -> Iterator[StepData]:
    """Yield the data of one step after the other."""
    for epoch in itertools.count():
        yield from job.feed.epoch(epoch * job.sampler.samples, job.total_steps, rank)
