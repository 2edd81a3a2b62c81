"""`hvdtrain bench network`: the time of a step over several hosts with links of a chosen speed.

The hosts are made of namespaces on this machine (`hvdtrain.lab.hosts`), with one or more workers on
each. Every contestant has hosts of its own, which compute and send in turns, while those of the
others are stopped. What the network alone would take is computed: a ring of H hosts sends
2 (H - 1) / H of the bytes of the gradients over each link, in each direction. One of all N workers
sends 2 (N - 1) / N of them.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvdtrain.data.builtin import read_spec
from hvdtrain.errors import EXIT_FAILED, EXIT_OK, UsageError
from hvdtrain.evidence.children import ONE_THREAD, Child
from hvdtrain.files import write_json
from hvdtrain.lab.bench import contestants, jobs, ratios, rounds, turns
from hvdtrain.lab.bench.contestants import DDP, LIMIT, OURS, BareLoop, ScalingCase
from hvdtrain.lab.bench.ratios import Ratio, median, ratio_within_rounds
from hvdtrain.lab.bench.scaling import (
    LOG_INTERVALS,
    OTHER_LOG_INTERVAL,
    cpu_table,
    examine,
)
from hvdtrain.lab.bench.turns import PausableJob, Results, TurnJob
from hvdtrain.lab.hosts.network import INTERFACE, HostNetwork, why_not
from hvdtrain.lab.hosts.node import HostProcess
from hvdtrain.launcher.horovodrun import (
    HorovodrunOptions,
    horovodrun_argv,
    horovodrun_environment,
    mpi_prefix,
    settings_for,
)
from hvdtrain.log import counted, say
from hvdtrain.models import build_model

GLOO, MPI = f"{OURS} gloo", f"{OURS} mpi"
CONTESTANTS = (GLOO, MPI, DDP, LIMIT)
LOGGED_S = 0.5  # a slow exchange is logged more often than this
START_TIMEOUT_S = 60
HEADINGS = (
    *("model", "hosts", "N", "Gbit/s", "MB sent"),
    *(f"{name}, ms" for name in CONTESTANTS),
    "network alone, ms",
    *(f"{name} / {DDP} (middle half)" for name in (GLOO, MPI)),
)


@dataclass(frozen=True)
class NetworkCase:
    """A case on several hosts; all contestants have the same."""

    work: ScalingCase
    workers_per_host: int
    gbit_per_s: float  # of each host's link, in each direction

    def __str__(self) -> str:
        return f"{self.work}, {counted(self.hosts, 'host')}, {self.gbit_per_s:g} Gbit/s"

    @property
    def hosts(self) -> int:
        """The number of hosts, each of which the workers fill."""
        return self.work.workers // self.workers_per_host


@dataclass(frozen=True)
class NetworkPlan:
    """Configuration of `hvdtrain bench network`."""

    models: Mapping[str, int]  # samples per worker, by model
    workers: tuple[int, ...]
    workers_per_host: int
    gbit_per_s: tuple[float, ...]
    rounds: int
    turn_s: float
    time_limit_s: float  # of each case

    def cases(self) -> list[NetworkCase]:
        """Return all cases, in the order of running."""
        cases = []
        for model, workers, speed in itertools.product(self.models, self.workers, self.gbit_per_s):
            hosts = workers // self.workers_per_host
            alone_s = seconds_alone(gradient_bytes(model), hosts, speed)
            most = LOG_INTERVALS.get(model, OTHER_LOG_INTERVAL)
            interval = max(1, min(most, math.floor(LOGGED_S / alone_s))) if alone_s else most
            work = ScalingCase(model, workers, self.models[model] * workers, interval)
            cases.append(NetworkCase(work, self.workers_per_host, speed))
        return cases


def gradient_bytes(model: str) -> int:
    """Return the size of a model's gradients in float32. Raises UsageError for an unknown model."""
    shape, classes, _ = read_spec(contestants.DATA)
    return 4 * sum(
        parameter.numel()
        for parameter in build_model(model, shape, classes, torch.float32).parameters()
    )


