"""The systems of `hvdtrain bench peers`, one run of each, and what it must have learned."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from hvdtrain.data import GlobalBatchSampler
from hvdtrain.evidence.children import LINES_SHOWN, ChildFailure, read_json, run_command
from hvdtrain.horovod_build import install
from hvdtrain.horovod_build.environment import Environment
from hvdtrain.lab import peers
from hvdtrain.lab.bench import jobs
from hvdtrain.lab.peers.same_work import CHECKED_STEPS, CLASSES, EPOCHS, LR, MOMENTUM, PeerWork
from hvdtrain.launcher.horovodrun import (
    horovodrun_argv,
    horovodrun_environment,
    in_own_session,
    search_path,
)
from hvdtrain.log import say

SCRIPTS = Path(peers.__file__).parent
WARM_UP_STEPS = 5  # not measured
DISTINCT = 250  # images; the rest are further names of them
IMAGE_SIZE = (72, 56)  # width and height
# Largest difference of weights from those of one process, as a part of what they have learned.
# Rounding is some 1e-5 of it; one sample too few or too many in a batch of 256 is 4e-3.
SAME = 1e-3

Weights = NDArray[np.float32]


@dataclass(frozen=True)
class PeerRun:
    """What one run has measured."""

    samples_per_s: float  # over all workers, after the warm-up
    first_step_s: float  # from the command to its end on the last worker
    peak_bytes: int  # of the largest worker, without processes that read
    difference: float | None  # of its weights from one process's; None: not compared

    def __str__(self) -> str:
        return (
            f"{self.samples_per_s:,.0f} samples/s, first step {self.first_step_s:.1f} s, "
            f"{self.peak_bytes >> 20:,} MiB"
        )


@dataclass(frozen=True)
class PeerSystem:
    """A system: its script, the command that runs it, and the order in which it takes samples."""

    title: str
    script: str
    command: Callable[[PeerWork, str, str], list[str]]  # of work, script and controller
    order: Callable[[PeerWork], NDArray[Any]]  # of all samples of the epoch
    package: str  # that must be installed
    packages: Callable[[], Path] | None = None  # a folder of some, before those of this Python

    @property
    def path(self) -> Path:
        """Return the file of the script."""
        return SCRIPTS / self.script

    @property
    def is_installed(self) -> bool:
        """Return whether its package can be imported."""
        return find_spec(self.package) is not None


def _train(work: PeerWork, script: str, controller: str) -> list[str]:
    flags = [
        *("--task", "hvdtrain.lab.peers.train_task:PeerTask", "--data-dir", work.folder),
        *("--opt", "sgd", "--lr", str(LR), "--momentum", str(MOMENTUM), "--device", "cpu"),
        *("--batch-size", str(work.batch_size), "--epochs", str(EPOCHS)),
    ]
    return jobs.launch_argv(work.workers, controller, jobs.train_argv(Path(work.folder), flags))


def _launch(work: PeerWork, script: str, controller: str) -> list[str]:
    flags = ("-np", str(work.workers), "--controller", controller)
    logs = str(Path(work.folder, "logs"))
    command = ["python", script, work.folder]
    return [*jobs.HVDTRAIN, "launch", *flags, "--log-dir", logs, "--", *command]


def _torchrun(work: PeerWork, script: str, controller: str) -> list[str]:
    flags = ("--standalone", "--nproc-per-node", str(work.workers))
    return [sys.executable, "-m", "torch.distributed.run", *flags, script, work.folder]


def _horovodrun(work: PeerWork, script: str, controller: str) -> list[str]:
    # torchrun and `hvdtrain launch` give each worker a session of its own too.
    worker = in_own_session([sys.executable, script, work.folder])
    return horovodrun_argv(worker, work.workers, controller)


@cache
def published_horovod() -> Path:
    """Return a folder with Horovod as published, but for the edits without which it cannot be
    built; the first call builds it, unless its wheel is in the cache. Raises PreflightError.
    """
    choice = install.choose(Environment(Path(sys.executable)), say)
    return install.unpacked(install.obtain(replace(choice, as_published=True), say))


def _our_order(work: PeerWork) -> NDArray[Any]:
    sampler = GlobalBatchSampler(work.samples, work.global_batch_size, seed=0)
    return np.concatenate([*sampler.global_batches(0)])


def _shuffled(work: PeerWork, seed: int) -> NDArray[Any]:
    """Return the order of DistributedSampler and RandomSampler with a generator of this seed."""
    random = torch.Generator().manual_seed(seed)
    return torch.randperm(work.samples, generator=random).numpy()


def _drawn(work: PeerWork) -> NDArray[Any]:
    """Return the order of a seed that is drawn, as Accelerate does after torch.manual_seed(0)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        seed = int(torch.empty((), dtype=torch.int64).random_())
    return _shuffled(work, seed)


