"""Functions for a script with its own training loop: `init`, `distribute` and `clip_grad_norm_`.

    workers = hvdtrain.init()
    optimizer = hvdtrain.distribute(model, optimizer)
    sampler, shares = hvdtrain.GlobalBatchSampler(...), hvdtrain.Shares(workers.size)

In the loop, each rank takes the samples `shares.of(batch, workers.rank)` of a global batch. Its
loss is their *sum* times `workers.size / len(batch)`. See examples/your_script_distributed.py.

Between `backward()` and `optimizer.step()` the gradients are being reduced. Clip them with
`clip_grad_norm_`. Before any other code reads or changes them, call
`workers.reduce_gradients(optimizer)`, which waits until they are reduced.
"""

import os
from functools import partial
from typing import Literal

import torch

from hvdtrain.cgroups import usable_cores
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange, Reduction, join, joined
from hvdtrain.exchange.buckets import suitable_bucket_bytes
from hvdtrain.exchange.connect import connect
from hvdtrain.exchange.gradients import parameters_of
from hvdtrain.log import report_uncaught
from hvdtrain.topology import Topology


def init(single_worker: bool = False) -> Exchange:
    """Collective: join the other workers of this job; without a launcher, run as a single process.

    Returns the exchange: `rank`, `size` and the collectives over all workers. A second call returns
    the same object. With several workers each gets one compute thread, as in `hvdtrain train`,
    unless OMP_NUM_THREADS is set. Raises PreflightError if Horovod does not work, and UsageError
    under a launcher whose processes Horovod does not connect, such as torchrun, or alone in a job
    of Slurm that has several tasks, unless that is meant (`single_worker`). After this call an
    uncaught hvdtrain error ends the script with one message and the exit code of that error.
    """
    report_uncaught()
    return join(partial(_connect, single_worker))


def _connect(single_worker: bool) -> Exchange:
    topology = Topology.from_environment()
    workers = connect(topology.by_itself() if single_worker else topology)
    if "OMP_NUM_THREADS" not in os.environ:
        # Workers of a host would compete for its cores, and threads of one for a container's quota.
        most = 1 if workers.size > 1 else usable_cores()
        torch.set_num_threads(min(most, torch.get_num_threads()))
    return workers


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    grad_accum_steps: int = 1,
    bucket_bytes: int | Literal["auto"] = "auto",
) -> torch.optim.Optimizer:
    """Collective: broadcast rank 0's parameters, buffers and optimizer state to every rank.

    Returns the same optimizer, whose `step` now averages gradients over ranks first. Its state,
    parameter groups and hooks, and schedulers built on it, remain valid. `grad_accum_steps`: number
    of backward passes before each step. `bucket_bytes`: gradients below this size are reduced
    together; "auto": 1 MiB, and more from 17 ranks on. Sparse gradients become dense.

    Raises UsageError before `init` or for an unsupported optimizer or size; AgreedFailure, naming
    the ranks, if one has other arguments than rank 0, or has built another model or optimizer, or
    in another order; and TrainingError if parameters differ afterwards.
    """
    workers = _workers("distribute")
    if bucket_bytes == "auto":
        bucket_bytes = suitable_bucket_bytes(workers.ring_size)
    elif type(bucket_bytes) is not int or bucket_bytes < 0:
        raise UsageError(
            f"distribute: bucket_bytes={bucket_bytes!r}: must be 'auto', or an int >= 0"
        )
    reduction = Reduction(bucket_bytes=bucket_bytes)
    return workers.distribute(optimizer, model, grad_accum_steps, reduction)


def clip_grad_norm_(
    optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Collective: reduce all gradients of `optimizer` over ranks, then clip their total norm.

    Replaces `torch.nn.utils.clip_grad_norm_` between `backward()` and `optimizer.step()`. Returns
    the norm before clipping, the same on every rank. Raises UsageError before `init` and
    `distribute`.
    """
    _workers("clip_grad_norm_").reduce_gradients(optimizer)
    return torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), max_norm, norm_type)


def _workers(name: str) -> Exchange:
    workers = joined()
    if workers is None:
        raise UsageError(f"hvdtrain.{name}: call hvdtrain.init() first")
    return workers
