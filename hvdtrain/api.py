"""hvdtrain in a training loop of one's own: `init`, `distribute` and `clip_grad_norm_`.

    workers = hvdtrain.init()
    optimizer = hvdtrain.distribute(model, optimizer)
    sampler, shares = hvdtrain.GlobalBatchSampler(...), hvdtrain.Shares(workers.size)

and in the loop, of each global batch, the samples of `shares.of(batch, workers.rank)`, and as loss
their *sum*, times `workers.size / len(batch)`. The README shows a whole script.

Between `backward()` and `optimizer.step()` gradients are on their way: to clip them there is
`clip_grad_norm_`, and before anything else changes or reads them `workers.reduce_gradients(
optimizer)` waits until they are reduced.
"""

from __future__ import annotations

import os

import torch

from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange, join, joined
from hvdtrain.exchange.connect import connect
from hvdtrain.log import report_uncaught
from hvdtrain.topology import Topology


def init() -> Exchange:
    """Collective: join the other workers of this job; without a launcher, a single process.

    Returns who this is (`rank`, `size`) and what it can do together with the others. A second call
    returns the same. Several workers get one compute thread each, as in `hvdtrain train`, unless
    OMP_NUM_THREADS says otherwise. Raises PreflightError where Horovod does not work, and
    UsageError under a launcher whose processes it does not connect, such as torchrun. From now on
    an error of hvdtrain that the script does not catch ends it with one message, and with the exit
    code of that error.
    """
    report_uncaught()
    return join(_connect)


def _connect() -> Exchange:
    workers = connect(Topology.from_environment())
    if workers.size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # else those of one host take the cores from each other
    return workers


def distribute(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, grad_accum_steps: int = 1
) -> torch.optim.Optimizer:
    """Collective: spread rank 0's parameters, buffers and optimizer state to every rank.

    Returns the same optimizer, whose `step` averages gradients over ranks first. Its state and
    groups, hooks, and schedulers built before stay in force. `grad_accum_steps`: backward passes
    before each step. Sparse gradients become dense. Raises UsageError before `init` and for an
    optimizer that cannot be used, and TrainingError, naming the ranks, if parameters differ
    afterwards.
    """
    return _workers("distribute").distribute(optimizer, model, grad_accum_steps)


def clip_grad_norm_(
    optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Collective: clip the norm of all gradients of `optimizer` once they are reduced over ranks.

    Takes the place of `torch.nn.utils.clip_grad_norm_` between `backward()` and
    `optimizer.step()`. Returns the norm before clipping, the same on every rank. Raises UsageError
    before `init` and `distribute`.
    """
    _workers("clip_grad_norm_").reduce_gradients(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def _workers(name: str) -> Exchange:
    workers = joined()
    if workers is None:
        raise UsageError(f"hvdtrain.{name}: call hvdtrain.init() before")
    return workers
