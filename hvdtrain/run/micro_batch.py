"""Passes that fit in the memory of every worker's device: `--micro-batch auto`.

At the start of a run each rank makes forward and backward passes over samples of the first global
batch: over its whole share first, then, as long as memory runs out on some rank, over half as many.
All ranks take the same number of passes. Nothing is exchanged or updated meanwhile; the job is
prepared again afterwards.

The number changes how sums are rounded, so the run records it as `grad_accum_steps`, and a resume
keeps it.
"""

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hvdtrain.config import TrainConfig
from hvdtrain.data import VirtualShares
from hvdtrain.data.feeding import Feed, Loaded
from hvdtrain.data.sampler import Indices
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.exchange.gradients import parameters_of
from hvdtrain.log import counted, say
from hvdtrain.ring import split_evenly
from hvdtrain.run.prepare import prepare
from hvdtrain.run.resume import Resumed
from hvdtrain.run.script import Script, as_options
from hvdtrain.run.tasks import TaskData
from hvdtrain.topology import Topology
from hvdtrain.train.batchnorm import convert_back
from hvdtrain.train.devices import choose_device
from hvdtrain.train.job import Job
from hvdtrain.train.worker_state import buffers_of, load_buffers

# Libraries below torch report a failed allocation by their own errors.
FAILED_ALLOCATIONS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
AVERAGES = 2  # tensors of an optimizer for each parameter: Adam's, as much as usual ones have


def fit_micro_batch(
    config: TrainConfig,
    source: TaskData,
    global_batch_size: int,
    exchange: Exchange,
    topology: Topology,
    resumed: Resumed,
    script: Script | None,
) -> TrainConfig:
    """Collective: return the configuration with as few passes a step as fit in memory; those
    of a run that is resumed are kept.

    Raises AgreedFailure on the CPU, and UsageError unless a pass over one sample, or over those of
    a virtual worker, fits.
    """
    first = resumed.grad_accum_steps or config.batch.grad_accum_steps
    config = _with_passes(config, first)
    if resumed.grad_accum_steps:
        _tell(f"--grad-accum-steps={first}, as before", exchange, script)
        return config
    job = run_on_all(
        exchange,
        "micro_batch",
        lambda: _prepare_on_gpu(config, global_batch_size, source, exchange, topology, script),
    )
    passes, samples = _passes_that_fit(job, first, exchange, script)
    device = job.device
    del job  # and its model, before there is another one
    _free(device)
    largest = f"--grad-accum-steps={passes}, with {counted(samples, 'sample')} at most in a pass"
    if config.batch.virtual_workers is not None and passes > first:
        raise UsageError(
            "--micro-batch=auto: the device has no memory for a pass over the samples of a "
            "virtual worker. How many passes it makes belongs to the experiment, so it is not "
            f"changed: give {largest}, which fit"
        )
    _tell(f"{largest}, which fit", exchange, script)
    return _with_passes(config, passes)


def _with_passes(config: TrainConfig, passes: int) -> TrainConfig:
    batch = replace(config.batch, grad_accum_steps=passes, micro_batch=None)
    return replace(config, batch=batch)


def _tell(text: str, exchange: Exchange, script: Script | None) -> None:
    if exchange.rank == 0:
        line = f"micro-batch: {text}"
        say(as_options(line) if script else line)


def _prepare_on_gpu(
    config: TrainConfig,
    global_batch_size: int,
    source: TaskData,
    exchange: Exchange,
    topology: Topology,
    script: Script | None,
) -> Job:
    """Return the job of this rank. Raises UsageError if its device is the CPU."""
    if choose_device(config.model.device, topology).type == "cpu":
        raise UsageError(
            "--micro-batch=auto: the run computes on the CPU, where a process that fills the "
            "memory is ended without an error that could be caught: leave it out, or choose "
            "--grad-accum-steps"
        )
    return prepare(config, global_batch_size, source, exchange, topology, script)


