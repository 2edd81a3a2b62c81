"""Benches within one job, alone or under horovodrun: step, audit, checkpoint and ring.

Steps train on synthetic data. `ring` compares our ring in Python with the all-reduce of C++
libraries: under mpi with MPI's own, called through mpi4py, and our ring also runs over MPI; under
gloo with that of torch.distributed over Gloo. All of these work in place. Horovod's is included for
information (it copies its input, and waits for its next cycle).
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import functional

from hvdtrain.audit import Auditor, Audits
from hvdtrain.audit.checks import BoundCheck
from hvdtrain.audit.compute import ComputeAudit
from hvdtrain.audit.trace import StepConditions, Tracer
from hvdtrain.data import Shares, SharesLike, VirtualShares
from hvdtrain.data.feeding import Feed, to_device
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.exchange import AVERAGE, Exchange, SingleProcess
from hvdtrain.exchange.connect import connect
from hvdtrain.exchange.gpus import CPU, GpuExchange, OwnGpu, find_devices, find_own_gpu
from hvdtrain.files import write_json
from hvdtrain.lab.bench import saving
from hvdtrain.lab.bench.own_script import bare_loader_step, script_step
from hvdtrain.lab.bench.ratios import Ratio, columns, ratio, ratio_lines
from hvdtrain.lab.bench.ring_speed import bench_ring
from hvdtrain.lab.bench.rounds import ENDLESS, Measured, Options, endless_steps, plan_of, run_rounds
from hvdtrain.lab.systems.work import Work, WorkSpec
from hvdtrain.log import counted, say
from hvdtrain.run.process import keep_freed_memory
from hvdtrain.topology import Topology
from hvdtrain.train.checkpoint import Checkpoints
from hvdtrain.train.job import Intervals, Job
from hvdtrain.train.loop import State
from hvdtrain.train.metering import Meter
from hvdtrain.train.state import capture
from hvdtrain.train.step import Audit, train_step
from hvdtrain.train.update import Update

DATA = "synthetic:1x28x28"
LR, MOMENTUM = 0.01, 0.9
NO_AUDITS = Audits()
PARTS = 100
RARELY = 100  # steps between whole audits
OFTEN = 10  # steps between records of a trace
WITHOUT, PART, WHOLE = "no audit", f"1/{PARTS} at every step", "all at every step"
TRACED, COMPUTED = "trace of every step", "computation at every step"
NO_CHECKPOINTS, BACKGROUND, WAITED = "no checkpoints", "in the background", "waited for"
OURS, VIRTUAL = "hvdtrain", "hvdtrain, virtual workers"
SCRIPT, OVER_LOADER = "hvdtrain.Loop", ", over a DataLoader"


def run(arguments: dict[str, Any], topology: Topology) -> int:
    """Collective: measure, print medians and ratios, and return the exit code."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as train does
    exchange = connect(topology)
    options = plan_of(Options, arguments)
    options = replace(options, device=str(choose_device(options.device, exchange)))
    measured = BENCHES[arguments["bench"]](options, exchange)
    if exchange.rank == 0:
        workers = f"{counted(exchange.size, 'worker')} ({exchange.controller})"
        say(table(arguments["bench"], options, measured, workers))
        write_json(arguments["json"], {"device": options.device} | asdict(measured))
    exchange.close()
    return EXIT_OK


def choose_device(wanted: str, exchange: Exchange) -> torch.device:
    """Collective: return the CPU, or this rank's GPU. Raises UsageError if it has none."""
    if wanted == CPU.type:
        return CPU
    if isinstance(exchange, SingleProcess):
        gpu = OwnGpu(next(iter(find_devices()), None))
    else:
        gpu = find_own_gpu(cast(GpuExchange, exchange))
    if gpu.device is None:
        raise UsageError(f"--device={wanted}: {gpu.why or 'no GPU is visible'}; use --device cpu")
    return gpu.device


def table(bench: str, options: Options, measured: Measured, workers: str) -> str:
    """Return the table of medians and ratios."""
    what = f"{options.model}, {counted(options.batch_size, 'sample')} a worker"
    if megabytes := measured.megabytes:
        what = f"sum of {megabytes:g} MB of float32"
    head = (
        f"{bench}: {what}, {workers}, on {options.device}, one thread each; "
        f"{counted(options.rounds, 'round')} of {counted(options.steps, 'step')} in turns"
    )
    rows = []
    for name, times in measured.seconds_per_step.items():
        seconds = statistics.median(times)
        speed = [f"{megabytes / seconds:.0f} MB/s"] if megabytes else []
        rows.append([name, f"{1000 * seconds:.3f} ms a step", *speed])
    lines = [head, *columns(rows), *ratio_lines(measured.ratios)]
    if measured.used:
        what = f"{options.megabytes:g} MB of parameters and as many of momentum, by process:"
        lines += [f"a checkpoint of {what}", *columns(saving.rows(measured.used))]
    return "\n".join(lines)


