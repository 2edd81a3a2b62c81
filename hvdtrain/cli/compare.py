"""`hvdtrain compare -np N`: strategies of training on N devices, run on the same work in turn."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hvdtrain.config.plugins import is_plugin
from hvdtrain.errors import UsageError
from hvdtrain.files import json_problems
from hvdtrain.topology import Topology

# A copy of the names in hvdtrain.lab.systems, which is slow to import; a test compares them.
SYSTEMS: tuple[str, ...]
SYSTEMS = ("single", "towers", "data_parallel", "ddp", "gather_broadcast", "parameter_server")
SYSTEMS += ("parameter_server_async", "ring", "horovod", "model_parallel")
REDUCTIONS = ("gluon", "tensorflow")

HELP = "run every strategy of training on N devices on the same work, in turn"
DESCRIPTION = """\
Run every strategy of training on N devices, one after the other, with the same model, data, global
batches, seed and steps, on this machine, and compare results, speed and traffic with one device.

In float64 each synchronous system must end with the parameters of `single`, within 1e-9 of each
tensor's largest value; exit code 17: one does not. Asynchronous systems, and float32, are only
reported. Derive a custom system from hvdtrain.lab.systems.Strategy.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-np", type=int, required=True, metavar="N", help="run on N workers")
    add("--model", default="lenet", help="train this model, as in train (lenet)")
    add("--data", default="digits", help="train on this data, as in train (digits)")
    add("--data-dir", default="data", metavar="DIR", help="read data set files from DIR (data)")
    add("--global-batch-size", type=int, default=256, metavar="B", help="B samples per step (256)")
    add("--steps", type=int, default=30, metavar="S", help="run each system for S steps (30)")
    add("--rounds", type=int, default=1, metavar="R", help="run R rounds and take medians (1)")
    add("--dtype", default="float64", choices=("float32", "float64"), help="compute in (float64)")
    add("--seed", type=int, default=0, help="seed parameters and sample order (0)")
    add("--lr", type=float, default=0.05, help="set the learning rate of SGD (0.05)")
    add("--momentum", type=float, default=0.9, help="set the momentum of SGD (0.9)")
    names = ", ".join(SYSTEMS)
    add("--systems", metavar="A,B", help=f"run only these of {names}, or package.module:Class")
    add(
        "--towers-reduction",
        default="gluon",
        choices=REDUCTIONS,
        help="combine the gradients of towers as this framework does (gluon)",
    )
    add("--towers-dim", type=int, default=0, metavar="D", help="split towers along axis D (0)")
    add("--servers", type=int, default=2, metavar="K", help="run K parameter servers (2)")
    add(
        "--controller",
        default="auto",
        choices=("auto", "gloo", "mpi"),
        help="select Horovod's controller; auto: as launch does",
    )
    add("--time-limit-s", type=float, default=600, metavar="T", help="end a system after T s (600)")
    add("--json", metavar="FILE", help="write all rows to FILE")
    add(
        "--output",
        type=Path,
        default=Path("runs", "compare"),
        metavar="DIR",
        help="write plots and page to DIR (runs/compare)",
    )


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Run the systems and return the exit code. Raises UsageError."""
    systems = check_flags(arguments, problems)
    from hvdtrain.lab.compare import command

    return command.run(arguments, systems)


def check_flags(arguments: dict[str, Any], problems: list[str]) -> tuple[str, ...]:
    """Return the systems to run. Raises UsageError with every problem of the flags."""
    least = {"np": 2, "global_batch_size": 1, "steps": 1, "rounds": 1, "servers": 1}
    least |= {"seed": 0, "towers_dim": 0}
    for name, lowest in least.items():
        if arguments[name] < lowest:
            flag = "-np" if name == "np" else f"--{name.replace('_', '-')}"
            problems.append(f"{flag}={arguments[name]}: must be at least {lowest}")
    for name in ("lr", "time_limit_s"):
        if not arguments[name] > 0:
            problems.append(f"--{name.replace('_', '-')}={arguments[name]}: must be above 0")
    if not 0 <= arguments["momentum"] < 1:
        problems.append(f"--momentum={arguments['momentum']}: must be from 0 to below 1")
    if arguments["output"].exists() and not arguments["output"].is_dir():
        problems.append(f"--output={arguments['output']}: is not a folder; choose another")
    problems += json_problems(arguments["json"])
    text = arguments["systems"]
    systems = SYSTEMS if text is None else tuple(part.strip() for part in text.split(","))
    problems += [
        f"--systems={name}: unknown; choose from {', '.join(SYSTEMS)}, or package.module:Class"
        for name in systems
        if name not in SYSTEMS and not is_plugin(name)
    ]
    if problems:
        raise UsageError(*problems)
    return systems
