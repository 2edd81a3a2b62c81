"""`hvdtrain bench NAME`: comparative measurements on this machine, in alternating rounds."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.cgroups import usable_cores
from hvdtrain.cli import bench_peers
from hvdtrain.cli.flags import (
    CONTROLLERS,
    FOLDER,
    SECONDS,
    Command,
    Flag,
    Flags,
    Section,
    add_command,
    train_flag,
    wrong_flags,
)
from hvdtrain.config.fields import POSITIVE, Check, at_least, numbers_of, whole_number
from hvdtrain.errors import attempt, refuse
from hvdtrain.files import json_problems
from hvdtrain.launcher.horovodrun import find_controller
from hvdtrain.topology import Topology

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
    "peers": (
        "samples/s, first step, memory and lines of one training by several systems",
        """\
Measure one training, with the same model, data, batch and one compute thread per worker, by
`hvdtrain train`, hvdtrain.Loop, DDP under torchrun, Accelerate, Lightning Fabric, the Trainer of
transformers, and Horovod, each in its usual form (hvdtrain/lab/peers). They run one after the
other, in rounds; those that are not installed are left out. Their weights are compared with one
process's.
""",
        300.0,
    ),
    "classic": (
        "epoch time and accuracy of textbooks' settings on Fashion-MNIST",
        """\
