"""`hvdtrain bench network`: the time of a step over several hosts with links of a chosen speed.

The hosts are made of namespaces on this machine (`hvdtrain.lab.hosts`), with one or more workers on
each. Every contestant has hosts of its own, which compute and send in turns, while those of the
others are stopped. What the network alone would take is computed: a ring of H hosts sends
2 (H - 1) / H of the bytes of the gradients over each link, in each direction. One of all N workers
sends 2 (N - 1) / N of them.
"""

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvdtrain.data.builtin import read_spec
from hvdtrain.errors import UsageError
from hvdtrain.evidence.children import ONE_THREAD, Child
from hvdtrain.lab.bench import contestants, jobs, rounds
from hvdtrain.lab.bench.contestants import DDP, LIMIT, OURS, ScalingCase
from hvdtrain.lab.bench.rounds import Ratio
from hvdtrain.lab.bench.scaling import LOG_INTERVALS, OTHER_LOG_INTERVAL, examine
from hvdtrain.lab.bench.turns import PausableJob, TurnJob, cpu_table, measure_cases
from hvdtrain.lab.findings import publish
from hvdtrain.lab.hosts.network import INTERFACE, HostNetwork, why_not
from hvdtrain.lab.systems.process import write_spec
from hvdtrain.launcher.horovodrun import horovodrun_argv, mpi_prefix
from hvdtrain.log import counted, say
from hvdtrain.models import build_model

GLOO, MPI = f"{OURS} gloo", f"{OURS} mpi"
CONTESTANTS = (GLOO, MPI, DDP, LIMIT)
LOGGED_S = 0.5  # a slow exchange is logged more often than this
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
        results = measure_cases(
            plan.cases(),
            CONTESTANTS,
            partial(start, time_limit_s=plan.time_limit_s),
            rounds=plan.rounds,
            turn_s=plan.turn_s,
            folder=folder,
            report=say,
        )
    points = [point_of(case, rates) for case, rates in results.rates.items()]
    cpu = cpu_table(results, lambda case: (case.work.global_batch_size, case.work.workers))
    return publish(results.findings([table(plan, points), cpu], plan, points), arguments)


def start(case: NetworkCase, name: str, folder: Path, *, time_limit_s: float) -> PausableJob:
    """Start a contestant of a case on hosts of its own, with a new folder. Raises ChildFailure."""
    deadline_s = time.monotonic() + time_limit_s
    folder.mkdir(mode=0o700)
    with ExitStack() as stack:
        slots = [case.workers_per_host] * case.hosts
        hosts = stack.enter_context(HostNetwork(slots, folder / "hosts", visible=[folder]))
        hosts.shape(case.gbit_per_s * 1e9)
        if name in (GLOO, MPI):
            job = _ours(case, name.removeprefix(f"{OURS} "), hosts, folder, time_limit_s)
        else:
            spec = contestants.spec_of(case.work, contestants.PEERS[name], folder, time_limit_s)
            begin = partial(_start_peer, case, write_spec(spec), hosts, folder)
            job = contestants.peer_job(case.work, folder, begin)
        return PausableJob(job, deadline_s, stack.pop_all())


def _ours(
    case: NetworkCase, controller: str, hosts: HostNetwork, folder: Path, time_limit_s: float
) -> TurnJob:
    """Return the job of `hvdtrain train` on all hosts, with all that it does by default."""
    names = tuple((host.name, host.slots) for host in hosts.hosts)
    prefix = mpi_prefix() if controller == "mpi" else None
    train = jobs.train_argv(folder, contestants.train_flags(case.work))
    argv = horovodrun_argv(
        train, case.work.workers, controller, names, interface=INTERFACE, prefix=prefix
    )
    variables = jobs.launch_environment(controller, os.environ | ONE_THREAD)
    variables |= contestants.waiting(time_limit_s)
    log = folder / "process-0.log"
    begin = partial(OnHosts, hosts, range(case.hosts), argv, variables, log)
    return contestants.train_job(case.work, folder, begin)


def _start_peer(
    case: NetworkCase, argv: list[str], hosts: HostNetwork, folder: Path, children: list[Child]
) -> None:
    """Start a loop on all hosts, a process for each worker."""
    for rank in range(case.work.workers):
        host, local_rank = divmod(rank, case.workers_per_host)
        variables = ONE_THREAD | {
            "HOROVOD_SIZE": str(case.work.workers),
            "HOROVOD_RANK": str(rank),
            "HOROVOD_LOCAL_RANK": str(local_rank),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        log = folder / f"process-{rank}.log"
        children.append(OnHosts(hosts, [host], argv, variables, log))


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
            self._process = network.start(argv, hosts[0], variables, stdout=output)

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


def point_of(case: NetworkCase, rates: Mapping[str, Sequence[float]]) -> NetworkPoint:
    """Return the results of a case from samples/s, by contestant and round."""
    size = gradient_bytes(case.work.model)
    speeds = {name: rounds.median(samples_per_s) for name, samples_per_s in rates.items()}
    return NetworkPoint(
        case=case,
        sent_bytes=sent_bytes(size, case.hosts),
        step_ms={
            name: 1000 * case.work.global_batch_size / speed if speed else None
            for name, speed in speeds.items()
        },
        alone_ms=1000 * seconds_alone(size, case.hosts, case.gbit_per_s),
        over_ddp={
            name: rounds.ratio_within_rounds(rates[name], rates[DDP]) for name in (GLOO, MPI)
        },
    )


def table(plan: NetworkPlan, points: Sequence[NetworkPoint]) -> str:
    """Return the table of all cases."""
    rows = [
        (
            *(point.case.work.model, str(point.case.hosts), str(point.case.work.workers)),
            *(f"{point.case.gbit_per_s:g}", f"{point.sent_bytes / 1e6:.1f}"),
            *("-" if ms is None else f"{ms:.0f}" for ms in map(point.step_ms.get, CONTESTANTS)),
            f"{point.alone_ms:.0f}",
            *map(rounds.ratio_and_spread, point.over_ddp.values()),
        )
        for point in points
    ]
    head = (
        f"network: ms a step in the median of {counted(plan.rounds, 'round')} of turns, N workers "
        "on CPUs, one compute thread each; MB sent: by each host in a step, in a ring of hosts; "
        f"{LIMIT}: the same processes without exchange; ratios: speed over {DDP}'s"
    )
    ratios = [over for point in points for over in point.over_ddp.values()]
    return "\n".join([head, *rounds.columns([HEADINGS, *rows]), *rounds.advice(ratios)])
