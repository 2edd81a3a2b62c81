"""`hvdtrain plan`: predicted step time and scaling efficiency on N workers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.files import json_problems
from hvdtrain.topology import Topology

MOST_WORKERS = 1 << 20
LEAST, MOST = 1e-9, 1e9  # plausible range of quantities with units
HELP = "predict step time and efficiency on N workers, from latency, bandwidth and compute"
DESCRIPTION = """\
Predict step time and scaling efficiency for N = 1, 2, 4, ... workers, each with the same batch, by
ring, hierarchical ring, naive gather and broadcast, and parameter server; and the largest useful N.

Efficiency is throughput on N / (N x throughput on 1). The largest useful N is the largest up to
which it is at least --min-efficiency. Nothing is fitted to training results: the phases of a step,
the time at which each gradient is ready, latency and bandwidth are measured here, or given.

    hvdtrain plan --model resnet18 --data synthetic:3x224x224 --batch-size 16
    hvdtrain plan --model vgg16 --data synthetic:3x224x224,classes=1000 --batch-size 64 \\
        --step-time-s 0.42 --latency-us 10 --bandwidth-gbit-s 25 --workers-per-host 4
"""
Range = tuple[Callable[[float], bool], str]
FROM_0: Range = (lambda value: 0 <= value <= MOST, f"from 0 to {MOST:g}")
ABOVE_0: Range = (lambda value: LEAST <= value <= MOST, f"from {LEAST:g} to {MOST:g}")
AT_LEAST_1: Range = (lambda value: value >= 1, "at least 1")
RANGES: dict[str, Range] = {
    "latency_us": FROM_0,
    "intra_latency_us": FROM_0,
    "bandwidth_gbit_s": ABOVE_0,
    "intra_bandwidth_gbit_s": ABOVE_0,
    "step_time_s": ABOVE_0,
    "batch_size": AT_LEAST_1,
    "workers_per_host": AT_LEAST_1,
    "cores_per_host": AT_LEAST_1,
    "max_workers": (lambda value: 2 <= value <= MOST_WORKERS, f"from 2 to {MOST_WORKERS:,}"),
    "min_efficiency": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
}
NOT_WITH_PROFILE = ("model", "data", "batch_size", "step_time_s", "save_profile")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("computation").add_argument
    add("--model", help="plan for this model, as in train (lenet)")
    add("--data", help="plan for this data, as in train (digits)")
    add("--data-dir", default="data", metavar="DIR", help="read data set files from DIR (data)")
    add("--batch-size", type=int, metavar="B", help="take B samples per worker (32)")
    add("--step-time-s", type=float, metavar="T", help="assume T seconds per step of one device")
    add("--profile", type=Path, metavar="FILE", help="read the step from FILE, see --save-profile")
    add("--save-profile", type=Path, metavar="FILE", help="write the measured step to FILE")
    add = parser.add_argument_group("network").add_argument
    add("--latency-us", type=float, metavar="L", help="assume L us per message (default: measure)")
    add("--bandwidth-gbit-s", type=float, metavar="B", help="assume B Gbit/s per host, each way")
    add("--network", type=Path, metavar="FILE", help="read results of hvdtrain.lab.plan.probe")
    add("--workers-per-host", type=int, default=1, metavar="K", help="run K workers per host (1)")
    add("--intra-latency-us", type=float, metavar="L", help="assume L us in a host (as outside)")
    add("--intra-bandwidth-gbit-s", type=float, metavar="B", help="B Gbit/s in a host (as outside)")
    add("--cores-per-host", type=int, metavar="C", help="share C cores per host (default: enough)")
    add("--controller", default="auto", choices=("auto", "gloo", "mpi"), help="measure this one")
    add = parser.add_argument_group("predictions").add_argument
    add("--max-workers", type=int, default=1024, metavar="N", help="predict up to N workers (1024)")
    add("--min-efficiency", type=float, default=0.5, metavar="E", help="require efficiency E (0.5)")
    add("--json", metavar="FILE", help="write all inputs and predictions to FILE")
    add("--output", type=Path, default=Path("runs", "plan"), help="write the plot here (runs/plan)")


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Measure what is not given, predict, and return the exit code. Raises UsageError."""
    check_flags(arguments, problems, topology)
    from hvdtrain.lab.plan import command

    return command.run(arguments)


def check_flags(arguments: dict[str, Any], problems: list[str], topology: Topology) -> None:
    """Raise UsageError with every problem of the flags, or if started by a launcher."""
    if topology.launched:
        problems.append("plan starts the workers that it measures: run it once, without a launcher")
    problems += [
        f"{_flag(name)}={value}: must be {text}"
        for name, (holds, text) in RANGES.items()
        if (value := arguments[name]) is not None and not holds(value)
    ]
    problems += _contradictions(arguments)
    output = arguments["output"]
    if output.exists() and not output.is_dir():
        problems.append(f"--output={output}: is not a folder; choose another")
    for name in ("json", "save_profile"):
        problems += json_problems(arguments[name], _flag(name))
    if problems:
        raise UsageError(*problems)


def _contradictions(arguments: dict[str, Any]) -> list[str]:
    specified = [name for name, value in arguments.items() if value is not None]
    problems = []
    replaced = [_flag(name) for name in NOT_WITH_PROFILE if name in specified]
    if "profile" in specified and replaced:
        problems.append(f"{', '.join(replaced)}: not allowed with --profile, which replaces them")
    flags = {"latency_us", "bandwidth_gbit_s"}.intersection(specified)
    if len(flags) == 1:
        problems.append("--latency-us, --bandwidth-gbit-s: give both, or neither")
    if flags and "network" in specified:
        problems.append("--network: not allowed with --latency-us and --bandwidth-gbit-s")
    inside = {"intra_latency_us", "intra_bandwidth_gbit_s"}.intersection(specified)
    if len(inside) == 1:
        problems.append("--intra-latency-us, --intra-bandwidth-gbit-s: give both, or neither")
    if inside and arguments["workers_per_host"] == 1:
        problems.append("--intra-...: a host has one worker; give --workers-per-host too")
    return problems


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
