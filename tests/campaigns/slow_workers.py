"""Runs of workers that are alike, and of workers of which one has half the speed, in turns.

    python -m tests.campaigns.slow_workers [--repeat 20] [--workers 4] [--steps 60]
        [--controllers gloo mpi] [--model lenet] [--samples 128]

Prints a line for each run: who was named at which step, and the largest ratio to the median of the
other workers in all of three intervals in a row. Exits with 1 if a worker of a quiet run was named,
or a slow one not within 50 steps, or another one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from hvdtrain.models import build_model
from hvdtrain.pulse import BEFORE_EXCHANGE
from hvdtrain.records import stragglers
from hvdtrain.topology import Topology
from tests.parallel.experiments import train
from tests.parallel.launching import CONTROLLERS

SLOW_RANK = 1
LIMIT = 50  # steps
MODEL, ROWS = "HVDTRAIN_TEST_MODEL", "HVDTRAIN_TEST_ROWS"
PASSES = 3  # a backward pass takes about two forward passes


def alike(shape: tuple[int, int, int], classes: int) -> torch.nn.Module:
    """Return the model of the campaign; ratios of this process's run are written to a file."""
    blocks = stragglers.Stragglers._blocks

    def noted(self: stragglers.Stragglers, column: int) -> Iterator[tuple[int, stragglers._Block]]:
        for rank, block in blocks(self, column):
            own_s, phase = self._rows[rank][column], BEFORE_EXCHANGE[column - 1]
            row = [rank, phase, block.ratio, own_s * (1 - 1 / block.ratio) / self._step_s]
            with Path(os.environ[ROWS]).open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            yield rank, block

    stragglers.Stragglers._blocks = noted
    return build_model(os.environ[MODEL], shape, classes, torch.float32)


def one_at_half_speed(shape: tuple[int, int, int], classes: int) -> torch.nn.Module:
    """Return the same, which takes twice as long on one rank."""
    model = alike(shape, classes)
    forward = model.forward

    def slowly(images: torch.Tensor) -> torch.Tensor:
        began_s = time.perf_counter()
        output = forward(images)
        time.sleep(PASSES * (time.perf_counter() - began_s) * model.training)
        return output

    if Topology.from_environment().rank == SLOW_RANK:
        model.forward = slowly
    return model


def largest(rows: Path) -> tuple[float, float]:
    """Return the largest ratio, and share of a step, of a phase in all of three intervals in a row,
    where the other is as large as is asked for.
    """
    series: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for rank, phase, ratio, wait in map(json.loads, rows.read_text().splitlines()):
        series.setdefault((rank, phase), []).append((ratio, wait))
    ratios, waits = [0.0], [0.0]
    for blocks in series.values():
        for three in zip(blocks, blocks[1:], blocks[2:], strict=False):
            ratio, wait = (min(values) for values in zip(*three, strict=True))
            ratios.append(ratio if wait >= stragglers.WAIT else 0.0)
            waits.append(wait if ratio >= stragglers.RATIO else 0.0)
    return max(ratios), max(waits)


def run_one(model: str, controller: str, asked: argparse.Namespace, folder: Path) -> bool:
    """Train, print what was found, and return whether that is right."""
    flags = [f"--model=tests.campaigns.slow_workers:{model}", f"--max-steps={asked.steps}"]
    flags += [f"--data=synthetic:1x28x28,samples={asked.steps * asked.samples}", "--lr=0.01"]
    flags += [f"--global-batch-size={asked.samples}"]
    variables = {MODEL: asked.model, ROWS: str(folder.with_suffix(".rows"))}
    done = train(flags, folder, asked.workers, controller, variables=variables)
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    named = [(it["step"], slow["rank"]) for it in records for slow in it.get("stragglers", ())]
    first = min((step for step, _ in named), default=0)
    right = (
        not named
        if model == alike.__name__
        else {rank for _, rank in named} == {SLOW_RANK} and first <= LIMIT
    )
    assert done.exit_code == 0, done.output
    ratio, wait = largest(folder.with_suffix(".rows"))
    print(
        f"{'right' if right else 'WRONG'}  {model:18}  {controller:4}  ratio {ratio:.2f}  "
        f"wait {wait:.2f}  {f'rank {named[0][1]} at step {first}' if named else ''}",
        flush=True,
    )
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS))
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--samples", type=int, default=128, help="of the global batch")
    asked = parser.parse_args()
    kinds = (alike.__name__, one_at_half_speed.__name__)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-slow-") as scratch:
        results = [
            run_one(kind, controller, asked, Path(scratch) / f"{kind}-{controller}-{number}")
            for number, controller, kind in product(range(asked.repeat), asked.controllers, kinds)
        ]
    print(f"{results.count(False)} of {len(results)} wrong")
    return 1 if False in results else 0


if __name__ == "__main__":
    sys.exit(main())