def seconds_alone(size_bytes: int, hosts: int, gbit_per_s: float) -> float:
    """Return how long a ring of hosts takes to reduce so many bytes, if only the links limit it."""
    return sent_bytes(size_bytes, hosts) * 8 / (gbit_per_s * 1e9)


def sent_bytes(size_bytes: int, hosts: int) -> float:
    """Return the bytes that each host of a ring sends to reduce `size_bytes`."""
    return 2 * (hosts - 1) / hosts * size_bytes


def run(arguments: dict[str, Any]) -> int:
    """Measure all cases, in turns; return the exit code, 1 where some have failed."""
    plan = rounds.plan_of(NetworkPlan, arguments)
    if reason := why_not():
        raise UsageError(f"bench network: {reason}")
    examine(plan.models, [])
    examine(plan.models, [case.work for case in plan.cases()])
    with rounds.scratch_folder("network") as folder:
        starter = NetworkStarter(plan.time_limit_s)
        results = turns.measure_cases(plan.cases(), starter, plan, folder, say)
    say(table(plan, results))
    say(cpu_table(results, lambda case: case.work))
    write_json(arguments["json"], as_json(plan, results))
    results.raise_if_stopped()
    return EXIT_FAILED if results.problems else EXIT_OK


@dataclass(frozen=True)
class NetworkStarter:
    """A starter of contestants."""

    time_limit_s: float

    def __call__(self, case: NetworkCase, folder: Path) -> dict[str, Callable[[], PausableJob]]:
        """Return what starts each contestant of a case, and raises ChildFailure."""
        return {name: partial(self._start, case, name, folder / name) for name in CONTESTANTS}

    def _start(self, case: NetworkCase, name: str, folder: Path) -> PausableJob:
        deadline_s = time.monotonic() + self.time_limit_s
        folder.mkdir(mode=0o700)
        with ExitStack() as stack:
            network = HostNetwork(
                [case.workers_per_host] * case.hosts, folder / "hosts", visible=[folder]
            )
            hosts = stack.enter_context(network)
            hosts.shape(case.gbit_per_s * 1e9)
            if name in (GLOO, MPI):
                job = self._ours(case, name.removeprefix(f"{OURS} "), hosts, folder)
            else:
                kind = contestants.PlainDdp if name == DDP else contestants.Independent
                job = self._peer(case, kind, hosts, folder)
            return PausableJob(job, deadline_s, stack.pop_all())

    def _ours(
        self, case: NetworkCase, controller: str, hosts: HostNetwork, folder: Path
    ) -> TurnJob:
        """Return the job of `hvdtrain train` on all hosts, with all that it does by default."""
        names = tuple((host.name, host.slots) for host in hosts.hosts)
        prefix = mpi_prefix() if controller == "mpi" else None
        options = HorovodrunOptions(
            case.work.workers, controller, names, INTERFACE, START_TIMEOUT_S, mpi_prefix=prefix
        )
        argv = horovodrun_argv(options, jobs.train_argv(folder, contestants.train_flags(case.work)))
        settings = settings_for(controller, os.environ, watchdog_timeout_s=0, command="train")
        variables = horovodrun_environment(os.environ | ONE_THREAD, settings, None)
        # A worker that waits for its turn has not failed.
        variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] = f"{math.ceil(self.time_limit_s)}"
        return TurnJob(
            folder=folder,
            start=lambda children: children.append(
                OnHosts(hosts, range(case.hosts), argv, variables, folder / "process-0.log")
            ),
            progress=[jobs.log_of(folder)],
            finish=contestants.stop_train,
            logged=lambda: [jobs.logged_steps(folder)],
            samples=case.work.global_batch_size,
        )

    def _peer(
        self, case: NetworkCase, strategy: type[BareLoop], hosts: HostNetwork, folder: Path
    ) -> TurnJob:
        """Return the job of a loop on all hosts, a process for each worker."""
        work = case.work
        spec = contestants.spec_of(work, strategy, folder, self.time_limit_s)
        argv = contestants.process_argv(spec)
        logs = [contestants.step_log(folder, number) for number in range(work.workers)]

        def start(children: list[Child]) -> None:
            for rank in range(work.workers):
                host, local_rank = divmod(rank, case.workers_per_host)
                variables = {"HOROVOD_SIZE": str(work.workers), "HOROVOD_RANK": str(rank)}
                variables |= {
                    "HOROVOD_LOCAL_RANK": str(local_rank),
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                }
                log = folder / f"process-{rank}.log"
                children.append(OnHosts(hosts, [host], argv, variables | ONE_THREAD, log))

        return TurnJob(
            folder=folder,
            start=start,
            progress=logs,
            finish=lambda children: None,
            logged=lambda: [*map(jobs.read_steps, logs)],
            samples=work.global_batch_size / work.workers,
        )


