"""`hvdtrain bench checkpoint`: peak memory and seconds of a checkpoint, beside torch.save.

Each contestant is a process of its own: its peak is that of all it has done. Those of torch import
torch alone.

    python -m hvdtrain.lab.bench.saving CONTESTANT MEGABYTES FOLDER
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hvdtrain.errors import TrainingError
from hvdtrain.interpreter import module_argv, peak_memory

TORCH, TORCH_SAVE, TORCH_LOAD = "torch", "torch.save", "torch.load"
OURS, RESUMED = "hvdtrain", "hvdtrain, resumed"
CONTESTANTS = (TORCH, TORCH_SAVE, TORCH_LOAD, OURS, RESUMED)
WIDTH = 1024  # of each layer, which has 4.2 MB
SAVED_STEPS = (2, 4)
FILE = "state.pt"


@dataclass(frozen=True)
class Used:
    """The peak memory of a process, and the seconds of one checkpoint in it."""

    peak_mib: int
    held_up_s: float  # training waited
    whole_s: float  # until it was on the disk, or loaded


def measure(megabytes: float, folder: Path) -> dict[str, Used]:
    """Return what each contestant uses with that many MB of parameters, float32, and as many of
    momentum. Raises TrainingError if one fails.
    """
    used = {}
    folder.mkdir()
    for name in CONTESTANTS:
        argv = [*module_argv(__name__), name, str(megabytes), str(folder)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=False, text=True)
        if done.returncode:
            raise TrainingError(f"bench checkpoint: {name} ended with code {done.returncode}")
        used[name] = Used(**json.loads(done.stdout))
    return used


def rows(used: Mapping[str, Used]) -> list[list[str]]:
    """Return the rows of a table."""
    return [
        ["", "peak memory", "training waits", "in all"],
        *(
            [
                name,
                f"{usage.peak_mib:,} MiB",
                *(f"{s:.2f} s" if usage.whole_s else "-" for s in (usage.held_up_s, usage.whole_s)),
            ]
            for name, usage in used.items()
        ),
    ]


def network(megabytes: float) -> nn.Sequential:
    """Return a network of linear layers with about that many MB of parameters."""
    layers = max(1, round(megabytes * 1e6 / (4 * WIDTH * (WIDTH + 1))))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, save: Callable[[int], None]) -> None:
    """Make steps of one sample, and save after each of SAVED_STEPS."""
    for step in range(1, max(SAVED_STEPS) + 2):
        optimizer.zero_grad()
        model(torch.randn(1, WIDTH)).square().mean().backward()
        optimizer.step()
        if step in SAVED_STEPS:
            save(step)


def by_torch(name: str, megabytes: float, folder: Path) -> tuple[float, float]:
    """Train with torch alone; return the seconds that a save, or the load, took."""
    path, seconds = folder / FILE, [0.0]

    def save(step: int) -> None:
        if name == TORCH_SAVE:
            began_s = time.monotonic()
            with path.open("wb") as stream:
                torch.save({"model": model.state_dict(), "optimizer": sgd.state_dict()}, stream)
                os.fsync(stream.fileno())
            seconds.append(time.monotonic() - began_s)

    model = network(megabytes)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if name == TORCH_LOAD:
        began_s = time.monotonic()
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])
        del state
        seconds.append(time.monotonic() - began_s)
    train(model, sgd, save)
    return max(seconds), max(seconds)


def by_hvdtrain(name: str, megabytes: float, folder: Path) -> tuple[float, float]:
    """Train with our checkpoints; return the seconds that training waited, and of all."""
    from hvdtrain.exchange import SingleProcess
    from hvdtrain.lab.bench.loops import Options, make_job
    from hvdtrain.run.process import keep_freed_memory
    from hvdtrain.train.checkpoint import Checkpoints, load_state
    from hvdtrain.train.metering import Meter
    from hvdtrain.train.progress import State
    from hvdtrain.train.state import capture, restore

    keep_freed_memory()  # as train does
    exchange, checkpoints = SingleProcess(), Checkpoints(folder / "checkpoints", keep=1)
    began_s = time.monotonic()
    saved = load_state(checkpoints.complete()[0]) if name == RESUMED else None
    loaded_s = time.monotonic() - began_s
    options = Options(rounds=1, steps=1, model="lenet", batch_size=1, megabytes=megabytes)
    job = make_job(options, exchange, build=partial(network, megabytes))
    meter = Meter(exchange, job.sampler.samples)
    waited_s, all_s = [0.0], [0.0]

    def save(step: int) -> None:
        checkpoints.wait()  # as a run does, for the copy before this one
        began_s = time.monotonic()
        snapshot = capture(job, State(meter, step, step), exchange, {})
        assert snapshot is not None
        checkpoints.save(snapshot, is_best=False)
        waited_s.append(time.monotonic() - began_s)
        del snapshot
        if step == max(SAVED_STEPS):
            checkpoints.wait()
            all_s.append(time.monotonic() - began_s)

    if saved is not None:
        began_s = time.monotonic()
        restore(saved, job, State(meter))
        saved = None
        waited_s.append(loaded_s + time.monotonic() - began_s)
        all_s.append(waited_s[-1])
    train(job.model, job.optimizers[0], save if name == OURS else lambda step: None)
    return max(waited_s), max(all_s)


def main() -> None:
    """Run one contestant, and print what it used."""
    torch.set_num_threads(1)
    name, megabytes, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    run = by_hvdtrain if name in (OURS, RESUMED) else by_torch
    held_up_s, whole_s = run(name, megabytes, folder)
    print(json.dumps({"peak_mib": peak_memory() >> 20, "held_up_s": held_up_s, "whole_s": whole_s}))


if __name__ == "__main__":
    main()
