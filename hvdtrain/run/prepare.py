"""Preparation of a job from its configuration: the steps that each rank takes on its own."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from hvdtrain.config import PrecisionConfig, RunConfig, ScheduleConfig, TrainConfig, plugins
from hvdtrain.config.fields import AUTO
from hvdtrain.data import GlobalBatchSampler, VirtualShares
from hvdtrain.data.feeding import Feed, in_order, may_skip, to_device
from hvdtrain.data.reading import BadSample
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange, Reduction
from hvdtrain.exchange.buckets import suitable_bucket_bytes
from hvdtrain.exchange.gradients import parameters_of
from hvdtrain.log import counted, say
from hvdtrain.models import advice_on_size, notice_on_size
from hvdtrain.models.execution import compile_forward, require_compiler, use_channels_last
from hvdtrain.ring import split_evenly
from hvdtrain.run.script import Script
from hvdtrain.run.tasks import TaskData, build_model, chosen_by, valid_batch
from hvdtrain.tasks import Task, check_sums
from hvdtrain.topology import CORES_SHARED_OUT, Topology
from hvdtrain.train.batchnorm import convert_to_sync, has_batch_norm, normalises_over_batch
from hvdtrain.train.built import built_of
from hvdtrain.train.devices import choose_device, move_state, repeat_bits
from hvdtrain.train.evaluate import in_evaluation_mode
from hvdtrain.train.job import Intervals, Job, Stateful
from hvdtrain.train.optimizers import UNSUITABLE, build_optimizer
from hvdtrain.train.portable import refuse_unreadable
from hvdtrain.train.progress import patience_of
from hvdtrain.train.recomputation import use_grad_checkpointing
from hvdtrain.train.schedules import Schedule, make_schedule, scaled_lr
from hvdtrain.train.update import Update
from hvdtrain.train.worker_state import check_model, seed_all
from hvdtrain.weights import load_pretrained

TRIED_SAMPLES = 2


def prepare(
    config: TrainConfig,
    global_batch_size: int,
    source: TaskData,
    exchange: Exchange,
    topology: Topology,
    script: Script | None = None,
) -> Job:
    """Return the job of this rank, its optimizer not distributed yet. Raises UsageError.

    `script`: has a model and optimizers of its own.
    """
    sampler = source.sampler(global_batch_size, config.run.seed, config.batch)
    device = _set_up(config, sampler.global_batch_size, exchange, topology)
    model, optimizers, schedule = _trained(config, source, exchange, device, sampler, script)
    feed = _feed(config, source, sampler, model, exchange, script)
    state, settings = script.further_state if script else (), config.optimizer
    _refuse_unreadable_state(model, optimizers, state)
    return Job(
        model=model,
        optimizers=optimizers,
        update=Update(model, device, config.precision.amp, settings.clip_grad, settings.ema_decay),
        task=source.task,
        data=source.data,
        feed=feed,
        valid_shares=source.valid_shares,
        schedule=schedule,
        total_steps=config.schedule.total_steps(sampler.steps_per_epoch),
        device=device,
        valid_batch=valid_batch(source.data.valid, config.batch, sampler.global_batch_size),
        intervals=_intervals(config.run, config.check.hash_every),
        reduction=_reduction(config.precision, exchange.ring_size),
        fingerprints=source.fingerprints,
        seed=config.run.seed,
        further_state=state,
        patience=patience_of(config.schedule.patience, config.schedule.min_delta, source.data),
        built=built_of(optimizers, state),
        save_frozen=script is None or script.save_frozen,
        gathers=script is not None and script.gathers,
    )


def _set_up(
    config: TrainConfig, global_batch_size: int, exchange: Exchange, topology: Topology
) -> torch.device:
    """Check workers and exchange, set up this process, and return the device. Raises UsageError."""
    virtual = config.batch.virtual_workers
    if config.precision.deterministic and not exchange.repeatable and virtual is None:
        raise UsageError(
            "--deterministic: with HOROVOD_FUSION_THRESHOLD="
            f"{os.environ.get('HOROVOD_FUSION_THRESHOLD')} the order of sums over {exchange.size} "
            "workers depends on timing. Unset it, or set it to 0"
        )
    device = choose_device(config.model.device, topology)
    if config.promises_bits:
        repeat_bits(device, demanded=config.precision.deterministic)
    # One thread, unless the user or the launcher has chosen another number. The launcher's depends
    # on how many workers share a host, and kernels split their sums by thread. So with virtual
    # workers only the user's number counts.
    if "OMP_NUM_THREADS" not in os.environ or (virtual and CORES_SHARED_OUT in os.environ):
        torch.set_num_threads(1)
    if virtual is not None and exchange.size > virtual:
        raise UsageError(
            f"--virtual-workers={virtual}: of {exchange.size} workers some would have none to "
            f"compute: start at most {virtual}"
        )
    if virtual is not None and virtual > global_batch_size:
        raise UsageError(
            f"--virtual-workers={virtual}: more than the samples of a global batch, which they "
            f"share out: give at most {global_batch_size}"
        )
    return device


def _trained(
    config: TrainConfig,
    source: TaskData,
    exchange: Exchange,
    device: torch.device,
    sampler: GlobalBatchSampler,
    script: Script | None,
) -> tuple[torch.nn.Module, tuple[torch.optim.Optimizer, ...], Schedule | None]:
    """Return the model on the device, its optimizers and its schedule: of the script, or else of
    the flags. Then seed each rank alone.
    """
    if script is None:
        model = _make_model(config, source, exchange, device)
        optimizer = _make_optimizer(config, source.task, model, sampler.global_batch_size)
        return model, (optimizer,), _make_schedule(config, source.task, optimizer, sampler)
    model = script.model.to(device)
    for optimizer in script.optimizers:
        move_state(optimizer)
    if config.batch.virtual_workers is not None:
        check_model(model)
    seed_all(config.run.seed, exchange.rank)
    return model, script.optimizers, None


def _feed(
    config: TrainConfig,
    source: TaskData,
    sampler: GlobalBatchSampler,
    model: torch.nn.Module,
    exchange: Exchange,
    script: Script | None,
) -> Feed:
    """Return the batches of this rank for a model, whose batch norm over all workers, if it has
    any, is converted. Raises UsageError for batches that it cannot normalise.
    """
    every = config.precision.sync_bn
    has_sync_bn = has_batch_norm(model) if every else has_batch_norm(model, torch.nn.SyncBatchNorm)
    if has_sync_bn:
        if config.batch.virtual_workers is not None:
            raise UsageError(
                "--virtual-workers: the model has layers of torch.nn.SyncBatchNorm, and virtual "
                "workers compute one after another: leave its conversion out"
            )
        convert_to_sync(model, exchange, every)
    everyone = has_sync_bn or (script is not None and script.gathers)
    feed = Feed(source.data.train, sampler, source.shares, config.batch.grad_accum_steps, everyone)
    if normalises_over_batch(model):
        _refuse_small_batches(feed, config.schedule, has_sync_bn)
    return feed


def _intervals(settings: RunConfig, hash_every: int) -> Intervals:
    return Intervals(
        log=settings.log_interval,
        evaluation=settings.eval_interval,
        evaluation_steps=settings.eval_every,
        checkpoint=settings.checkpoint_interval,
        memory=settings.memory_interval,
        hash=hash_every,
    )


def _reduction(settings: PrecisionConfig, ring_size: int) -> Reduction:
    choice, compression = settings.bucket_bytes, settings.compression
    bucket_bytes = suitable_bucket_bytes(ring_size) if choice == AUTO else int(choice)
    return Reduction("sum" if compression == "none" else "average", compression, bucket_bytes)


def _refuse_unreadable_state(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    further_state: Sequence[Stateful],
) -> None:
    """Raise UsageError for a state that no checkpoint could give back."""
    for optimizer in optimizers:
        refuse_unreadable(optimizer.state_dict(), f"the state of {type(optimizer).__name__}")
    for number, held in enumerate(further_state):
        refuse_unreadable(held.state_dict(), f"state[{number}]")
    refuse_unreadable(model.state_dict(), "the model's state")


def _make_model(
    config: TrainConfig, source: TaskData, exchange: Exchange, device: torch.device
) -> torch.nn.Module:
    """Return the model with the same initial weights on every rank; then seed each rank alone. Rank
    0 prints the notices on pretrained weights. Raises UsageError.
    """
    seed_all(config.run.seed)
    if config.model.compile:
        require_compiler(device)
    model = build_model(source.task, config).to(device)
    if config.model.pretrained is not None:
        for note in load_pretrained(model, Path(config.model.pretrained)):
            if exchange.rank == 0:
                say(f"pretrained: {note}")
    if config.model.channels_last:
        use_channels_last(model)
    if config.batch.virtual_workers is not None:
        check_model(model)
    if config.model.grad_checkpointing:
        note = use_grad_checkpointing(model, device)
        if exchange.rank == 0:
            say(f"grad checkpointing: {note}")
    if not model.training:  # what is frozen within a model that is to be trained stays so
        model.train()
    with in_evaluation_mode(model):
        _try_once(model, source, config, exchange.rank, device)
    if config.model.compile:
        compile_forward(model)
    seed_all(config.run.seed, exchange.rank)  # other dropout on each rank
    return model


def _make_optimizer(
    config: TrainConfig, task: Task, model: torch.nn.Module, batch: int
) -> torch.optim.Optimizer:
    """Return the optimizer of the task, or else that of the flags. Raises UsageError.

    `batch`: samples of a global batch, for --scale-lr.
    """
    name, settings = config.model.task, config.optimizer
    optimizer = plugins.call("--task", name, task.build_optimizer, model) if name else None
    if optimizer is None:
        return build_optimizer(
            settings.opt,
            model,
            scaled_lr(settings.lr, settings.scale_lr, batch, settings.lr_base_batch_size),
            settings.momentum,
            settings.weight_decay,
            config.precision.amp,
            nesterov=settings.nesterov,
            betas=settings.betas,
            eps=settings.opt_eps,
            decays_all=settings.decay_norm_bias,
        )
    where = f"--task={name}: build_optimizer"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{where} returned {type(optimizer).__name__}, expected a torch optimizer")
    if reason := UNSUITABLE.get(type(optimizer).__name__.lower()):
        raise UsageError(f"{where} returned {type(optimizer).__name__}, which {reason}")
    model_ids = {id(parameter) for parameter in model.parameters()}
    if foreign := sum(id(p) not in model_ids for p in parameters_of(optimizer)):
        raise UsageError(f"{where}: {counted(foreign, 'parameter')} of it are not the model's")
    return optimizer


def _make_schedule(
    config: TrainConfig, task: Task, optimizer: torch.optim.Optimizer, sampler: GlobalBatchSampler
) -> Schedule:
    """Return the learning rate of the groups that have the highest, by step. All others keep their
    ratio to it. Raises UsageError.
    """
    steps_per_epoch = sampler.steps_per_epoch
    total_steps = config.schedule.total_steps(steps_per_epoch)
    warmup_steps = round(min(config.schedule.warmup_epochs * steps_per_epoch, total_steps))
    peak = max(float(group["lr"]) for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        group["lr_scale"] = float(group["lr"]) / peak if peak else 1.0
    name, shape, min_lr = config.model.task, config.schedule.sched, config.schedule.min_lr
    factor = plugins.call("--task", name, task.build_schedule, total_steps) if name else None
    if factor is not None:
        return lambda step: peak * float(factor(step))
    if min_lr > peak:
        raise UsageError(
            f"--min-lr={min_lr}: above the learning rate of {peak:g}, from which a schedule falls"
        )
    return make_schedule(shape, peak, total_steps, warmup_steps, min_lr)


def _refuse_small_batches(feed: Feed, settings: ScheduleConfig, sync_bn: bool) -> None:
    """Raise UsageError if batch norm has only one sample at a time, or fewer, in any step."""
    sampler, shares, accum_steps = feed.sampler, feed.shares, feed.micro_batches
    batch = sampler.global_batch_size
    sizes = {batch}
    if settings.total_steps(sampler.steps_per_epoch) >= sampler.steps_per_epoch:
        sizes |= sampler.batch_sizes
    text = f"--global-batch-size={batch}: the model normalises over the batch, but"
    for size in sorted(sizes):
        for micro_batch in split_evenly(size, accum_steps):
            part = micro_batch.stop - micro_batch.start
            smallest = min(shares.sizes(part)) - shares.slack
            if sync_bn and part == 1:
                raise UsageError(
                    f"{text} a batch of {size} samples (of {sampler.samples}) is taken 1 at a time "
                    f"over all workers (--grad-accum-steps={accum_steps}). Choose another batch"
                )
            if not sync_bn and smallest < 2:
                virtual = isinstance(shares, VirtualShares)
                kind = "virtual worker" if virtual else "worker"
                advice = "Choose fewer of them" if virtual else "Add --sync-bn"
                raise UsageError(
                    f"{text} of a batch of {counted(size, 'sample')} some {kind} gets {smallest} "
                    f"at a time ({sampler.samples} samples, {counted(len(shares.weights), kind)}, "
                    f"--grad-accum-steps={accum_steps}). {advice}, or choose another batch"
                )


def _try_once(
    model: torch.nn.Module, source: TaskData, config: TrainConfig, rank: int, device: torch.device
) -> None:
    """Evaluate a few samples, so that a model that rejects its data fails before files are written.

    The model is in evaluation mode, also while they are read, as a plug-in may look at it. Running
    statistics do not change. Random generators may advance, so seed them afterwards.
    """
    name, split = config.model.task, source.data.train
    shares = source.shares.of_rank(rank)
    # To reach the share of a later rank, samples in order would be read for a long time.
    samples = min(len(split), len(source.shares.weights)) if in_order(split) else len(split)
    part = source.shares.of_all(samples, shares[0]) if shares else range(0)
    indices = np.array(part[:TRIED_SAMPLES], dtype=np.int64)
    if len(indices) == 0:
        return
    try:
        batch = to_device(plugins.call(*chosen_by(config, "data"), split.batch, indices), device)
    except BadSample as error:
        raise UsageError(str(error)) from error
    tried = len(batch[1]) if may_skip(split) else len(indices)
    if tried > 0:  # otherwise none of these samples can be read, but others may be
        used, evaluate = chosen_by(config, "model"), source.task.evaluate
        try:
            with torch.no_grad():
                sums = plugins.call(*used, lambda: evaluate(model, batch))
        except UsageError as error:
            advice = "" if name else advice_on_size(config.model.model, batch[0].shape)
            raise UsageError(f"{error}{advice}") from error
        notice = None if name else notice_on_size(config.model.model, batch[0].shape)
        if notice and rank == 0:
            say(notice)
        check_sums(sums, source.task, tried, training=False)
