"""`hvdtrain bench NAME`: comparative measurements on this machine, in alternating rounds."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.cgroups import usable_cores
from hvdtrain.errors import UsageError
from hvdtrain.files import json_problems
from hvdtrain.launcher.horovodrun import find_controller
from hvdtrain.topology import Topology

HELP = "measure on this machine: scaling, network, start, classic, step, ring, audit, checkpoint"
DESCRIPTION = "Measure on this machine, next to comparable systems, in alternating rounds."
WITHIN_A_JOB = {  # what is measured, rounds, and steps per round
    "step": ("the training step against hand-written loops", 60, 10),
    "checkpoint": ("steps with against steps without saving, and memory against torch.save", 9, 50),
    "ring": (
        "the reference ring against the all-reduces of MPI or torch.distributed, and Horovod",
        15,
        3,
    ),
    "audit": ("steps with against steps without audits", 30, 10),
}
OF_JOBS = {  # help, description, and the default of --time-limit-s
    "scaling": (
        "samples/s for N = 1..P, against DDP and the limit",
        """\
Measure weak and strong scaling on this machine for N = 1..P: complete runs of `hvdtrain train`
against torch's DistributedDataParallel over Gloo, and against the machine's limit, N concurrent
processes that exchange nothing. All train the same model on the same images, with one compute
thread each. They take turns of a few seconds, each while the others are stopped, and ratios are
taken within rounds of turns.
""",
        1800.0,
    ),
    "network": (
        "time of a step over hosts with links of a chosen speed",
        """\
Measure the time of a step of N workers, one or more on each host, over links of a chosen speed:
complete runs of `hvdtrain train` over Gloo and over Open MPI, against torch's
DistributedDataParallel over Gloo, and against as many processes that exchange nothing. The hosts
are made of Linux namespaces on this machine, which needs root. They take turns as in `bench
scaling`.
""",
        1800.0,
    ),
    "start": (
        "seconds from the command to the end of the first step",
        """\
Measure seconds from the command to the end of the first step: `hvdtrain launch` and plain
horovodrun against torchrun with a DDP script, and `hvdtrain train` on one worker against a plain
script. They run one after the other, in rounds.
""",
        300.0,
    ),
    "classic": (
        "epoch time and accuracy of three textbook settings",
        """\
