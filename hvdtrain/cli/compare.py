"""`hvdtrain compare -np N`: strategies of training on N devices, run on the same work in turn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import CONTROLLERS, FOLDER, SECONDS, Command, Flag, train_flag, wrong_flags
from hvdtrain.config import DEFAULT_GLOBAL_BATCH_SIZE
from hvdtrain.config.fields import BELOW_1, at_least, flag_of
from hvdtrain.config.plugins import is_plugin
from hvdtrain.errors import refuse
from hvdtrain.files import json_problems
from hvdtrain.topology import Topology

# A copy of the names in hvdtrain.lab.systems, which is slow to import; a test compares them.
SYSTEMS: tuple[str, ...] = (
    *("single", "towers", "data_parallel", "ddp", "gather_broadcast", "parameter_server"),
    *("parameter_server_async", "ring", "horovod", "model_parallel"),
)
REDUCTIONS = ("gluon", "tensorflow")
READ_BY = {  # flags of single systems: the beginning of their names
    "towers_reduction": "towers",
    "towers_dim": "towers",
    "servers": "parameter_server",
}

FLAGS = (
    Flag("-np", "run on N workers", int, None, "N", check=at_least(2), more={"required": True}),
    *(train_flag(name) for name in ("model", "data", "data_dir")),
    train_flag(
        "global_batch_size", "take this many samples per step", default=DEFAULT_GLOBAL_BATCH_SIZE
    ),
    Flag("--steps", "run each system for S steps (30)", int, 30, "S", check=at_least(1)),
    Flag("--rounds", "run R rounds and take medians (1)", int, 1, "R", check=at_least(1)),
    train_flag("dtype", default="float64"),
    train_flag("seed"),
    train_flag("lr", "set the learning rate of SGD"),
    train_flag("momentum", "set the momentum of SGD", check=BELOW_1),
    Flag(
        "--systems",
        f"run only these of {', '.join(SYSTEMS)}, or package.module:Class",
        metavar="A,B",
    ),
    Flag(
        "--towers-reduction",
        "combine the gradients of towers as this framework does (gluon)",
        default="gluon",
        choices=REDUCTIONS,
    ),
    Flag("--towers-dim", "split towers along axis D (0)", int, 0, "D", check=at_least(0)),
    Flag("--servers", "run K parameter servers (2)", int, 2, "K", check=at_least(1)),
    Flag(
        "--controller",
        "select Horovod's controller; auto: as launch does",
        default="auto",
        choices=CONTROLLERS,
    ),
    Flag("--time-limit-s", "end a system after T s (600)", float, 600, "T", check=SECONDS),
    Flag("--json", "write all rows to FILE", metavar="FILE"),
    Flag(
        "--output",
        "write plots and page to DIR (runs/compare)",
        Path,
        Path("runs", "compare"),
        "DIR",
        check=FOLDER,
    ),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Run the systems and return the exit code. Raises UsageError."""
    systems = check_flags(arguments, problems)
    from hvdtrain.lab.compare import comparison

    return comparison.run(arguments, systems)


def check_flags(arguments: dict[str, Any], problems: list[str]) -> tuple[str, ...]:
    """Return the systems to run. Raises UsageError with every problem of the flags."""
    text = arguments["systems"]
    systems = SYSTEMS if text is None else tuple(part.strip() for part in text.split(","))
    unknown = [
        f"--systems={name}: unknown; choose from {', '.join(SYSTEMS)}, or package.module:Class"
        for name in systems
        if name not in SYSTEMS and not is_plugin(name)
    ]
    wrong = wrong_flags(FLAGS, arguments)
    idle = _without_effect(arguments, systems)
    refuse([*problems, *wrong, *json_problems(arguments["json"]), *unknown, *idle])
    return systems


def _without_effect(arguments: dict[str, Any], systems: Sequence[str]) -> list[str]:
    """Return a message for each flag that is given for systems that do not run."""
    defaults = {flag.name: flag.default for flag in FLAGS}
    return [
        f"{flag_of(name)}={arguments[name]}: has no effect without {system}: leave it out"
        for name, system in READ_BY.items()
        if arguments[name] not in (0, defaults[flag_of(name)])
        and not any(one.startswith(system) or is_plugin(one) for one in systems)
    ]


COMMAND = Command(
    "run every strategy of training on N devices on the same work, in turn",
    """\
Run every strategy of training on N devices, one after the other, with the same model, data, global
batches, seed and steps, on this machine, and compare results, speed and traffic with one device.

In float64 each synchronous system must end with the parameters of `single`, within 1e-9 of each
tensor's largest value; exit code 17: one does not. Asynchronous systems, and float32, are only
reported. Derive a custom system from hvdtrain.lab.systems.Strategy.
""",
    FLAGS,
    run,
)
