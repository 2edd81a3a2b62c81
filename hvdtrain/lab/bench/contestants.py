"""The contestants of `hvdtrain bench scaling`, as jobs that take turns: `train`, and its peers.

The peers are training loops as one would write them by hand. They do less than our step: no
metrics, no sums over ranks, no checks. They log the time of a step as often as `train` does.
"""

from __future__ import annotations

import math
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.config import RunConfig
from hvdtrain.data import Shares
from hvdtrain.evidence.children import Child, CommandProcess, wait_while
from hvdtrain.lab.bench import jobs
from hvdtrain.lab.bench.turns import PausableJob, TurnJob
from hvdtrain.lab.systems.contract import (
    Member,
    Parameters,
    Spec,
    Strategy,
    join_group,
    leave_group,
)
from hvdtrain.lab.systems.process import start_system
from hvdtrain.lab.systems.work import GlobalBatch, Work, WorkSpec, trained
from hvdtrain.launcher.processes import command_of, send_signal
from hvdtrain.run.process import keep_freed_memory

OURS, DDP, LIMIT = "hvdtrain", "DDP", "limit"
CONTESTANTS = (OURS, DDP, LIMIT)
SAMPLES = 1 << 22  # computed from a small pool, so that they need no memory each
DATA = f"synthetic:1x28x28,samples={SAMPLES}"
FINISH_S = 60.0


@dataclass(frozen=True)
class ScalingCase:
    """A model, number of workers and batch size, the same for all contestants."""

    model: str
    workers: int
    global_batch_size: int
    log_interval: int = RunConfig.log_interval  # a turn lasts for some of these

    @property
    def steps(self) -> int:
        """The limit of steps, never reached: one epoch without its last batch."""
        return SAMPLES // self.global_batch_size - 1

    def __str__(self) -> str:
        return f"{self.model}, N = {self.workers}, {self.global_batch_size} samples a step"


def start(
    case: ScalingCase,
    name: str,
    folder: Path,
    *,
    controller: str,
    time_limit_s: float,
) -> PausableJob:
    """Start a contestant of a case, in its new folder. Raises ChildFailure."""
    deadline_s = time.monotonic() + time_limit_s
    if name != OURS:
        spec = spec_of(case, PEERS[name], folder, time_limit_s)
        begin = partial(start_system, spec, PEERS[name], controller)
        return PausableJob(peer_job(case, folder, begin), deadline_s)
    argv, environment = jobs.on_workers(
        jobs.train_argv(folder, train_flags(case)), case.workers, controller
    )
    folder.mkdir(mode=0o700)
    environment = waiting(time_limit_s) | environment
    begin_train = partial(CommandProcess, argv, folder / "process-0.log", environment)
    return PausableJob(train_job(case, folder, begin_train), deadline_s)


def waiting(time_limit_s: float) -> dict[str, str]:
    """Return Horovod's setting by which a worker that waits for its turn has not failed."""
    return {"HOROVOD_GLOO_TIMEOUT_SECONDS": f"{math.ceil(time_limit_s)}"}


def train_job(case: ScalingCase, folder: Path, begin: Callable[[], Child]) -> TurnJob:
    """Return the job of `hvdtrain train`, with all that it does by default."""
    return TurnJob(
        folder=folder,
        start=lambda children: children.append(begin()),
        progress=[jobs.log_of(folder)],
        finish=stop_train,
        logged=lambda: [jobs.logged_steps(folder)],
        samples=case.global_batch_size,
    )


def peer_job(case: ScalingCase, folder: Path, begin: Callable[[list[Child]], None]) -> TurnJob:
    """Return the job of a loop by hand, a process for each worker."""
    logs = [step_log(folder, number) for number in range(case.workers)]
    return TurnJob(
        folder=folder,
        start=begin,
        progress=logs,
        finish=lambda children: None,
        logged=lambda: [*map(jobs.read_steps, logs)],
        samples=case.global_batch_size / case.workers,
    )


def train_flags(case: ScalingCase) -> list[str]:
    """Return the flags of `hvdtrain train` for a case."""
    return [
        *("--model", case.model, "--data", DATA, "--device", "cpu"),
        *("--global-batch-size", str(case.global_batch_size), "--lr", str(WorkSpec.lr)),
        *("--momentum", str(WorkSpec.momentum), "--max-steps", str(case.steps)),
        *("--log-interval", str(case.log_interval)),
    ]


def spec_of(case: ScalingCase, strategy: type[BareLoop], folder: Path, time_limit_s: float) -> Spec:
    """Return the specification for the processes of a peer."""
    return Spec(
        system=f"{strategy.__module__}:{strategy.__name__}",
        workers=case.workers,
        servers=0,
        work=WorkSpec(case.model, DATA, "", case.global_batch_size, case.steps),
        towers_reduction="",
        towers_dim=0,
        folder=str(folder),
        token=secrets.token_hex(32),
        time_limit_s=time_limit_s,
        log_interval=case.log_interval,
    )


def stop_train(children: Sequence[Child]) -> None:
    """Stop a run with SIGTERM to one worker, which notifies the others: all save and exit.

    Killed, Open MPI would leave files of its shared memory.
    """
    (child,) = children
    send_signal(signal.SIGTERM, [*filter(is_train, child.processes())][:1])
    wait_while(lambda: child.exit_code() is None, FINISH_S)


def is_train(pid: int) -> bool:
    """Return whether this is a worker; horovodrun and mpirun only name one in their arguments."""
    return command_of(pid).startswith(" ".join([*jobs.HVDTRAIN, "train"]))


def step_log(folder: Path, number: int) -> Path:
    """Return the file to which a process logs its steps: a line of number and seconds each."""
    return folder / f"steps-{number}.txt"


class BareLoop(Strategy):
    """A loop of forward, backward and step on this process's share of each global batch."""

    def __init__(self, work: Work, member: Member) -> None:
        super().__init__(work, member)
        self.model: nn.Module = work.model
        self._optimizer = work.optimizer(trained(work.model))
        self._shares = Shares(member.workers)
        self._steps = 0
        self._log = step_log(Path(member.spec.folder), member.number).open("w", encoding="utf-8")

    def step(self, batch: GlobalBatch) -> None:
        local_indices = self._shares.of(batch.indices, self.member.number)
        inputs, labels = self.work.dataset.train.batch(local_indices, batch.epoch)
        self._optimizer.zero_grad()
        functional.cross_entropy(self.model(inputs), labels).backward()
        self._optimizer.step()
        self._steps += 1
        if self._steps % self.member.spec.log_interval == 0:
            self._log.write(f"{self._steps} {time.time()}\n")
            self._log.flush()

    def parameters(self) -> Parameters:
        """Return nothing, as they are not compared."""
        return {}


class PlainDdp(BareLoop):
    """A loop with torch's DistributedDataParallel over Gloo, with default settings."""

    def __init__(self, work: Work, member: Member) -> None:
        """Collective: join the group."""
        super().__init__(work, member)
        join_group(member)
        self.model = DistributedDataParallel(work.model)

    def close(self) -> None:
        leave_group()


class Independent(BareLoop):
    """Independent loops at the same time: the limit of this machine.

    They use the memory settings and the optimizer's step of `train`, which are the fastest known.
    """

    def __init__(self, work: Work, member: Member) -> None:
        """Collective: start at the same time on all ranks, without further exchange."""
        keep_freed_memory()
        super().__init__(work, member)
        self._optimizer = work.tuned_optimizer()
        join_group(member)
        leave_group()


PEERS: Mapping[str, type[BareLoop]] = {DDP: PlainDdp, LIMIT: Independent}