Measure epoch time and accuracy of (1 worker, batch 256, lr 0.1), (2, 256, 0.1) and (2, 512, 0.2)
under `hvdtrain launch`, on Fashion-MNIST if its files are present, else on digits, next to the
published figures for two GPUs.
""",
        3600.0,
    ),
}
BATCH_SIZES = {"lenet": 128, "mlp": 128, "resnet18-small": 16}  # per worker
OTHER_BATCH_SIZE = 16
MOST_HOSTS = 8  # of namespaces


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each bench."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, (what, rounds, steps) in WITHIN_A_JOB.items():
        bench = benches.add_parser(name, help=what, allow_abbrev=False)
        on = f"alone, or on N workers with `hvdtrain launch -np N -- bench {name}`"
        bench.description = f"Measure {what}, in alternating rounds, {on}."
        _add_within_a_job(bench, rounds, steps)
    for name, (what, description, time_limit_s) in OF_JOBS.items():
        kept = argparse.RawDescriptionHelpFormatter
        bench = benches.add_parser(
            name, help=what, description=description, formatter_class=kept, allow_abbrev=False
        )
        ADDED[name](bench)
        _add_common(bench, time_limit_s)
        if name != "network":
            _add_controller_and_output(bench, Path("runs", f"bench-{name}"))


def _add_within_a_job(bench: argparse.ArgumentParser, rounds: int, steps: int) -> None:
    add = bench.add_argument
    add("--model", default="lenet", choices=tuple(BATCH_SIZES), help="train this model (lenet)")
    sizes = ", ".join(f"{model} {size}" for model, size in BATCH_SIZES.items())
    add("--batch-size", type=int, metavar="B", help=f"take B samples per worker ({sizes})")
    what = "compare V virtual workers with as many passes without them, in step"
    add("--virtual-workers", type=int, metavar="V", help=what)
    what = "reduce M MB in ring; in checkpoint, on one worker, save M MB of parameters (40)"
    add("--megabytes", type=float, default=40, metavar="M", help=what)
    devices = ("cpu", "cuda")
    add("--device", choices=devices, default="cpu", help="compute on the CPU (cpu) or on GPUs")
    add("--rounds", type=int, default=rounds, metavar="R", help=f"run R rounds ({rounds})")
    add("--steps", type=int, default=steps, metavar="S", help=f"run S steps per round ({steps})")
    add("--json", metavar="FILE", help="write all times and ratios to FILE")


def _add_scaling(bench: argparse.ArgumentParser) -> None:
    add = bench.add_argument
    _add_models(bench)
    workers = bench.add_mutually_exclusive_group()
    workers.add_argument("-np", type=int, metavar="P", help="measure N = 1..P (default: the cores)")
    workers.add_argument("--workers", metavar="N,N", help="measure these N instead")
    add("--mode", default="both", choices=("weak", "strong", "both"), help="measure which (both)")
    _add_turns(bench)


def _add_network(bench: argparse.ArgumentParser) -> None:
    add = bench.add_argument
    _add_models(bench)
    add("--workers", metavar="N,N", help="measure N workers (as many as two hosts have)")
    what = "let each host have L workers (1), and so N / L hosts take part"
    add("--workers-per-host", type=int, default=1, metavar="L", help=what)
    what = "give each link G Gbit/s in each direction (1)"
    add("--gbit", dest="gbit_per_s", default="1", metavar="G,G", help=what)
    _add_turns(bench)


def _add_models(bench: argparse.ArgumentParser) -> None:
    names = ",".join(BATCH_SIZES)
    what = f"train these models, as in train, on 1x28x28 ({names})"
    bench.add_argument("--models", default=names, metavar="A,B", help=what)
    what = "take B samples per worker, for all models or for each (lenet, mlp 128; others 16)"
    bench.add_argument("--batch-size", metavar="B,B", help=what)


def _add_turns(bench: argparse.ArgumentParser) -> None:
    add = bench.add_argument
    add("--rounds", type=int, default=12, metavar="R", help="run R rounds of turns (12)")
    what = "run each turn for T seconds (2), or for three logged steps if longer"
    add("--turn-s", type=float, default=2, metavar="T", help=what)


def _add_start(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("-np", type=int, dest="workers", metavar="N", default=2, help="workers (2)")
    bench.add_argument("--rounds", type=int, default=5, metavar="R", help="run R rounds (5)")


def _add_classic(bench: argparse.ArgumentParser) -> None:
    add = bench.add_argument
    add("--model", default="lenet", choices=tuple(BATCH_SIZES), help="train this model (lenet)")
    data = ("fashion-mnist", "digits")
    add("--data", choices=data, help="train on this data (fashion-mnist, if present)")
    add("--data-dir", default="data", metavar="DIR", help="read data set files from DIR (data)")
    add("--epochs", type=int, default=10, metavar="E", help="train each run for E epochs (10)")
    add("--rounds", type=int, default=3, metavar="R", help="run R rounds (3)")


ADDED = {
    "scaling": _add_scaling,
    "network": _add_network,
    "start": _add_start,
    "classic": _add_classic,
}


def _add_common(bench: argparse.ArgumentParser, time_limit_s: float) -> None:
    add = bench.add_argument
    what = f"end each run or case after T seconds ({time_limit_s:g})"
    add("--time-limit-s", type=float, default=time_limit_s, metavar="T", help=what)
    add("--json", metavar="FILE", help="write all times and ratios to FILE")


def _add_controller_and_output(bench: argparse.ArgumentParser, output: Path) -> None:
    add = bench.add_argument
    what = "select Horovod's controller; auto: as launch does"
    add("--controller", default="auto", choices=("auto", "gloo", "mpi"), help=what)
    add("--output", type=Path, default=output, metavar="DIR", help=f"write plots to DIR ({output})")


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Measure, print medians and ratios, and return the exit code. Raises UsageError."""
    checked = check_flags(arguments, problems, topology)
    from hvdtrain.lab.bench import classic, network, scaling, start, within_job

    if checked["bench"] in WITHIN_A_JOB:
        return within_job.run(checked, topology)
    modules: dict[str, Callable[[dict[str, Any]], int]] = {
        "scaling": scaling.run,
        "network": network.run,
        "start": start.run,
        "classic": classic.run,
    }
    return modules[checked["bench"]](checked)


def check_flags(
    arguments: dict[str, Any], problems: list[str], topology: Topology
) -> dict[str, Any]:
    """Return the flags, with lists parsed and defaults filled in. Raises UsageError."""
    checked, bench = dict(arguments), arguments["bench"]
    if bench in WITHIN_A_JOB:
        if checked["batch_size"] is None:
            checked["batch_size"] = BATCH_SIZES[checked["model"]]
        for name in ("batch_size", "megabytes", "rounds", "steps", "virtual_workers"):
            if checked[name] is not None and not checked[name] > 0:
                problems.append(f"--{name.replace('_', '-')}={checked[name]}: must be above 0")
        problems += _wrong_virtual_workers(checked, topology)
    else:
        if topology.launched:
            problems.append(
                f"bench {bench} starts its workers itself: run it once, without a launcher"
            )
        if bench in ("scaling", "network"):
            checked |= _read_cases(arguments, problems)
        if bench == "scaling":
            both = arguments["mode"] == "both"
            checked["modes"] = ("weak", "strong") if both else (arguments["mode"],)
        if bench == "network":
            checked |= _read_network(arguments, checked["workers"], problems)
        _check_jobs(checked, problems)
    problems += json_problems(arguments["json"])
    if problems:
        raise UsageError(*problems)
    return checked


