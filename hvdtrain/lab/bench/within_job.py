"""Benches within one job, alone or under horovodrun: step, audit, checkpoint and ring.

Steps train on synthetic data. `ring` compares our ring in Python with the all-reduce of C++
libraries: under mpi with MPI's own, called through mpi4py, and our ring also runs over MPI; under
gloo with that of torch.distributed over Gloo. All of these work in place. Horovod's is included for
information (it copies its input, and waits for its next cycle).
"""

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import distributed

from hvdtrain.audit import Auditor, Audits
from hvdtrain.audit.checks import BoundCheck
from hvdtrain.audit.compute import ComputeAudit
from hvdtrain.audit.trace import StepConditions, Tracer
from hvdtrain.errors import EXIT_OK, TrainingError, UsageError
from hvdtrain.exchange import Exchange, SingleProcess
from hvdtrain.exchange.connect import connect
from hvdtrain.exchange.gpus import OwnGpu, find_devices, find_own_gpu
from hvdtrain.lab.bench import saving
from hvdtrain.lab.bench.loops import (
    ENDLESS,
    Options,
    bare_loader_step,
    bare_step,
    make_job,
    our_step,
    run_rounds,
    script_step,
)
from hvdtrain.lab.bench.rounds import Ratio, columns, paired, plan_of, ratio_lines
from hvdtrain.lab.bench.saved_steps import IN_MEMORY, saving_steps
from hvdtrain.lab.bench.saving import Used
from hvdtrain.lab.findings import Findings, publish
from hvdtrain.log import counted
from hvdtrain.network import address_of
from hvdtrain.ring import all_reduce
from hvdtrain.ring.operations import Array
from hvdtrain.ring.transports.mpi import MpiTransport
from hvdtrain.run.process import keep_freed_memory
from hvdtrain.tensors import CPU
from hvdtrain.topology import Topology
from hvdtrain.train.interfaces import Audit

PARTS = 100
RARELY = 100  # steps between whole audits
OFTEN = 10  # steps between records of a trace
MEMORY_EVERY = 20  # steps between copies in memory
WITHOUT, PART, WHOLE = "no audit", f"1/{PARTS} at every step", "all at every step"
TRACED, COMPUTED = "trace of every step", "computation at every step"
NO_CHECKPOINTS = "no checkpoints"
OURS, VIRTUAL = "hvdtrain", "hvdtrain, virtual workers"
BARE_HOROVOD, BARE_ALONE = "bare Horovod loop", "bare single-device loop"
SCRIPT, OVER_LOADER = "hvdtrain.Loop", ", over a DataLoader"
OUR_RING, ON_GPUS = "our ring", "Horovod, on GPUs"
ITEM_BYTES = 4  # of float32


@dataclass(frozen=True)
class Measured:
    """The results of a bench within one job."""

    seconds_per_step: dict[str, list[float]]  # by contestant and round
    ratios: dict[str, Ratio]
    megabytes: float | None = None  # summed in a step
    used: Mapping[str, Used] = field(default_factory=dict)  # by process, for a checkpoint


Sum = Callable[[Array], Array]  # from this rank's values to the sum over ranks, possibly in place


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
        text = table(arguments["bench"], options, measured, workers)
        publish(Findings([text], {"device": options.device} | asdict(measured)), arguments)
    exchange.close()
    return EXIT_OK


def choose_device(wanted: str, exchange: Exchange) -> torch.device:
    """Collective: return the CPU, or this rank's GPU. Raises UsageError if it has none."""
    if wanted == CPU.type:
        return CPU
    if isinstance(exchange, SingleProcess):
        gpu = OwnGpu(next(iter(find_devices()), None))
    else:
        gpu = find_own_gpu(cast(Any, exchange))
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
    medians_s = {n: statistics.median(times) for n, times in measured.seconds_per_step.items()}
    rows = [
        (name, f"{1000 * s:.3f} ms a step", *([f"{megabytes / s:.0f} MB/s"] if megabytes else []))
        for name, s in medians_s.items()
    ]
    lines = [head, *columns(rows), *ratio_lines(measured.ratios)]
    if measured.used:
        what = f"{options.megabytes:g} MB of parameters and as many of momentum, by process:"
        lines += [f"a checkpoint of {what}", *columns(saving.rows(measured.used))]
    return "\n".join(lines)


