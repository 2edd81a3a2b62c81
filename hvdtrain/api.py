"""hvdtrain in a training loop of one's own: `init` and `distribute`.

    workers = hvdtrain.init()
    optimizer = hvdtrain.distribute(model, optimizer)
    sampler, shares = hvdtrain.GlobalBatchSampler(...), hvdtrain.Shares(workers.size)

and in the loop, of each global batch, the samples of `shares.of(batch, workers.rank)`, and as loss
their *sum*, times `workers.size / len(batch)`. The README shows a whole script.
"""

from __future__ import annotations

import torch

from hvdtrain.cli.train import connect
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange, join, joined
from hvdtrain.topology import Topology


def init() -> Exchange:
    """Collective: join the other workers of this job; without a launcher, a single process.

    Returns who this is (`rank`, `size`) and what it can do together with the others. A second call
    returns the same. Raises PreflightError where Horovod does not work.
    """
    return join(lambda: connect(Topology.from_environment()))


def distribute(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, grad_accum_steps: int = 1
) -> torch.optim.Optimizer:
    """Collective: rank 0's parameters, buffers and optimizer state on every rank, and an optimizer
    whose `step` averages gradients over ranks first.

    `grad_accum_steps`: backward passes before each step. Raises UsageError before `init`, and
    TrainingError, naming the ranks, if parameters differ afterwards.
    """
    workers = joined()
    if workers is None:
        raise UsageError("hvdtrain.distribute: call hvdtrain.init() before")
    return workers.distribute(optimizer, model, grad_accum_steps)
