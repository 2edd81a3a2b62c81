"""The contestants of `hvdtrain bench scaling`, as jobs that take turns: `train`, and its peers.

The peers are training loops as one would write them by hand. They do less than our step: no
metrics, no sums over ranks, no checks. They log the time of a step as often as `train` does.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path

from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.config import RunConfig
from hvdtrain.data import Shares
from hvdtrain.evidence.children import POLL_S, Child, CommandProcess
from hvdtrain.interpreter import module_argv
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
from hvdtrain.launcher.processes import command_of
from hvdtrain.run.process import keep_freed_memory

OURS, DDP, LIMIT = "hvdtrain", "DDP", "limit"
CONTESTANTS = (OURS, DDP, LIMIT)
LR, MOMENTUM = 0.01, 0.9
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


@dataclass(frozen=True)
class ScalingStarter:
    """A starter of contestants."""

    controller: str
    time_limit_s: float
    context: ForkServerContext

    def __call__(self, case: ScalingCase, folder: Path) -> dict[str, Callable[[], PausableJob]]:
        """Return what starts each contestant of a case, and raises ChildFailure."""
        return {name: partial(self._start, case, name, folder / name) for name in CONTESTANTS}

    def _start(self, case: ScalingCase, name: str, folder: Path) -> PausableJob:
        deadline_s = time.monotonic() + self.time_limit_s
        if name == OURS:
            return PausableJob(self._ours(case, folder), deadline_s)
        return PausableJob(
            self._peer(case, PlainDdp if name == DDP else Independent, folder), deadline_s
        )

    def _ours(self, case: ScalingCase, folder: Path) -> TurnJob:
        """Return the job of `hvdtrain train`, with all that it does by default."""
        argv, environment = jobs.on_workers(
            jobs.train_argv(folder, train_flags(case)), case.workers, self.controller
        )
        # A worker that waits for its turn has not failed.
        waiting = {"HOROVOD_GLOO_TIMEOUT_SECONDS": f"{math.ceil(self.time_limit_s)}"}
        folder.mkdir(mode=0o700)
        log = folder / "process-0.log"
        return TurnJob(
            folder=folder,
            start=lambda children: children.append(
                CommandProcess(argv, log, waiting | environment)
            ),
            progress=[jobs.log_of(folder)],
            finish=stop_train,
            logged=lambda: [jobs.logged_steps(folder)],
            samples=case.global_batch_size,
        )

    def _peer(self, case: ScalingCase, strategy: type[BareLoop], folder: Path) -> TurnJob:
        spec = spec_of(case, strategy, folder, self.time_limit_s)
        logs = [step_log(folder, number) for number in range(case.workers)]
        return TurnJob(
            folder=folder,
            start=lambda children: start_system(
                spec, strategy, self.controller, self.context, children
            ),
            progress=logs,
            finish=lambda children: None,
            logged=lambda: [*map(jobs.read_steps, logs)],
            samples=case.global_batch_size / case.workers,
        )


def train_flags(case: ScalingCase) -> list[str]:
    """Return the flags of `hvdtrain train` for a case."""
    flags = ["--model", case.model, "--data", DATA, "--device", "cpu"]
    flags += ["--global-batch-size", str(case.global_batch_size), "--lr", str(LR)]
    flags += ["--momentum", str(MOMENTUM), "--max-steps", str(case.steps)]
    return [*flags, "--log-interval", str(case.log_interval)]


def spec_of(case: ScalingCase, strategy: type[BareLoop], folder: Path, time_limit_s: float) -> Spec:
    """Return the specification for the processes of a peer."""
    work = WorkSpec(
        model=case.model,
        data=DATA,
        data_dir="",
        global_batch_size=case.global_batch_size,
        steps=case.steps,
        dtype="float32",
        seed=0,
        lr=LR,
        momentum=MOMENTUM,
    )
    return Spec(
        system=f"{strategy.__module__}:{strategy.__name__}",
        workers=case.workers,
        servers=0,
        work=work,
        towers_reduction="",
        towers_dim=0,
        folder=str(folder),
        token=secrets.token_hex(32),
        time_limit_s=time_limit_s,
        log_interval=case.log_interval,
    )


def process_argv(spec: Spec) -> list[str]:
    """Write a peer's specification to its folder; return the command of each of its processes."""
    path = Path(spec.folder) / "spec.json"
    path.write_text(json.dumps(asdict(spec)), "utf-8")
    return [*module_argv("hvdtrain.lab.systems.process"), str(path)]


def stop_train(children: Sequence[Child]) -> None:
    """Stop a run with SIGTERM to one worker, which notifies the others: all save and exit.

    Killed, Open MPI would leave files of its shared memory.
    """
    (child,) = children
    workers = [pid for pid in child.processes() if is_train(pid)]
    for pid in workers[:1]:
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + FINISH_S
    while child.exit_code() is None and time.monotonic() < until:
        time.sleep(POLL_S)


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
