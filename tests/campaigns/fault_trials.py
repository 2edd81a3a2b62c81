"""One worker of the fault campaign (see `tests.campaigns.faults`), started by horovodrun.

horovodrun -np 3 --gloo python -m tests.campaigns.fault_trials --trials 84 --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from typing import Any

import numpy as np
import torch

from hvdtrain.audit import Auditor, AuditRecord
from hvdtrain.audit.capture import LocalGradients, Piece
from hvdtrain.audit.checks import BoundCheck
from hvdtrain.config.options import build_config
from hvdtrain.data.feeding import StepData
from hvdtrain.errors import AuditMismatch
from hvdtrain.evidence.verify.collectives import FAULTS, CaseContext, Delivered, inject
from hvdtrain.exchange import Reduction
from hvdtrain.exchange.horovod import HorovodExchange
from hvdtrain.lab.bench.loops import endless_steps
from hvdtrain.pulse import Pulse
from hvdtrain.ring import Transport, all_reduce, broadcast
from hvdtrain.ring.bound import ERROR_BOUNDS
from hvdtrain.run.prepare import prepare
from hvdtrain.run.tasks import find_source
from hvdtrain.topology import Topology
from hvdtrain.train.clock import PhaseClock
from hvdtrain.train.job import Job
from hvdtrain.train.step import train_step

PLUGINS = "tests.parallel.plugins"
WORKLOADS: dict[str, dict[str, Any]] = {
    "LeNet, SGD, accumulation": {"model": "lenet", "grad_accum_steps": 2},
    "LeNet, AdamW, fp16 compression": {"model": "lenet", "opt": "adamw", "compression": "fp16"},
    "ResNet, SGD, clipping": {"model": f"{PLUGINS}:small_resnet", "clip_grad": 0.1},
    "ResNet, AdamW, bf16": {"model": f"{PLUGINS}:small_resnet", "opt": "adamw", "amp": "bf16"},
    "Transformer, AdamW": {"model": f"{PLUGINS}:small_transformer", "opt": "adamw"},
    "Transformer, SGD, all of it": {
        "model": f"{PLUGINS}:small_transformer",
        "grad_accum_steps": 2,
        "compression": "fp16",
        "clip_grad": 0.5,
    },
}
ONE_RANK = ("bitflip",)  # changes the copy of one rank: must be found whatever its size
CERTAIN = 2.0  # in bounds: rounding alone may account for one of them


class FaultyExchange:
    """Horovod's exchange, with a fault injected between its reduction and the audit."""

    def __init__(self, inner: HorovodExchange, ring: Transport, dice: random.Random) -> None:
        self._inner = inner
        self._ring = ring
        self._dice = dice
        self._previous: dict[str, torch.Tensor] = {}
        self.fault: str | None = None
        self.expected: set[str] = set()  # parameters, any of which the audit may name
        self.must_be_found = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def watch(self, model: torch.nn.Module, reduction: Reduction) -> None:
        """Exchange the gradients of `model` from now on, as `reduction` specifies."""
        self.reduction = reduction
        self._named = dict(model.named_parameters())
        self._local = LocalGradients(list(self._named.values()))
        self._previous.clear()

    def begin(self) -> None:
        """Start copying the local gradients; call before a backward pass."""
        self._local.begin([Piece(i, 0, p.numel()) for i, p in enumerate(self._named.values())])

    def reduce_gradients(self, optimizer: torch.optim.Optimizer, look: bool = False) -> bool:
        self._inner.reduce_gradients(optimizer)
        self._local.end()
        honest = {name: p.grad.clone() for name, p in self._named.items()}
        if self.fault is not None:
            self._inject(self.fault)
        self._previous = honest
        return False

    def _inject(self, fault: str) -> None:
        name = self._dice.choice(sorted(self._named))
        twins = [
            other
            for other, p in sorted(self._named.items())
            if other != name and p.shape == self._named[name].shape
        ]
        twin = self._dice.choice(twins) if twins and fault == "swap-results" else None
        local = self._local_of(name)
        delivered = Delivered(
            value=self._named[name].grad,
            op=self.reduction.op,
            local=local,
            previous=self._previous.get(name),
            other=self._named[twin].grad if twin else None,
        )
        before = delivered.value.clone()
        rank, size = self._inner.rank, self._inner.size
        changed = inject(fault, delivered, CaseContext(rank, size, self._broadcast), self._dice)
        anywhere = all_reduce(np.array([float(changed)]), self._ring)[0] > 0
        self.expected = {name, *([twin] if twin else [])}
        farthest = self._in_bounds(before, delivered.value, local)
        self.must_be_found = bool(anywhere and (fault in ONE_RANK or farthest > CERTAIN))

    def _in_bounds(self, before: torch.Tensor, now: torch.Tensor, local: torch.Tensor) -> float:
        """Return the largest change on any rank, in rounding bounds, independently of the audit."""
        magnitudes = all_reduce(local.double().abs().reshape(-1).numpy(), self._ring)
        dtype = np.float16 if self._compressed else np.float32
        bound_of = ERROR_BOUNDS[self.reduction.op]
        bound = bound_of(magnitudes, self._inner.size, dtype, int(self._compressed))
        change = (now.double() - before.double()).abs().reshape(-1).numpy()
        ratio = np.where(np.isnan(change), np.inf, change / bound).max(initial=0.0)
        return float(all_reduce(np.array([ratio]), self._ring, op="max")[0])

    @property
    def _compressed(self) -> bool:
        return self.reduction.compression == "fp16"

    def _local_of(self, name: str) -> torch.Tensor:
        parameter = self._named[name]
        piece = Piece(list(self._named).index(name), 0, parameter.numel())
        copy = self._local.get(0, piece)
        return torch.zeros_like(parameter) if copy is None else copy.reshape(parameter.shape)

    def _broadcast(self, value: torch.Tensor, rank: int) -> torch.Tensor:
        copy = value.detach().clone().contiguous()
        broadcast(copy.numpy(), self._ring, rank)
        return copy