Measure epoch time and accuracy on one worker and on two, under `hvdtrain launch`, next to the
published figures for one and two GPUs: of LeNet (5 epochs; batch 256, and 512 on two workers) and
of ResNet-18 (1 epoch, batch 256; it takes a quarter of an hour or more), on Fashion-MNIST if its
files are present, else on digits.
""",
        3600.0,
    ),
}
BATCH_SIZES = {"lenet": 128, "mlp": 128, "resnet18-small": 16}  # per worker
CLASSIC = ("lenet", "resnet18-small")
OTHER_BATCH_SIZE = 16
MOST_HOSTS = 8  # of namespaces
NAMES = ",".join(BATCH_SIZES)
MODES = {"weak": ("weak",), "strong": ("strong",), "both": ("weak", "strong")}
SEVERAL = Check(lambda n: n >= 2, "={}: must be at least 2 (one worker is always measured)")
AT_LEAST_1 = at_least(1)
WORKERS = Flag("-np", "workers (2)", int, 2, "N", check=SEVERAL, more={"dest": "workers"})
JSON = Flag("--json", "write all times and ratios to FILE", metavar="FILE")
MODEL = train_flag("model", "train this model", choices=tuple(BATCH_SIZES))
MODELS = (
    Flag("--models", f"train these models, as in train, on 1x28x28 ({NAMES})", str, NAMES, "A,B"),
    Flag(
        "--batch-size",
        "take B samples per worker, for all models or for each (lenet, mlp 128; others 16)",
        metavar="B,B",
    ),
)
TURNS = (
    Flag("--rounds", "run R rounds of turns (12)", int, 12, "R", check=AT_LEAST_1),
    Flag(
        "--turn-s",
        "run each turn for T seconds (2), or for three logged steps if longer",
        float,
        2,
        "T",
        check=SECONDS,
    ),
)


def _within_a_job(rounds: int, steps: int) -> Flags:
    """Return the flags of a bench within one job, by its rounds and steps per round."""
    sizes = ", ".join(f"{model} {size}" for model, size in BATCH_SIZES.items())
    virtual = "compare V virtual workers with as many passes without them, in step"
    size = "reduce M MB in ring; in checkpoint, on one worker, save M MB of parameters (40)"
    return (
        MODEL,
        train_flag("batch_size", f"take this many samples per worker ({sizes})"),
        train_flag("virtual_workers", virtual, metavar="V"),
        Flag("--megabytes", size, float, 40, "M", check=POSITIVE),
        train_flag("device", "compute here", default="cpu", choices=("cpu", "cuda")),
        Flag("--rounds", f"run R rounds ({rounds})", int, rounds, "R", check=POSITIVE),
        Flag("--steps", f"run S steps per round ({steps})", int, steps, "S", check=POSITIVE),
        JSON,
    )


def _of_jobs(name: str, *flags: Flag | Section, controller: str = "auto") -> Flags:
    """Return the flags of a bench that starts jobs: its own, and those of all."""
    limit_s, output = OF_JOBS[name][2], Path("runs", f"bench-{name}")
    text = f"end each run or case after T seconds ({limit_s:g})"
    common = (*flags, Flag("--time-limit-s", text, float, limit_s, "T", check=SECONDS), JSON)
    if name == "network":
        return common
    text = "select Horovod's controller; auto: as launch does"
    text += "" if controller == "auto" else f" ({controller})"
    return (
        *common,
        Flag("--controller", text, default=controller, choices=CONTROLLERS),
        Flag("--output", f"write plots to DIR ({output})", Path, output, "DIR", check=FOLDER),
    )


BENCHES: dict[str, Flags] = {
    **{name: _within_a_job(rounds, steps) for name, (_, rounds, steps) in WITHIN_A_JOB.items()},
    "scaling": _of_jobs(
        "scaling",
        *MODELS,
        Section(
            "",
            (
                Flag(
                    "-np", "measure N = 1..P (default: the cores)", int, None, "P", check=AT_LEAST_1
                ),
                Flag("--workers", "measure these N instead", metavar="N,N"),
            ),
        ),
        Flag("--mode", "measure which (both)", default="both", choices=tuple(MODES)),
        *TURNS,
    ),
    "network": _of_jobs(
        "network",
        *MODELS,
        Flag("--workers", "measure N workers (as many as two hosts have)", metavar="N,N"),
        Flag(
            "--workers-per-host",
            "let each host have L workers (1), and so N / L hosts take part",
            int,
            1,
            "L",
            check=AT_LEAST_1,
        ),
        Flag(
            "--gbit",
            "give each link G Gbit/s in each direction (1)",
            default="1",
            metavar="G,G",
            more={"dest": "gbit_per_s"},
        ),
        *TURNS,
    ),
    "start": _of_jobs(
        "start",
        WORKERS,
        Flag("--rounds", "run R rounds (5)", int, 5, "R", check=AT_LEAST_1),
    ),
    "peers": _of_jobs("peers", WORKERS, *bench_peers.FLAGS, controller="gloo"),
    "classic": _of_jobs(
        "classic",
        train_flag("model", "train this one alone (both)", default=None, choices=CLASSIC),
        train_flag(
            "data",
            "train on this data (fashion-mnist, if present)",
            default=None,
            choices=("fashion-mnist", "digits"),
        ),
        train_flag("data_dir"),
        train_flag("epochs", "make this many passes over the data (lenet 5, resnet18-small 1)"),
        Flag("--rounds", "run R rounds (1)", int, 1, "R", check=AT_LEAST_1),
    ),
}


def add_benches(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each bench."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, (what, _, _) in WITHIN_A_JOB.items():
        on = f"alone, or on N workers with `hvdtrain launch -np N -- bench {name}`"
        description = f"Measure {what}, in alternating rounds, {on}."
        add_command(benches, name, Command(what, description, BENCHES[name], run))
    for name, (what, description, _) in OF_JOBS.items():
        add_command(benches, name, Command(what, description, BENCHES[name], run))


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Measure, print medians and ratios, and return the exit code. Raises UsageError."""
    checked = check_flags(arguments, problems, topology)
    from hvdtrain.lab.bench import classic, network, peers, scaling, start, within_job
    from hvdtrain.lab.disturbance import Disturbance

    checked["disturbance"] = Disturbance()

    if checked["bench"] in WITHIN_A_JOB:
        return within_job.run(checked, topology)
    modules: dict[str, Callable[[dict[str, Any]], int]] = {
        "scaling": scaling.run,
        "network": network.run,
        "start": start.run,
        "peers": peers.run,
        "classic": classic.run,
    }
    return modules[checked["bench"]](checked)


