"""The speed of a script of one's own: a plain loop of torch, hvdtrain.Loop, DDP, Horovod, in turns.

python -m tests.campaigns.own_script [--rounds 12]: LeNet and an MLP over a TensorDataset and a
DataLoader, 128 samples a worker, one thread each; prints the medians of the ratios of each round.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, WARM_UP, STEPS = 128, 20, 100
PORT = "29511"
RATIOS = (("loop", "plain", 1), ("loop", "ddp", 2), ("loop", "horovod", 2))
Tick = Callable[[], None]


def make(name: str) -> torch.nn.Module:
    from hvdtrain.models import LeNet

    torch.manual_seed(0)
    if name == "lenet":
        return LeNet(1, 10)
    layers = [torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048)]
    return torch.nn.Sequential(
        torch.nn.Flatten(), *layers, torch.nn.ReLU(), torch.nn.Linear(2048, 10)
    )


def train(kind: str, name: str) -> None:
    """Train as a script of this kind does; rank 0 prints the samples a second of all workers."""
    model = make(name)
    data = TensorDataset(torch.rand(32768, 1, 28, 28), torch.randint(10, (32768,)))
    times: list[float] = []

    def tick() -> None:
        times.append(time.perf_counter())

    rank, size = LOOPS[kind](model, data, tick)
    if rank == 0:
        speed = (len(times) - 1 - WARM_UP) * BATCH * size / (times[-1] - times[WARM_UP])
        print(f"SPEED {speed:.0f}", flush=True)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def by_hand(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, tick: Tick
) -> None:
    for _, (x, y) in zip(range(STEPS), loader, strict=False):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        tick()


def plain(model: torch.nn.Module, data: TensorDataset, tick: Tick) -> tuple[int, int]:
    by_hand(model, sgd(model), DataLoader(data, BATCH, shuffle=True), tick)
    return 0, 1


def loop(model: torch.nn.Module, data: TensorDataset, tick: Tick) -> tuple[int, int]:
    import hvdtrain

    size = int(os.environ.get("WORLD_SIZE", "1"))
    loader = DataLoader(data, BATCH * size, shuffle=True)
    with hvdtrain.Loop(model, sgd(model), loader, max_steps=STEPS, log_interval=50) as steps:
        for step in steps:
            for x, y in step.batches():
                step.backward(mean=cross_entropy(model(x), y), count=len(y))
            step.update()
            tick()
    return steps.rank, size


def ddp(model: torch.nn.Module, data: TensorDataset, tick: Tick) -> tuple[int, int]:
    torch.distributed.init_process_group("gloo")
    replica = torch.nn.parallel.DistributedDataParallel(model)
    by_hand(replica, sgd(replica), DataLoader(data, BATCH, sampler=DistributedSampler(data)), tick)
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def horovod(model: torch.nn.Module, data: TensorDataset, tick: Tick) -> tuple[int, int]:
    import horovod.torch as hvd

    hvd.init()
    sampler = DistributedSampler(data, hvd.size(), hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    by_hand(model, optimizer, DataLoader(data, BATCH, sampler=sampler), tick)
    return hvd.rank(), hvd.size()


LOOPS = {"plain": plain, "loop": loop, "ddp": ddp, "horovod": horovod}


def speed(kind: str, name: str, size: int, folder: Path) -> float:
    """Return the samples a second of a script that is run on so many workers."""
    tools = Path(sys.executable).parent
    script = [str(Path(__file__).resolve()), "--script", kind, name]
    command = [sys.executable, *script]
    if size > 1:
        start = {
            "loop": [str(tools / "hvdtrain"), "launch", "-np", str(size), "--", "python"],
            "ddp": [str(tools / "torchrun"), f"--nproc-per-node={size}", f"--master-port={PORT}"],
            "horovod": [str(tools / "horovodrun"), "-np", str(size), sys.executable],
        }
        command = [*start[kind], *script]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    variables |= {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
    done = subprocess.run(
        command,
        env=os.environ | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.search(r"SPEED (\d+)", done.stdout)
    if not found:
        sys.exit(f"{kind} on {size} workers failed:\n{done.stdout}{done.stderr}")
    return float(found[1])


def compare(rounds: int) -> None:
    for name in ("lenet", "mlp"):
        ratios: dict[tuple[str, str, int], list[float]] = {it: [] for it in RATIOS}
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as scratch:
                found = {
                    (kind, size): speed(kind, name, size, Path(scratch))
                    for kind, size in (
                        *(("plain", 1), ("loop", 1)),
                        *(("loop", 2), ("ddp", 2), ("horovod", 2)),
                    )
                }
            for own, other, size in RATIOS:
                ratios[own, other, size].append(found[own, size] / found[other, size])
        for (_, other, size), each in ratios.items():
            middle = statistics.median(each)
            print(
                f"{name}, {size} of {other}: {middle:.2f} ({min(each):.2f} to {max(each):.2f})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--script", nargs=2, metavar=("KIND", "MODEL"))
    arguments = parser.parse_args()
    if arguments.script:
        train(*arguments.script)
    else:
        compare(arguments.rounds)


if __name__ == "__main__":
    main()
