"""`hvdtrain train`: puts the parts together, runs the loop, leaves a summary however it ends."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hvdtrain.audit import GradientAudit, NoAudit
from hvdtrain.cli.console import header
from hvdtrain.cli.failure import leave_at_once, tell
from hvdtrain.cli.options import as_flat_dict
from hvdtrain.cli.report import NoReport, Report
from hvdtrain.cli.signals import StopSignals
from hvdtrain.config import TrainConfig
from hvdtrain.data import GlobalBatchSampler, load_dataset
from hvdtrain.errors import EXIT_OK, PreflightError, Stopped, UsageError
from hvdtrain.exchange import Exchange, SingleProcess, agree
from hvdtrain.log import say
from hvdtrain.models import build_model, fit_images
from hvdtrain.optimizers import build_optimizer
from hvdtrain.parameters import params_sha256
from hvdtrain.run_directory import RunDirectory
from hvdtrain.schedule import make_schedule, scaled_lr
from hvdtrain.topology import Topology
from hvdtrain.training import Job, train

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def run(config: TrainConfig, topology: Topology) -> int:
    """Collective: one training run; its failures are told here. Returns the exit code."""
    signals = StopSignals()
    exchange = _connect(topology)
    try:
        with exchange.peer_failures():
            job = agree(exchange, "prepare", lambda: _prepare(config, exchange, topology))
            report = agree(exchange, "output", lambda: _open_report(config, job, exchange))
        _train(config, job, exchange, report, signals)
        exchange.close()
    except Exception as error:
        exit_code = tell(error, topology)
        if exchange.rank > 0:
            exchange.abandon()  # rank 0 hears of it, and can write its summary
        if exchange.size > 1:
            leave_at_once(exit_code)
        return exit_code
    return EXIT_OK


def _train(
    config: TrainConfig,
    job: Job,
    exchange: Exchange,
    report: Report | NoReport,
    signals: StopSignals,
) -> None:
    """Collective: train what was prepared, and leave a summary however it ends."""

    def if_stuck(error: Stopped) -> None:
        report.fail(error)
        leave_at_once(error.exit_code)

    signals.if_stuck = if_stuck
    try:
        with exchange.peer_failures():
            job = replace(job, optimizer=exchange.distribute(job.optimizer, job.model))
            audit = _audit(config, job, exchange, report)
            outcome = train(job, exchange, audit, report)
            audit.close()
        report.finish(outcome, params_sha256(job.model))
    except BaseException as error:
        report.fail(error)
        raise
    finally:
        report.close()


def _connect(topology: Topology) -> Exchange:
    """Collective: join the other workers, if a launcher started this process as one of several."""
    if not topology.launched:
        return SingleProcess()
    try:
        from hvdtrain.comm import HorovodExchange
    except ImportError as error:
        raise PreflightError(
            f"Horovod cannot be loaded here: {error}. Run launch/setup, or install "
            "hvdtrain[distributed]"
        ) from error
    return HorovodExchange()


def _prepare(config: TrainConfig, exchange: Exchange, topology: Topology) -> Job:
    """Everything that one rank can do, and find wrong, by itself."""
    device = _choose_device(config.model.device, topology)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    dtype = DTYPES[config.model.dtype]
    dataset = load_dataset(config.data.data, Path(config.data.data_dir), config.run.seed, dtype)
    dataset = fit_images(dataset, config.model.model)
    _seed(config.run.seed)
    model = build_model(config.model.model, dataset.shape, dataset.classes, dtype).to(device)
    _seed(_own_seed(config.run.seed, exchange.rank))  # dropout differs between ranks
    batch_size = config.batch.resolve(exchange.size)
    sampler = GlobalBatchSampler(len(dataset.train), batch_size, config.run.seed)
    settings = config.optimizer
    lr = scaled_lr(settings.lr, settings.scale_lr, batch_size, settings.lr_base_batch_size)
    total_steps = config.schedule.total_steps(sampler.steps_per_epoch)
    warmup_steps = round(min(config.schedule.warmup_epochs * sampler.steps_per_epoch, total_steps))
    return Job(
        model=model,
        optimizer=build_optimizer(
            settings.opt, model, lr, settings.momentum, settings.weight_decay
        ),
        dataset=dataset,
        sampler=sampler,
        schedule=make_schedule(config.schedule.sched, lr, total_steps, warmup_steps),
        total_steps=total_steps,
        device=device,
        log_interval=config.run.log_interval,
        eval_interval=config.run.eval_interval,
    )


def _choose_device(wanted: str, topology: Topology) -> torch.device:
    """One device per local rank. Raises UsageError when there are too few."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and visible == 0):
        return torch.device("cpu")
    if topology.local_rank >= visible:
        raise UsageError(
            f"--device={wanted}: local rank {topology.local_rank} has no CUDA device, {visible} "
            f"visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). "
            "Start as many workers per host as it has devices, or use --device cpu"
        )
    torch.cuda.set_device(topology.local_rank)
    return torch.device("cuda", topology.local_rank)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _own_seed(seed: int, rank: int) -> int:
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] >> 1)


def _open_report(config: TrainConfig, job: Job, exchange: Exchange) -> Report | NoReport:
    """Rank 0 claims the run directory and prints the header."""
    if exchange.rank != 0:
        return NoReport()
    directory = RunDirectory(Path(config.run.output), config.experiment)
    resolved = as_flat_dict(config) | {
        "global_batch_size": job.sampler.global_batch_size,
        "batch_size": None,
        "experiment": config.experiment,
    }
    directory.write_config(resolved)
    say(header(job, exchange, config.model.model, config.optimizer.opt))
    return Report(directory, job, exchange)


def _audit(
    config: TrainConfig, job: Job, exchange: Exchange, report: Report | NoReport
) -> GradientAudit | NoAudit:
    """Collective: connect the ring, where there is something to audit."""
    if config.audit.audit_every == 0 or exchange.size == 1:
        return NoAudit()
    ring = exchange.ring()
    return GradientAudit(job.model, ring, config.audit.audit_every, report.audited)
