"""The peers of `hvdtrain bench scaling`: training loops as one would write them by hand.

They do less than our step: no metrics, no sums over ranks, no checks. They log the time of a step
as often as `train` does.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.config import RunConfig
from hvdtrain.data import Dataset, Shares, TensorSplit
from hvdtrain.data.synthetic import make_synthetic
from hvdtrain.lab.systems.contract import Parameters, Place, Strategy
from hvdtrain.lab.systems.messages import join_group, leave_group
from hvdtrain.lab.systems.work import GlobalBatch, Work, trained
from hvdtrain.run.memory import keep_freed_memory

LOG_INTERVAL = RunConfig.log_interval  # steps


def step_log(folder: Path, number: int) -> Path:
    """Return the file to which a process logs its steps: a line of number and seconds each."""
    return folder / f"steps-{number}.txt"


class BareLoop(Strategy):
    """A loop of forward, backward and step on this process's share of each global batch."""

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(work, place)
        self.model: nn.Module = work.model
        self._optimizer = work.optimizer(trained(work.model))
        self._shares = Shares(place.workers)
        self._steps = 0
        self._log = step_log(Path(place.spec.folder), place.number).open("w", encoding="utf-8")

    def step(self, batch: GlobalBatch) -> None:
        own = self._shares.of(batch.indices, self.place.number)
        inputs, labels = self.work.dataset.train.batch(own, batch.epoch)
        self._optimizer.zero_grad()
        functional.cross_entropy(self.model(inputs), labels).backward()
        self._optimizer.step()
        self._steps += 1
        if self._steps % LOG_INTERVAL == 0:
            self._log.write(f"{self._steps} {time.time()}\n")
            self._log.flush()

    def parameters(self) -> Parameters:
        """Return nothing, as they are not compared."""
        return {}


class PlainDdp(BareLoop):
    """A loop with torch's DistributedDataParallel over Gloo, with default settings."""

    what = "torch DistributedDataParallel, over Gloo"

    def __init__(self, work: Work, place: Place) -> None:
        """Collective: join the group."""
        super().__init__(work, place)
        join_group(place)
        self.model = DistributedDataParallel(work.model)

    def close(self) -> None:
        leave_group()


class Independent(BareLoop):
    """Independent loops at the same time: the limit of this machine.

    They use the memory settings and the optimizer's step of `train`, which are the fastest known.
    """

    what = "independent processes at the same time, without exchange"

    def __init__(self, work: Work, place: Place) -> None:
        """Collective: start at the same time on all ranks, without further exchange."""
        keep_freed_memory()
        super().__init__(work, place)
        self._optimizer = work.tuned_optimizer()
        join_group(place)
        leave_group()


NAME = "hvdtrain.lab.bench.peers:images"  # value of --data
SHAPE, CLASSES = (1, 28, 28), 10
SAMPLES = 1 << 22  # computed from a small pool, so that they need no memory each
VALID_SAMPLES = 64


def images() -> Dataset:
    """Return the data set: SAMPLES float32 images in 10 classes."""
    made = make_synthetic(f"synthetic:1x28x28,samples={SAMPLES}", 0, torch.float32)
    inputs, labels = made.valid.batch(np.arange(VALID_SAMPLES))
    return replace(made, valid=TensorSplit(inputs, labels))
