"""`hvdtrain bench NAME`: comparative measurements on this machine, in alternating rounds."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.files import json_problems
from hvdtrain.launcher.command import find_controller
from hvdtrain.topology import Topology

HELP = "measure on this machine: scaling, start, classic, step, ring, audit, checkpoint"
DESCRIPTION = "Measure on this machine, next to comparable systems, in alternating rounds."
LENGTHS = {  # rounds, and steps per round
    "step": (60, 10),
    "checkpoint": (9, 50),
    "ring": (15, 3),
    "audit": (30, 10),
}
WITHIN_A_JOB = {
    "step": "the training step against hand-written loops",
    "checkpoint": "steps with against steps without saving",
    "ring": "the reference ring against the all-reduces of MPI or torch.distributed, and Horovod",
    "audit": "steps with against steps without audits",
}
SCALING = """\
Measure weak and strong scaling on this machine for N = 1..P: complete runs of `hvdtrain train`
against torch's DistributedDataParallel over Gloo, and against the machine's limit, N concurrent
processes that exchange nothing. All train the same model on the same images, with one compute
thread each. They take turns of a few seconds, each while the others are stopped, and ratios are
taken within rounds of turns.
"""
START = """\
Measure seconds from the command to the end of the first step: `hvdtrain launch` and plain
horovodrun against torchrun with a DDP script, and `hvdtrain train` on one worker against a plain
script. They run one after the other, in rounds.
"""
CLASSIC = """\
Measure epoch time and accuracy of (1 worker, batch 256, lr 0.1), (2, 256, 0.1) and (2, 512, 0.2)
under `hvdtrain launch`, on Fashion-MNIST if its files are present, else on digits, next to the
published figures for two GPUs.
"""
BATCH_SIZES = {"lenet": 128, "mlp": 128, "resnet18-small": 16}  # per worker
OTHER_BATCH_SIZE = 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each bench."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, what in WITHIN_A_JOB.items():
        _add_within_a_job(benches.add_parser(name, help=what, allow_abbrev=False), name, what)
    for name, what, description, add_own in (
        ("scaling", "samples/s for N = 1..P, against DDP and the limit", SCALING, _add_scaling),
        ("start", "seconds from the command to the end of the first step", START, _add_start),
        ("classic", "epoch time and accuracy of three textbook settings", CLASSIC, _add_classic),
    ):
        add_own(
            benches.add_parser(
                name,
                help=what,
                description=description,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
        )


def _add_within_a_job(bench: argparse.ArgumentParser, name: str, what: str) -> None:
    rounds, steps = LENGTHS[name]
    bench.description = f"Measure {what}, in alternating rounds, alone or under horovodrun."
    add = bench.add_argument
    add("--model", default="lenet", choices=tuple(BATCH_SIZES), help="train this model (lenet)")
    sizes = ", ".join(f"{model} {size}" for model, size in BATCH_SIZES.items())
    add("--batch-size", type=int, metavar="B", help=f"take B samples per worker ({sizes})")
    add("--megabytes", type=float, default=40, metavar="M", help="reduce M MB, in ring (40)")
    add("--rounds", type=int, default=rounds, metavar="R", help=f"run R rounds ({rounds})")
    add("--steps", type=int, default=steps, metavar="S", help=f"run S steps per round ({steps})")
    add("--json", metavar="FILE", help="write all times and ratios to FILE")


def _add_scaling(bench: argparse.ArgumentParser) -> None:
    add = bench.add_argument
    add(
        "--models",
        default=",".join(BATCH_SIZES),
        metavar="A,B",
        help=f"train these models, as in train, on 1x28x28 ({','.join(BATCH_SIZES)})",
    )
    add(
        "--batch-size",
        metavar="B,B",
        help="take B samples per worker, for all models or for each (lenet, mlp 128; others 16)",
    )
    workers = bench.add_mutually_exclusive_group()
    workers.add_argument("-np", type=int, metavar="P", help="measure N = 1..P (default: the cores)")
    workers.add_argument("--workers", metavar="N,N", help="measure these N instead")
    add("--mode", default="both", choices=("weak", "strong", "both"), help="measure which (both)")
    add("--rounds", type=int, default=12, metavar="R", help="run R rounds of turns (12)")
    add(
        "--turn-s",
        type=float,
        default=2,
        metavar="T",
        help="run each turn for T seconds (2), or for 20 steps if longer",
    )
    _add_common(bench, Path("runs", "bench-scaling"), time_limit_s=1800)


def _add_start(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("-np", type=int, dest="workers", metavar="N", default=2, help="workers (2)")
    bench.add_argument("--rounds", type=int, default=5, metavar="R", help="run R rounds (5)")
    _add_common(bench, Path("runs", "bench-start"), time_limit_s=300)


def _add_classic(bench: argparse.ArgumentParser) -> None:
    add = bench.add_argument
    add("--model", default="lenet", choices=tuple(BATCH_SIZES), help="train this model (lenet)")
    data = ("fashion-mnist", "digits")
    add("--data", choices=data, help="train on this data (fashion-mnist, if present)")
    add("--data-dir", default="data", metavar="DIR", help="read data set files from DIR (data)")
    add("--epochs", type=int, default=10, metavar="E", help="train each run for E epochs (10)")
    add("--rounds", type=int, default=3, metavar="R", help="run R rounds (3)")
    _add_common(bench, Path("runs", "bench-classic"), time_limit_s=3600)


def _add_common(bench: argparse.ArgumentParser, output: Path, time_limit_s: float) -> None:
    add = bench.add_argument
    add(
        "--controller",
        default="auto",
        choices=("auto", "gloo", "mpi"),
        help="select Horovod's controller; auto: as launch does",
    )
    add(
        "--time-limit-s",
        type=float,
        default=time_limit_s,
        metavar="T",
        help=f"end each run or case after T seconds ({time_limit_s:g})",
    )
    add("--json", metavar="FILE", help="write all times and ratios to FILE")
    add("--output", type=Path, default=output, metavar="DIR", help=f"write plots to DIR ({output})")


def run(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    """Measure, print medians and ratios, and return the exit code. Raises UsageError."""
    checked = check_flags(arguments, unknown, topology)
    from hvdtrain.lab.bench import command

    if checked["bench"] in WITHIN_A_JOB:
        return command.run_within_a_job(checked, topology)
    return command.RUNS[checked["bench"]](checked)


def check_flags(
    arguments: dict[str, Any], unknown: list[str], topology: Topology
) -> dict[str, Any]:
    """Return the flags, with lists parsed and defaults filled in.

    Raises UsageError with every problem.
    """
    problems = [f"{text}: no such flag" for text in unknown]
    bench = arguments["bench"]
    if bench not in WITHIN_A_JOB and topology.launched:
        problems.append(f"bench {bench} starts its workers itself: run it once, without a launcher")
    checked = arguments | CHECKS[bench](arguments, problems)
    problems += json_problems(arguments["json"])
    if problems:
        raise UsageError(*problems)
    return checked


def _check_within_a_job(arguments: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    if arguments["batch_size"] is None:
        arguments["batch_size"] = BATCH_SIZES[arguments["model"]]
    for name in ("batch_size", "megabytes", "rounds", "steps"):
        if not arguments[name] > 0:
            problems.append(f"--{name.replace('_', '-')}={arguments[name]}: must be above 0")
    return {}


def _check_scaling(arguments: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return `models` (samples per worker by name), `workers` and `modes`."""
    models = [name.strip() for name in arguments["models"].split(",")]
    if not all(models) or len(set(models)) < len(models):
        problems.append(f"--models={arguments['models']}: expected names, each once: lenet,mlp")
    sizes = _read_batch_sizes(arguments["batch_size"], models, problems)
    workers = _read_workers(arguments, problems)
    _check_seconds(arguments, ("turn_s",), problems)
    _check_common(arguments, problems)
    modes = ("weak", "strong") if arguments["mode"] == "both" else (arguments["mode"],)
    return {"models": dict(zip(models, sizes, strict=True)), "workers": workers, "modes": modes}