def bench_step(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds per step by loop and round, and our ratios to other loops.

    The single-device loop runs on all workers at the same time, without exchange: the limit of
    this machine. "In step": after each step all wait for the slowest, as any exchange requires.
    Scripts with a DataLoader of their own, by `hvdtrain.Loop` and by hand, are compared too.
    """
    if options.virtual_workers is not None:
        return _bench_virtual_workers(options, exchange, options.virtual_workers)
    loops: dict[str, Exchange] = {BARE_ALONE: SingleProcess()}
    if exchange.size > 1:
        loops = {BARE_HOROVOD: exchange} | loops
    contestants = {name: bare_step(options, between) for name, between in loops.items()}
    alone, nothing = contestants[BARE_ALONE], torch.zeros(1, device=options.device)

    def in_step() -> None:
        alone()
        exchange.sum_later(nothing, "hvdtrain.bench.step")()

    if exchange.size > 1:
        contestants[f"{BARE_ALONE}, in step"] = in_step
    contestants[OURS] = our_step(make_job(options, exchange), exchange)
    scripts = {
        f"{name}{OVER_LOADER}": bare_loader_step(options, between)
        for name, between in loops.items()
    }
    our_script = f"{SCRIPT}{OVER_LOADER}"
    further = scripts | {our_script: script_step(options, exchange)}
    seconds = run_rounds(contestants | further, options, exchange)
    pairs = {name: (OURS, name) for name in contestants if name != OURS}
    pairs |= {f"{SCRIPT} to {name}": (our_script, name) for name in scripts}
    return Measured(seconds, paired(seconds, pairs))


def _bench_virtual_workers(options: Options, exchange: Exchange, virtual: int) -> Measured:
    """Collective: measure virtual workers against a step of as many passes without them."""
    passes = -(-virtual // exchange.size)
    plain = f"{OURS}, {passes} passes" if passes > 1 else OURS
    contestants = {
        VIRTUAL: our_step(make_job(options, exchange, 1, virtual), exchange),
        plain: our_step(make_job(options, exchange, passes), exchange),
    }
    seconds = run_rounds(contestants, options, exchange)
    return Measured(seconds, paired(seconds, {plain: (VIRTUAL, plain)}))


def bench_audit(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds per step without audits, with 1/PARTS and with all of the
    model audited at every step, with a trace of every step, and with an audit of the computation.
    Raises UsageError for a single process, which exchanges nothing.
    """
    if exchange.size < 2:
        raise UsageError("bench audit: one worker exchanges nothing: use hvdtrain launch -np 2")
    job, ring = make_job(options, exchange), exchange.ring()
    audited = partial(Auditor, job.model, ring, every=1)
    setting = StepConditions(ENDLESS, torch.get_num_threads())
    one_host = [""] * exchange.size
    audits: dict[str, Audit] = {
        WITHOUT: Audits(),
        PART: audited(check=BoundCheck(ring, job.reduction), parts=PARTS),
        WHOLE: audited(check=BoundCheck(ring, job.reduction), parts=1),
        TRACED: Tracer(job, exchange, setting, lambda step: True, lambda record: None),
        COMPUTED: ComputeAudit(
            job, exchange, one_host, every=1, seed=0, on_record=lambda step, agree: None
        ),
    }
    contestants = {name: our_step(job, exchange, audit) for name, audit in audits.items()}
    seconds = run_rounds(contestants, options, exchange)
    ring.close()
    ratios = paired(seconds, {name: (name, WITHOUT) for name in contestants if name != WITHOUT})
    # One step in many bears the whole cost: more precise than a measurement.
    rare = {
        f"all at every {RARELY}th step": (WHOLE, RARELY),
        f"trace of every {OFTEN}th step": (TRACED, OFTEN),
        f"computation at every {RARELY}th step": (COMPUTED, RARELY),
    }
    ratios |= {name: _seldom(ratios[often], steps) for name, (often, steps) in rare.items()}
    return Measured(seconds, ratios)


def bench_checkpoint(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds per step without and with a checkpoint in every round, and
    with copies in memory; on one worker also the memory of checkpoints of `options.megabytes`.
    """
    job = make_job(options, exchange)
    step = our_step(job, exchange)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        with saving_steps(job, step, exchange, options.steps, Path(folder, "disk")) as saving_ones:
            seconds = run_rounds({NO_CHECKPOINTS: step, **saving_ones}, options, exchange)
        alone = exchange.size == 1
        memory = saving.measure(options.megabytes, Path(folder, "memory")) if alone else {}
    ratios = paired(seconds, {name: (name, NO_CHECKPOINTS) for name in saving_ones})
    ratios[f"in memory at every {MEMORY_EVERY}th step"] = _seldom(ratios[IN_MEMORY], MEMORY_EVERY)
    return Measured(seconds, ratios, used=memory)


def _seldom(ratio: Ratio, steps: int) -> Ratio:
    """Return the ratio if only one step in `steps` has the cost of each."""
    return Ratio(*(1 + (value - 1) / steps for value in astuple(ratio)))


def bench_ring(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds for a sum of `options.megabytes` of float32, and our speed
    relative to the others'. Raises UsageError for a single process.
    """
    if exchange.size < 2:
        raise UsageError("bench ring: a ring has 2 ranks or more: use hvdtrain launch -np 2")
    ring = exchange.ring()
    sums: dict[str, Sum] = {OUR_RING: lambda values: all_reduce(values, ring, out=values)}
    over_mpi = MpiTransport() if exchange.controller == "mpi" else None
    if over_mpi:
        sums["our ring over MPI"] = lambda values: all_reduce(values, over_mpi, out=values)
        sums["mpi4py Allreduce"] = over_mpi.library_sum
    else:
        sums["torch.distributed"] = _join_torch_distributed(exchange)
    sums["Horovod"] = lambda values: exchange.sum_later(
        torch.from_numpy(values), "hvdtrain.bench.sum"
    )().numpy()
    length = max(int(options.megabytes * 1e6) // ITEM_BYTES, 1)
    # Zeros stay as they are in repeated sums in place; unlike np.zeros, np.full commits the memory.
    contestants: dict[str, Callable[[], object]] = {
        name: partial(add, np.full(length, 0, np.float32)) for name, add in sums.items()
    }
    if options.device != CPU.type:

        def on_gpu(values: torch.Tensor) -> torch.Tensor:
            return exchange.sum_later(values.to(options.device), "hvdtrain.bench.sum_on_gpu")()

        sums[ON_GPUS] = lambda values: on_gpu(torch.from_numpy(values)).cpu().numpy()
        contestants[ON_GPUS] = partial(on_gpu, torch.zeros(length, device=options.device))
    for name, add in sums.items():
        _check_sum(name, add, length, exchange)
    seconds = run_rounds(contestants, options, exchange)
    ring.close()
    if over_mpi:
        over_mpi.close()
    else:
        distributed.destroy_process_group()
    pairs = {f"our speed / {name}": (name, OUR_RING) for name in sums if name != OUR_RING}
    return Measured(seconds, paired(seconds, pairs), megabytes=length * ITEM_BYTES / 1e6)


def _join_torch_distributed(exchange: Exchange) -> Sum:
    """Collective: return the sum by torch's own Gloo group, over Horovod's interface."""
    interface = os.environ["HOROVOD_GLOO_IFACE"]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store_class = distributed.TCPStore  # type: ignore[attr-defined]  # public, but not listed
    store: Any = None
    if exchange.rank == 0:
        address = address_of(interface)
        assert address is not None  # Horovod has connected over it
        store = store_class(address, 0, is_master=True, wait_for_workers=False)
    endpoint = store and (store.host, store.port)
    host, port = exchange.broadcast_object(endpoint, "hvdtrain.bench.store")
    distributed.init_process_group(
        "gloo",
        store=store or store_class(host, port, is_master=False),
        rank=exchange.rank,
        world_size=exchange.size,
        timeout=timedelta(seconds=60),
    )

    def torch_sum(values: Array) -> Array:
        distributed.all_reduce(torch.from_numpy(values))
        return values

    return torch_sum


def _check_sum(name: str, add: Sum, length: int, exchange: Exchange) -> None:
    """Collective: raise TrainingError unless the contestant sums correctly."""
    pattern = np.arange(length, dtype=np.int64) % 251  # such sums are exact in float32
    total = add(((exchange.rank + 1) * pattern).astype(np.float32))
    if not np.array_equal(total, pattern * sum(range(1, exchange.size + 1))):
        raise TrainingError(f"{name}: the sum over {exchange.size} ranks is wrong")


BENCHES: dict[str, Callable[[Options, Exchange], Measured]] = {
    "step": bench_step,
    "checkpoint": bench_checkpoint,
    "ring": bench_ring,
    "audit": bench_audit,
}
