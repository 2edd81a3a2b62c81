"""`hvdtrain plan`: predicted step time and scaling efficiency on N workers."""

from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import CONTROLLERS, FOLDER, Command, Flag, Section, train_flag, wrong_flags
from hvdtrain.config.fields import Check, at_least, flag_of
from hvdtrain.errors import every_problem, refuse
from hvdtrain.files import json_problems
from hvdtrain.topology import Topology

MOST_WORKERS = 1 << 20
LEAST, MOST = 1e-9, 1e9  # plausible range of quantities with units
FROM_0 = Check(lambda value: 0 <= value <= MOST, f"={{}}: must be from 0 to {MOST:g}")
ABOVE_0 = Check(lambda value: LEAST <= value <= MOST, f"={{}}: must be from {LEAST:g} to {MOST:g}")
WORKERS = Check(
    lambda value: 2 <= value <= MOST_WORKERS, f"={{}}: must be from 2 to {MOST_WORKERS:,}"
)
SHARE = Check(lambda value: 0 < value <= 1, "={}: must be above 0 and at most 1")
COMPUTATION = (
    train_flag("model", "plan for this model, as in train (lenet)", default=None),
    train_flag("data", "plan for this data, as in train (digits)", default=None),
    train_flag("data_dir"),
    train_flag("batch_size", "take this many samples per worker (32)"),
    Flag(
        "--step-time-s", "assume T seconds per step of one device", float, None, "T", check=ABOVE_0
    ),
    Flag("--profile", "read the step from FILE, see --save-profile", Path, metavar="FILE"),
    Flag("--save-profile", "write the measured step to FILE", Path, metavar="FILE"),
)
NETWORK = (
    Flag(
        "--latency-us", "assume L us per message (default: measure)", float, None, "L", check=FROM_0
    ),
    Flag(
        "--bandwidth-gbit-s", "assume B Gbit/s per host, each way", float, None, "B", check=ABOVE_0
    ),
    Flag("--network", "read results of hvdtrain.lab.plan.probe", Path, metavar="FILE"),
    Flag("--workers-per-host", "run K workers per host (1)", int, 1, "K", check=at_least(1)),
    Flag(
        "--intra-latency-us", "assume L us in a host (as outside)", float, None, "L", check=FROM_0
    ),
    Flag(
        "--intra-bandwidth-gbit-s",
        "B Gbit/s in a host (as outside)",
        float,
        None,
        "B",
        check=ABOVE_0,
    ),
    Flag(
        "--cores-per-host",
        "share C cores per host (default: enough)",
        int,
        None,
        "C",
        check=at_least(1),
    ),
    Flag("--controller", "measure this one", default="auto", choices=CONTROLLERS),
)
PREDICTIONS = (
    Flag("--max-workers", "predict up to N workers (1024)", int, 1024, "N", check=WORKERS),
    Flag("--min-efficiency", "require efficiency E (0.5)", float, 0.5, "E", check=SHARE),
    Flag("--json", "write all inputs and predictions to FILE", metavar="FILE"),
    Flag(
        "--output",
        "write the plot here (runs/plan)",
        Path,
        default=Path("runs", "plan"),
        check=FOLDER,
    ),
)
FLAGS = (
    Section("computation", COMPUTATION),
    Section("network", NETWORK),
    Section("predictions", PREDICTIONS),
)
NOT_WITH_PROFILE = ("model", "data", "batch_size", "step_time_s", "save_profile")


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Measure what is not given, predict, and return the exit code. Raises UsageError."""
    check_flags(arguments, problems, topology)
    from hvdtrain.lab.plan import planning

    return planning.run(arguments)


def check_flags(arguments: dict[str, Any], problems: list[str], topology: Topology) -> None:
    """Raise UsageError with every problem of the flags, or if started by a launcher."""
    if topology.launched:
        problems.append("plan starts the workers that it measures: run it once, without a launcher")
    problems += [*wrong_flags(FLAGS, arguments), *_contradictions(arguments)]
    for name in ("json", "save_profile"):
        problems += json_problems(arguments[name], flag_of(name))
    refuse(problems)


def _contradictions(arguments: dict[str, Any]) -> list[str]:
    specified = {name for name, value in arguments.items() if value is not None}
    replaced = [flag_of(name) for name in NOT_WITH_PROFILE if name in specified]
    link = {"latency_us", "bandwidth_gbit_s"} & specified
    inside = {"intra_latency_us", "intra_bandwidth_gbit_s"} & specified
    return every_problem(
        (
            "profile" in specified and replaced,
            f"{', '.join(replaced)}: not allowed with --profile, which replaces them",
        ),
        (len(link) == 1, "--latency-us, --bandwidth-gbit-s: give both, or neither"),
        (
            link and "network" in specified,
            "--network: not allowed with --latency-us and --bandwidth-gbit-s",
        ),
        (
            len(inside) == 1,
            "--intra-latency-us, --intra-bandwidth-gbit-s: give both, or neither",
        ),
        (
            inside and arguments["workers_per_host"] == 1,
            "--intra-...: a host has one worker; give --workers-per-host too",
        ),
    )


COMMAND = Command(
    "predict step time and efficiency on N workers, from latency, bandwidth and compute",
    """\
Predict step time and scaling efficiency for N = 1, 2, 4, ... workers, each with the same batch, by
ring, hierarchical ring, naive gather and broadcast, and parameter server; and the largest useful N.

Efficiency is throughput on N / (N x throughput on 1). The largest useful N is the largest up to
which it is at least --min-efficiency. Nothing is fitted to training results: the phases of a step,
the time at which each gradient is ready, latency and bandwidth are measured here, or given.

    hvdtrain plan --model resnet18 --data synthetic:3x224x224 --batch-size 16
    hvdtrain plan --model vgg16 --data synthetic:3x224x224,classes=1000 --batch-size 64 \\
        --step-time-s 0.42 --latency-us 10 --bandwidth-gbit-s 25 --workers-per-host 4
""",
    FLAGS,
    run,
)