class OnHosts:
    """A command on the first of some hosts, with all processes that run on them."""

    def __init__(
        self,
        network: HostNetwork,
        hosts: Sequence[int],
        argv: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start it. Its output goes to `log`."""
        self._network, self._hosts = network, hosts
        with log.open("wb") as output:
            self._process: HostProcess = network.start(
                argv, hosts[0], variables, stdout=output, stderr=subprocess.STDOUT
            )

    def exit_code(self) -> int | None:
        return self._process.poll()

    def processes(self) -> list[int]:
        return [process.pid for host in self._hosts for process in self._network.processes(host)]

    def end(self) -> None:
        self._network.kill_since()
        self._process.discard()


@dataclass(frozen=True)
class NetworkPoint:
    """The results of a case."""

    case: NetworkCase
    sent_bytes: float  # by each host in a step, in a ring of hosts
    step_ms: dict[str, float | None]  # medians by contestant; None: all failed
    alone_ms: float  # the network alone
    over_ddp: dict[str, Ratio | None]  # speed of ours over theirs, within rounds


def points_of(results: Results[NetworkCase]) -> list[NetworkPoint]:
    """Return the results of each case that was measured."""
    points = []
    for case, rates in results.rates.items():
        work, size = case.work, gradient_bytes(case.work.model)
        speeds = {name: median(samples_per_s) for name, samples_per_s in rates.items()}
        points.append(
            NetworkPoint(
                case=case,
                sent_bytes=sent_bytes(size, case.hosts),
                step_ms={
                    name: 1000 * work.global_batch_size / speed if speed else None
                    for name, speed in speeds.items()
                },
                alone_ms=1000 * seconds_alone(size, case.hosts, case.gbit_per_s),
                over_ddp={
                    name: ratio_within_rounds(rates[name], rates[DDP]) for name in (GLOO, MPI)
                },
            )
        )
    return points


def table(plan: NetworkPlan, results: Results[NetworkCase]) -> str:
    """Return the table of all cases."""
    rows = []
    for point in points_of(results):
        case, times = point.case, [point.step_ms[name] for name in CONTESTANTS]
        rows.append(
            [
                *(case.work.model, str(case.hosts), str(case.work.workers)),
                *(f"{case.gbit_per_s:g}", f"{point.sent_bytes / 1e6:.1f}"),
                *("-" if ms is None else f"{ms:.0f}" for ms in times),
                f"{point.alone_ms:.0f}",
                *(
                    f"{over.median:.3f} ({over.middle_half})" if over else "-"
                    for over in point.over_ddp.values()
                ),
            ]
        )
    rounds = counted(plan.rounds, "round")
    lines = [
        f"network: ms a step in the median of {rounds} of turns, N workers on CPUs, one "
        f"compute thread each; MB sent: by each host in a step, in a ring of hosts; {LIMIT}: the "
        f"same processes without exchange; ratios: speed over {DDP}'s"
    ]
    return "\n".join([*lines, *ratios.columns([HEADINGS, *rows])])


def as_json(plan: NetworkPlan, results: Results[NetworkCase]) -> dict[str, Any]:
    """Return all results for `write_json`, with NaN for a failed round."""
    runs = [asdict(case) | results.of(case) for case in results.rates]
    points = [asdict(point) for point in points_of(results)]
    return {**asdict(plan), "runs": runs, "points": points, "problems": results.problems}