def _passes_that_fit(
    job: Job, first: int, exchange: Exchange, script: Script | None
) -> tuple[int, int]:
    """Collective: return the passes a step that fit on all ranks, and the most samples of one."""
    passes = first
    while True:
        tried = run_on_all(
            exchange, "micro_batch.try", partial(_try, job, passes, exchange, script)
        )
        of_ranks = exchange.all_gather_object(tried, "hvdtrain.micro_batch")
        most = max(samples for samples, _ in of_ranks)
        if all(fits for _, fits in of_ranks):
            return passes, most
        if most <= 1:
            raise UsageError(
                "--micro-batch=auto: the device has no memory for a forward and backward pass over "
                "a single sample. Try a smaller model, --grad-checkpointing or --amp=bf16"
            )
        passes *= 2


def _try(job: Job, passes: int, exchange: Exchange, script: Script | None) -> tuple[int, bool]:
    """Return the samples of this rank's largest pass, and whether it fits in memory."""
    first_batch = next(iter(job.sampler.global_batches(0)))
    loaded, samples = largest_pass(replace(job.feed, micro_batches=passes), first_batch, exchange)
    if loaded is None:
        return 0, True
    with _as_before(job):
        try:
            _make_passes(job, loaded, exchange, script)
            fits = True
        except RuntimeError as error:
            fits = False
            if not is_out_of_memory(error):
                raise
    return samples, fits


def largest_pass(feed: Feed, batch: Indices, exchange: Exchange) -> tuple[Loaded | None, int]:
    """Return the largest part of a global batch that this rank computes in one pass, and how many
    samples it has; None if it has no part.
    """
    data = feed.step(batch, exchange.rank)
    cuts = [batch[part] for part in split_evenly(len(batch), feed.micro_batches)]
    sizes = [len(feed.shares.of(cuts[number], share)) for share, number in data.passes]
    if not any(sizes):
        return None, 0
    return next(itertools.islice(data.batches, sizes.index(max(sizes)), None)), max(sizes)


def _make_passes(job: Job, loaded: Loaded, exchange: Exchange, script: Script | None) -> None:
    """Make two passes over a batch, the second with the gradients of the first there."""
    reserved = _reserve(job, exchange)
    for _ in range(2):
        batch = loaded.on(job.device)
        with job.update.autocast():
            loss = trial_loss(job, batch, script)
        job.update.scale(loss).backward()
        del batch, loss
    torch.accelerator.synchronize(job.device)
    del reserved


def trial_loss(job: Job, batch: Any, script: Script | None) -> torch.Tensor:
    """Return the loss of a batch, of the task or of the script's function. Raises UsageError."""
    if script is None:
        return job.task.loss(job.model, batch).loss
    assert script.trial_loss is not None
    loss: Any = script.trial_loss(job.model, batch)
    is_tensor = isinstance(loss, torch.Tensor)
    if is_tensor and loss.numel() == 1 and loss.requires_grad:
        return loss  # type: ignore[no-any-return]
    shown = f"a tensor of shape {list(loss.shape)}" if is_tensor else repr(loss)
    raise UsageError(
        f"hvdtrain.Loop: trial_loss returned {shown:.80}: expected the loss of the batch, a tensor "
        "of one value with a gradient"
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error is that of a device whose memory is full."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(s in text for s in FAILED_ALLOCATIONS)


def _reserve(job: Job, exchange: Exchange) -> Sequence[torch.Tensor]:
    """Return as much memory as training has besides, from its first step on: for the state of the
    optimizers, and for copies of the gradients, those to be exchanged and one by virtual worker.
    """
    trained = [p for optimizer in job.optimizers for p in parameters_of(optimizer)]
    copies = 0 if any(optimizer.state for optimizer in job.optimizers) else AVERAGES
    shares, virtual = job.feed.shares, isinstance(job.feed.shares, VirtualShares)
    copies += 1 + len(shares.of_rank(exchange.rank)) if virtual else exchange.size > 1
    return [torch.empty_like(p) for p in trained if p.requires_grad for _ in range(copies)]


@contextmanager
def _as_before(job: Job) -> Iterator[None]:
    """Give the model its gradients and buffers back afterwards, and the device its memory."""
    convert_back(job.model)  # from layers that wait for other ranks, which may have failed
    buffers, parameters = buffers_of(job.model), list(job.model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        load_buffers(job.model, buffers)
        _free(job.device)


def _free(device: torch.device) -> None:
    """Free the memory of objects that are not in use: an error refers to frames, for example."""
    gc.collect()
    torch.get_device_module(device).empty_cache()