def make_work(options: Options, workers: int) -> Work:
    """Return the work of `options.batch_size` samples per worker and step."""
    samples = options.batch_size * workers
    spec = WorkSpec(options.model, DATA, "", samples, ENDLESS, "float32", 0, LR, MOMENTUM)
    work = Work(spec)
    work.model.to(options.device)
    return work


def make_job(
    options: Options,
    exchange: Exchange,
    micro_batches: int = 1,
    virtual_workers: int | None = None,
    build: Callable[[], torch.nn.Module] | None = None,
) -> Job:
    """Collective: return the work as a job of `train`, with a distributed optimizer.

    `build`: makes another model.
    """
    work, device = make_work(options, exchange.size), torch.device(options.device)
    if build is not None:
        work.model = build()
    shares: SharesLike = Shares(exchange.size)
    if virtual_workers is not None:
        shares = VirtualShares(Shares(virtual_workers), shares.sizes(virtual_workers))
    job = Job(
        model=work.model,
        optimizers=(work.tuned_optimizer(),),
        update=Update(work.model, device),
        task=work.task,
        data=work.task.build_data(),
        feed=Feed(work.dataset.train, work.sampler, shares, micro_batches, everyone=False),
        valid_shares=shares,
        schedule=lambda step: LR,
        total_steps=ENDLESS,
        device=device,
        intervals=Intervals(log=10, evaluation=1),
    )
    return job.distributed(exchange)


def bare_step(options: Options, exchange: Exchange) -> Callable[[], None]:
    """Return the step of a handwritten loop, a collective over several ranks."""
    work = make_work(options, exchange.size)
    batches, shares, optimizer = work.batches(), Shares(exchange.size), work.tuned_optimizer()
    if exchange.size > 1:
        optimizer = exchange.distribute(optimizer, work.model, reduction=AVERAGE)

    def step() -> None:
        indices = shares.of(next(batches).indices, exchange.rank)
        inputs, labels = to_device(work.dataset.train.batch(indices), torch.device(options.device))
        optimizer.zero_grad()
        functional.cross_entropy(work.model(inputs), labels).backward()
        optimizer.step()

    return step


def our_step(job: Job, exchange: Exchange, audit: Audit = NO_AUDITS) -> Callable[[], None]:
    """Return the step of `train`, a collective: weighted loss, sums over ranks, schedule, clock."""
    steps = endless_steps(job, exchange.rank)
    meter = Meter(exchange, job.sampler.samples, job.task.metrics)
    numbers = itertools.count(1)

    def step() -> None:
        number = next(numbers)
        meter.begin_step(number)
        data = next(steps)
        sums = train_step(job, exchange, audit, number, data, meter.clock)
        meter.end_step(sums, number, data.samples)
        if number % job.intervals.log == 0:
            meter.read_interval()

    return step