def run_workload(
    name: str,
    trials: int,
    honest_steps: int,
    exchange: FaultyExchange,
    ring: Transport,
    dice: random.Random,
    tally: Counter[str],
) -> list[str]:
    """Collective: run steps without faults, then trials, and return descriptions of problems."""
    options = WORKLOADS[name]
    config = build_config({"data": "digits", "device": "cpu", "lr": 0.01} | options)
    source = find_source(config, exchange, exchange.rank)
    job = prepare(config, 48, source, exchange, Topology(exchange.rank, exchange.size))
    job = job.distributed(exchange)
    exchange.watch(job.model, job.reduction)
    records: list[AuditRecord] = []
    check = BoundCheck(ring, job.reduction)
    audit = Auditor(job.model, ring, 1, records.append, check)
    steps = endless_steps(job, exchange.rank)
    problems = []
    for _ in range(honest_steps):
        problems += _step(job, exchange, audit, records, next(steps), None, tally)
    for _ in range(trials):
        fault = dice.choice(sorted(FAULTS))
        for _ in range(dice.randrange(3)):
            problems += _step(job, exchange, audit, records, next(steps), None, tally)
        problems += _step(job, exchange, audit, records, next(steps), fault, tally)
    return [f"{name}: {problem}" for problem in problems]


def _step(
    job: Job,
    exchange: FaultyExchange,
    audit: Auditor,
    records: list[AuditRecord],
    data: StepData,
    fault: str | None,
    tally: Counter[str],
) -> list[str]:
    """Collective: run an audited step, with or without a fault, and return its problems."""
    step = len(records) + 1
    exchange.fault, exchange.must_be_found = fault, False
    exchange.begin()
    try:
        train_step(job, exchange, audit, step, data, PhaseClock(Pulse())).total()
        text = ""
    except AuditMismatch as error:
        text = str(error)
    if fault is None:
        tally["audited parameter-steps"] += records[-1].parameters
        return [f"false alarm at step {step}: {text}"] if text else []
    if not exchange.must_be_found:
        tally["faults that changed nothing, or less than rounding does"] += 1
        return []
    tally["faults to be found"] += 1
    tally[f"faults to be found: {fault}"] += 1
    if not text:
        return [f"{fault} at step {step} in {exchange.expected} was not found"]
    named = any(f"parameter {name}, index" in text for name in exchange.expected)
    if not named or f"at step {step}" not in text:
        return [f"{fault} at step {step} in {exchange.expected} was named otherwise: {text}"]
    tally["faults found"] += 1
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=84, help="over all workloads")
    parser.add_argument("--honest-steps", type=int, default=30, help="per workload")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    inner = HorovodExchange()
    ring = inner.ring()
    dice = random.Random(arguments.seed)
    exchange = FaultyExchange(inner, ring, dice)
    tally: Counter[str] = Counter()
    problems: list[str] = []
    for number, name in enumerate(WORKLOADS):
        trials = arguments.trials * (number + 1) // len(WORKLOADS)
        trials -= arguments.trials * number // len(WORKLOADS)
        problems += run_workload(name, trials, arguments.honest_steps, exchange, ring, dice, tally)
    if inner.rank == 0:
        for problem in problems:
            print(f"PROBLEM {problem}", flush=True)
        print(f"TALLY {json.dumps(tally)}", flush=True)
    ring.close()
    inner.close()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