def _wrong_virtual_workers(checked: dict[str, Any], topology: Topology) -> list[str]:
    virtual = checked["virtual_workers"]
    if virtual is None:
        return []
    if checked["bench"] != "step":
        return [f"--virtual-workers={virtual}: is for bench step, not for {checked['bench']}"]
    few = 0 < virtual < topology.size
    return [f"--virtual-workers={virtual}: fewer than {topology.size} workers"] if few else []


def _check_jobs(checked: dict[str, Any], problems: list[str]) -> None:
    """Check the flags of a bench that starts jobs, and find the controller."""
    if checked["bench"] == "start" and checked["workers"] < 2:
        problems.append(
            f"-np={checked['workers']}: must be at least 2 (one worker is always measured)"
        )
    for name in ("rounds", "epochs"):
        if checked.get(name, 1) < 1:
            problems.append(f"--{name}={checked[name]}: must be at least 1")
    for name in ("turn_s", "time_limit_s"):
        if not 0 < checked.get(name, 1) < float("inf"):
            flag = f"--{name.replace('_', '-')}={checked[name]:g}"
            problems.append(f"{flag}: must be a number of seconds above 0")
    if "output" not in checked:
        return
    if checked["output"].exists() and not checked["output"].is_dir():
        problems.append(f"--output={checked['output']}: is not a folder; choose another")
    try:
        checked["controller"] = find_controller(checked["controller"]).name
    except UsageError as error:
        problems += error.problems


def _read_cases(arguments: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return `models` (samples per worker by name) and `workers`."""
    models = [name.strip() for name in arguments["models"].split(",")]
    if not all(models) or len(set(models)) < len(models):
        problems.append(f"--models={arguments['models']}: expected names, each once: lenet,mlp")
    sizes = _read_batch_sizes(arguments["batch_size"], models, problems)
    workers = _read_workers(arguments, problems)
    return {"models": dict(zip(models, sizes, strict=True)), "workers": workers}


def _read_network(
    arguments: dict[str, Any], workers: tuple[int, ...], problems: list[str]
) -> dict[str, Any]:
    """Return `gbit_per_s`; check that the workers fill from 2 to MOST_HOSTS hosts."""
    each = arguments["workers_per_host"]
    if each < 1:
        problems.append(f"--workers-per-host={each}: must be at least 1")
    elif any(number % each or not 2 <= number // each <= MOST_HOSTS for number in workers):
        problems.append(
            f"--workers={arguments['workers']}: expected numbers that fill from 2 to {MOST_HOSTS} "
            f"hosts of {each}"
        )
    text = arguments["gbit_per_s"]
    try:
        speeds = tuple(map(float, text.split(",")))
    except ValueError:
        speeds = ()
    if not speeds or not all(0.001 <= speed <= 1000 for speed in speeds):
        problems.append(f"--gbit={text}: expected numbers from 0.001 to 1000: 0.1,1,10")
    return {"gbit_per_s": speeds}


def _read_batch_sizes(text: str | None, models: list[str], problems: list[str]) -> list[int]:
    """Return the samples per worker for each model."""
    if text is None:
        return [BATCH_SIZES.get(name, OTHER_BATCH_SIZE) for name in models]
    sizes = _numbers(text)
    if len(sizes) not in (1, len(models)):
        problems.append(
            f"--batch-size={text}: expected one number of at least 1 for all models, or one for "
            f"each of {', '.join(models)}"
        )
        sizes = [1]
    return sizes * len(models) if len(sizes) == 1 else sizes


def _read_workers(arguments: dict[str, Any], problems: list[str]) -> tuple[int, ...]:
    if arguments["workers"] is None:
        if "workers_per_host" in arguments:
            return (2 * arguments["workers_per_host"],)
        most = arguments["np"]
        if most is not None and most < 1:
            problems.append(f"-np={most}: must be at least 1")
        return tuple(range(1, 1 + (most or usable_cores())))
    counts = _numbers(arguments["workers"])
    if not counts or len(set(counts)) < len(counts):
        problems.append(
            f"--workers={arguments['workers']}: expected numbers of at least 1, each once: 1,2,4"
        )
    return tuple(sorted(counts))


def _numbers(text: str) -> list[int]:
    """Return comma-separated whole numbers of at least 1; an empty list if `text` is malformed."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit()]
    return numbers if len(numbers) == len(parts) and min(numbers) > 0 else []