def bench_step(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds per step by loop and round, and our ratios to other loops.

    The single-device loop runs on all workers at the same time, without exchange: the limit of
    this machine. "In step": after each step all wait for the slowest, as any exchange requires.
    Scripts with a DataLoader of their own, by `hvdtrain.Loop` and by hand, are compared too.
    """
    if options.virtual_workers is not None:
        return _bench_virtual_workers(options, exchange, options.virtual_workers)
    contestants, scripts, single = {}, {}, SingleProcess()
    if exchange.size > 1:
        contestants["bare Horovod loop"] = bare_step(options, exchange)
        horovod = bare_loader_step(options, make_work(options, exchange.size), exchange)
        scripts["bare Horovod loop"] = horovod
    alone = bare_step(options, single)
    contestants["bare single-device loop"] = alone
    scripts["bare single-device loop"] = bare_loader_step(options, make_work(options, 1), single)
    nothing = torch.zeros(1, device=options.device)

    def in_step() -> None:
        alone()
        exchange.sum_later(nothing, "hvdtrain.bench.step")()

    if exchange.size > 1:
        contestants["bare single-device loop, in step"] = in_step
    contestants[OURS] = our_step(make_job(options, exchange), exchange)
    loop_step = script_step(options, make_work(options, exchange.size), exchange)
    over_loader = {
        f"{name}{OVER_LOADER}": step for name, step in (scripts | {SCRIPT: loop_step}).items()
    }
    seconds = run_rounds(contestants | over_loader, options, exchange)
    ratios = {name: ratio(seconds[OURS], seconds[name]) for name in contestants if name != OURS}
    ours = seconds[f"{SCRIPT}{OVER_LOADER}"]
    for name in scripts:
        of_script = f"{SCRIPT} to {name}{OVER_LOADER}"
        ratios[of_script] = ratio(ours, seconds[f"{name}{OVER_LOADER}"])
    return Measured(seconds, ratios)


def _bench_virtual_workers(options: Options, exchange: Exchange, virtual: int) -> Measured:
    """Collective: measure virtual workers against a step of as many passes without them."""
    passes = -(-virtual // exchange.size)
    plain = f"{OURS}, {passes} passes" if passes > 1 else OURS
    contestants = {
        VIRTUAL: our_step(make_job(options, exchange, 1, virtual), exchange),
        plain: our_step(make_job(options, exchange, passes), exchange),
    }
    seconds = run_rounds(contestants, options, exchange)
    return Measured(seconds, {plain: ratio(seconds[VIRTUAL], seconds[plain])})


def bench_audit(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds per step without audits, with 1/PARTS and with all of the
    model audited at every step, with a trace of every step, and with an audit of the computation.
    Raises UsageError for a single process, which exchanges nothing.
    """
    if exchange.size < 2:
        raise UsageError("bench audit: one worker exchanges nothing: use hvdtrain launch -np 2")
    job = make_job(options, exchange)
    ring = exchange.ring()
    contestants = {WITHOUT: our_step(job, exchange)}
    for name, parts in ((PART, PARTS), (WHOLE, 1)):
        check = BoundCheck(ring, job.reduction)
        audit = Auditor(job.model, ring, every=1, check=check, parts=parts)
        contestants[name] = our_step(job, exchange, audit)
    setting = StepConditions(ENDLESS, torch.get_num_threads())
    tracer = Tracer(job, exchange, setting, lambda step: True, lambda record: None)
    contestants[TRACED] = our_step(job, exchange, tracer)
    one_host, every, seed = [""] * exchange.size, 1, 0
    computed = ComputeAudit(job, exchange, one_host, every, seed, lambda step, agree: None)
    contestants[COMPUTED] = our_step(job, exchange, computed)
    seconds = run_rounds(contestants, options, exchange)
    ring.close()
    ratios = {n: ratio(seconds[n], seconds[WITHOUT]) for n in contestants if n != WITHOUT}
    # One step in many bears the whole cost: more precise than a measurement.
    rare = {
        f"all at every {RARELY}th step": (WHOLE, RARELY),
        f"trace of every {OFTEN}th step": (TRACED, OFTEN),
        f"computation at every {RARELY}th step": (COMPUTED, RARELY),
    }
    for name, (often, steps) in rare.items():
        ratios[name] = Ratio(*(1 + (value - 1) / steps for value in astuple(ratios[often])))
    return Measured(seconds, ratios)


def bench_checkpoint(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds per step without and with a checkpoint in every round; on one
    worker also the memory of checkpoints of `options.megabytes`.
    """
    job = make_job(options, exchange)
    step = our_step(job, exchange)

    def saves(checkpoints: Checkpoints, wait: bool) -> Callable[[], None]:
        numbers, meter = itertools.count(1), Meter(exchange, job.sampler.samples)

        def step_and_save() -> None:
            step()
            number = next(numbers)
            if number % options.steps != options.steps // 2:  # in the middle of a round
                return
            snapshot = capture(job, State(meter, number, number), exchange, {})
            if snapshot is not None:
                checkpoints.save(snapshot, is_best=False)
                if wait:
                    checkpoints.wait()

        return step_and_save

    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        checkpoints = Checkpoints(Path(folder), keep=2)
        contestants = {
            NO_CHECKPOINTS: step,
            BACKGROUND: saves(checkpoints, wait=False),
            WAITED: saves(checkpoints, wait=True),
        }
        seconds = run_rounds(contestants, options, exchange)
        checkpoints.wait()
        alone = exchange.size == 1
        memory = saving.measure(options.megabytes, Path(folder, "memory")) if alone else {}
    ratios = {n: ratio(seconds[n], seconds[NO_CHECKPOINTS]) for n in (BACKGROUND, WAITED)}
    return Measured(seconds, ratios, used=memory)


BENCHES: dict[str, Callable[[Options, Exchange], Measured]] = {
    "step": bench_step,
    "checkpoint": bench_checkpoint,
    "ring": bench_ring,
    "audit": bench_audit,
}