def _check_start(arguments: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    if arguments["workers"] < 2:
        problems.append(
            f"-np={arguments['workers']}: must be at least 2 (one worker is always measured)"
        )
    _check_common(arguments, problems)
    return {}


def _check_classic(arguments: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    if arguments["epochs"] < 1:
        problems.append(f"--epochs={arguments['epochs']}: must be at least 1")
    _check_common(arguments, problems)
    return {}


def _check_common(arguments: dict[str, Any], problems: list[str]) -> None:
    """Check the flags of every bench that starts jobs, and find the controller."""
    if arguments["rounds"] < 1:
        problems.append(f"--rounds={arguments['rounds']}: must be at least 1")
    _check_seconds(arguments, ("time_limit_s",), problems)
    if arguments["output"].exists() and not arguments["output"].is_dir():
        problems.append(f"--output={arguments['output']}: is not a folder; choose another")
    try:
        arguments["controller"] = find_controller(arguments["controller"])
    except UsageError as error:
        problems += error.problems


def _check_seconds(arguments: dict[str, Any], names: Sequence[str], problems: list[str]) -> None:
    for name in names:
        if not 0 < arguments[name] < float("inf"):
            flag = f"--{name.replace('_', '-')}={arguments[name]:g}"
            problems.append(f"{flag}: must be a number of seconds above 0")


def _read_batch_sizes(text: str | None, models: list[str], problems: list[str]) -> list[int]:
    """Return the samples per worker for each model."""
    if text is None:
        return [BATCH_SIZES.get(name, OTHER_BATCH_SIZE) for name in models]
    sizes = _numbers(text)
    if not sizes or len(sizes) not in (1, len(models)):
        problems.append(
            f"--batch-size={text}: expected one number of at least 1 for all models, or one for "
            f"each of {', '.join(models)}"
        )
        return [1] * len(models)
    return [*sizes] * len(models) if len(sizes) == 1 else [*sizes]


def _read_workers(arguments: dict[str, Any], problems: list[str]) -> tuple[int, ...]:
    if arguments["workers"] is None:
        most = arguments["np"]
        if most is not None and most < 1:
            problems.append(f"-np={most}: must be at least 1")
        return tuple(range(1, 1 + (most or len(os.sched_getaffinity(0)))))
    found = _numbers(arguments["workers"])
    if not found or len(set(found)) < len(found):
        problems.append(
            f"--workers={arguments['workers']}: expected numbers of at least 1, each once: 1,2,4"
        )
        return (1,)
    return tuple(sorted(found))


def _numbers(text: str) -> list[int]:
    """Return comma-separated whole numbers of at least 1; an empty list if `text` is malformed."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit()]
    return numbers if len(numbers) == len(parts) and min(numbers) > 0 else []


CHECKS = {
    **dict.fromkeys(WITHIN_A_JOB, _check_within_a_job),
    "scaling": _check_scaling,
    "start": _check_start,
    "classic": _check_classic,
}