TRAIN, LOOP = "train", "loop"
OURS = (TRAIN, LOOP)
_by_0, _by_42 = partial(_shuffled, seed=0), partial(_shuffled, seed=42)  # 42: TrainingArguments
SYSTEMS: Mapping[str, PeerSystem] = {
    TRAIN: PeerSystem("hvdtrain train", "train_task.py", _train, _our_order, "horovod"),
    LOOP: PeerSystem("hvdtrain.Loop", "hvdtrain_loop.py", _launch, _our_order, "horovod"),
    "ddp": PeerSystem("DDP", "torch_ddp.py", _torchrun, _by_0, "torch"),
    "accelerate": PeerSystem("Accelerate", "accelerate_loop.py", _torchrun, _drawn, "accelerate"),
    "fabric": PeerSystem("Lightning Fabric", "fabric_loop.py", _torchrun, _by_0, "lightning"),
    "trainer": PeerSystem(
        "Trainer (transformers)", "transformers_trainer.py", _torchrun, _by_42, "transformers"
    ),
    "horovod": PeerSystem("Horovod", "plain_horovod.py", _horovodrun, _by_0, "horovod"),
    "published": PeerSystem(
        *("Horovod as published", "plain_horovod.py", _horovodrun, _by_0, "horovod"),
        packages=published_horovod,
    ),
}


def run_peer(system: PeerSystem, work: PeerWork, controller: str, time_limit_s: float) -> PeerRun:
    """Run the script of a system once, in the new folder of `work`. Raises ChildFailure."""
    folder = Path(work.folder)
    work.write()
    if system.command is _horovodrun:
        environment = horovodrun_environment(os.environ, {}, None)
        if system.packages:
            # From there Horovod does not find the Open MPI that is installed beside Python.
            first = {"PYTHONPATH": system.packages(), "LD_LIBRARY_PATH": Path(sys.prefix, "lib")}
            for name, packages in first.items():
                path = [str(packages), environment.get(name, "")]
                environment[name] = os.pathsep.join(filter(None, path))
    else:
        environment = {**os.environ, "PATH": search_path(os.environ)}
    argv = system.command(work, str(system.path), controller)
    began_s = time.time()
    if system.command is _torchrun:
        jobs.run_peer_command(argv, environment, folder, time_limit_s, partial(_all_noted, work))
    else:
        run_command(argv, environment, folder, time_limit_s)
    noted = [read_json(path) for path in folder.glob("worker-*.json")]
    if len(noted) != work.workers:
        log = (folder / "process-0.log").read_text("utf-8", errors="replace").splitlines()
        problem = f"{len(noted)} of {work.workers} workers came to step {work.steps}"
        raise ChildFailure("\n".join([problem, *log[-LINES_SHOWN:]]))
    seconds = max(each["at_s"][-1] - each["at_s"][WARM_UP_STEPS - 1] for each in noted)
    return PeerRun(
        samples_per_s=(work.steps - WARM_UP_STEPS) * work.global_batch_size / seconds,
        first_step_s=max(each["at_s"][0] for each in noted) - began_s,
        peak_bytes=max(each["peak_bytes"] for each in noted),
        difference=difference(work, system, folder.glob("worker-*.weights")),
    )


def _all_noted(work: PeerWork) -> bool:
    return len([*Path(work.folder).glob("worker-*.json")]) == work.workers


def difference(work: PeerWork, system: PeerSystem, files: Iterable[Path]) -> float | None:
    """Return the largest difference between weights in files and those that one process has after
    as many steps, as a part of the largest change since the first step.

    None where normalisation over a worker's own batch makes them differ.
    """
    samples = CHECKED_STEPS * work.global_batch_size
    order = tuple(system.order(work)[:samples].tolist())
    learned = learned_alone(replace(work, folder=""), order)
    if learned is None:
        return None
    before, after = learned
    apart = [np.abs(np.fromfile(path, np.float32) - after).max() for path in files]
    return float(max(apart) / np.abs(after - before).max())


@cache
def learned_alone(work: PeerWork, order: tuple[int, ...]) -> tuple[Weights, Weights] | None:
    """Return the weights before and after steps on samples of this order, in one process; None for
    a model with batch normalisation.
    """
    model, data = work.make_model(), work.make_data()
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return None
    before = _flat(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for start in range(0, len(order), work.global_batch_size):
        x, y = default_collate([data[i] for i in order[start : start + work.global_batch_size]])
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return before, _flat(model)


def _flat(model: nn.Module) -> Weights:
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def write_images(folder: Path, samples: int) -> None:
    """Write a folder of images for each class, as ImageFolder reads them: DISTINCT ones, of which
    the rest are further names.
    """
    random = np.random.default_rng(0)
    classes = [folder / str(number) for number in range(CLASSES)]
    for path in classes:
        path.mkdir(parents=True)
    files = [classes[n % CLASSES] / f"{n:07}.jpg" for n in range(samples)]
    for file in files[:DISTINCT]:
        coarse = Image.fromarray(random.integers(0, 256, (7, 9, 3), np.uint8))
        coarse.resize(IMAGE_SIZE, Image.Resampling.BICUBIC).save(file)
    for number, file in enumerate(files[DISTINCT:]):
        file.hardlink_to(files[number % DISTINCT])