def check_flags(
    arguments: dict[str, Any], problems: list[str], topology: Topology
) -> dict[str, Any]:
    """Return the flags, with lists parsed and defaults filled in. Raises UsageError."""
    checked, bench = dict(arguments), arguments["bench"]
    problems += [*wrong_flags(BENCHES[bench], arguments), *json_problems(arguments["json"])]
    if bench in WITHIN_A_JOB:
        checked["batch_size"] = checked["batch_size"] or BATCH_SIZES[checked["model"]]
        virtual = checked["virtual_workers"]
        if virtual is not None and bench != "step":
            problems.append(f"--virtual-workers={virtual}: is for bench step, not for {bench}")
        elif virtual and 0 < virtual < topology.size:
            problems.append(f"--virtual-workers={virtual}: fewer than {topology.size} workers")
    elif topology.launched:
        problems.append(f"bench {bench} starts its workers itself: run it once, without a launcher")
    if "models" in checked:
        checked["models"] = _read_models(arguments, problems)
    if bench in ("scaling", "network"):
        checked["workers"] = _read_workers(arguments, problems)
    if bench == "peers":
        checked |= bench_peers.read_names(arguments, problems)
    if "mode" in checked:
        checked["modes"] = MODES[checked["mode"]]
    if bench == "network":
        checked["gbit_per_s"] = _read_network(arguments, checked["workers"], problems)
    if "controller" in checked:
        controller = attempt(problems, lambda: find_controller(checked["controller"]))
        checked["controller"] = controller and controller.name
    refuse(problems)
    return checked


def _read_models(arguments: dict[str, Any], problems: list[str]) -> dict[str, int]:
    """Return the samples per worker by name of the model."""
    models = [name.strip() for name in arguments["models"].split(",")]
    if not all(models) or len(set(models)) < len(models):
        problems.append(f"--models={arguments['models']}: expected names, each once: lenet,mlp")
    sizes = _read_batch_sizes(arguments["batch_size"], models, problems)
    return dict(zip(models, sizes, strict=True))


def _read_network(
    arguments: dict[str, Any], workers: tuple[int, ...], problems: list[str]
) -> tuple[float, ...]:
    """Return the speeds of links; check that the workers fill from 2 to MOST_HOSTS hosts."""
    each, text = arguments["workers_per_host"], arguments["gbit_per_s"]
    if each >= 1 and any(n % each or not 2 <= n // each <= MOST_HOSTS for n in workers):
        problems.append(
            f"--workers={arguments['workers']}: expected numbers that fill from 2 to {MOST_HOSTS} "
            f"hosts of {each}"
        )
    speeds = tuple(numbers_of(text))
    if not speeds or not all(0.001 <= speed <= 1000 for speed in speeds):
        problems.append(f"--gbit={text}: expected numbers from 0.001 to 1000: 0.1,1,10")
    return speeds


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
    text = arguments["workers"]
    if text is None and "workers_per_host" in arguments:
        return (2 * arguments["workers_per_host"],)
    if text is None:
        return tuple(range(1, 1 + (arguments["np"] or usable_cores())))
    counts = _numbers(text)
    if not counts or len(set(counts)) < len(counts):
        problems.append(f"--workers={text}: expected numbers of at least 1, each once: 1,2,4")
    return tuple(sorted(counts))


def _numbers(text: str) -> list[int]:
    """Return comma-separated whole numbers of at least 1; an empty list if `text` is malformed."""
    numbers = [whole_number(part.strip()) for part in text.split(",")]
    return numbers if all(numbers) else []


COMMAND = Command(
    "measure on this machine: scaling, network, start, peers, classic, step, ring, audit, ...",
    "Measure on this machine, next to comparable systems, in alternating rounds.",
    (),  # but those of each bench
    run,
)
