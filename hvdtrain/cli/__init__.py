"""The command line: `hvdtrain COMMAND ...`. Each command's work is in a module of its name."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain import __version__
from hvdtrain.cli.bench_options import add_bench_flags, check_bench_flags
from hvdtrain.cli.compare_options import DESCRIPTION as COMPARE
from hvdtrain.cli.compare_options import add_compare_flags, check_compare_flags
from hvdtrain.cli.doctor import add_doctor_flags
from hvdtrain.cli.launch_options import DESCRIPTION as LAUNCH
from hvdtrain.cli.launch_options import add_launch_flags
from hvdtrain.cli.options import Parser, add_train_flags, build_config, dump_yaml
from hvdtrain.cli.plan_options import DESCRIPTION as PLAN
from hvdtrain.cli.plan_options import add_plan_flags, check_plan_flags
from hvdtrain.cli.reporting import add_report_flags
from hvdtrain.cli.trained_options import add_evaluate_flags, add_predict_flags
from hvdtrain.cli.verify_options import DESCRIPTION, add_verify_flags, read_verify_options
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.log import say
from hvdtrain.run.failure import tell
from hvdtrain.topology import Topology


def main() -> int:
    """Run `sys.argv`; returns the exit code."""
    topology = Topology()
    try:
        topology = Topology.from_environment()
        arguments, unknown = _parser().parse_known_args()
        return int(arguments.run(vars(arguments), unknown, topology))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        return tell(error, topology)


def _parser() -> Parser:
    parser = Parser(
        prog="hvdtrain",
        description="Data-parallel PyTorch training on Horovod: N changes how fast, never what is "
        "learned.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hvdtrain {__version__}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _commands():
        own = parsers.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter
            if "\n" in command.description
            else argparse.HelpFormatter,
            allow_abbrev=False,
        )
        command.add_flags(own)
        own.set_defaults(run=command.run)
    return parser


class Command(NamedTuple):
    """One of `hvdtrain COMMAND`."""

    name: str
    run: Callable[[dict[str, Any], list[str], Topology], int]
    add_flags: Callable[[argparse.ArgumentParser], None]
    help: str
    description: str  # with its line breaks, where it has some


def _commands() -> tuple[Command, ...]:
    """In the order of `hvdtrain --help`."""
    return (
        Command(
            *("train", _train, _add_train_flags),
            "train a model: alone, or on N workers under horovodrun -np N",
            "Train one model. Alone it is one process; start N workers with "
            "`horovodrun -np N hvdtrain train ...`.",
        ),
        Command(
            *("launch", _launch, add_launch_flags),
            "the same on several workers and hosts, checked, watched and restarted",
            LAUNCH,
        ),
        Command(
            *("verify", _verify, add_verify_flags),
            "prove this installation's collectives, under horovodrun -np N",
            DESCRIPTION,
        ),
        Command(
            *("verify-resume", _verify_resume, _add_verify_resume_flags),
            "prove that a configuration resumes exactly: -- train ...",
            "Train once without and once with interruptions, and compare the parameters.",
        ),
        Command(
            *("export", _export, _add_export_flags),
            "write plain weights that any PyTorch script loads",
            "Write the weights of a run (its best checkpoint), of a checkpoint, or of a "
            "file saved from DataParallel, DistributedDataParallel or torch.compile, as plain "
            "safetensors, under the names of the model itself.",
        ),
        Command(
            *("compare", _compare, add_compare_flags),
            "every way to train on N devices, on the same work, one after the other",
            COMPARE,
        ),
        Command(
            *("bench", _bench, add_bench_flags),
            "measure on this machine: scaling, start, classic, step, ring, audit, checkpoint",
            "Measure on this machine, beside the peers, in rounds in turns.",
        ),
        Command(
            *("plan", _plan, add_plan_flags),
            "predict step time and efficiency on N workers, from latency, bandwidth and compute",
            PLAN,
        ),
        Command(
            *("evaluate", _evaluate, add_evaluate_flags),
            "exact metrics of a checkpoint, on one device",
            "Evaluate a run (its best checkpoint) or a checkpoint on its validation data.",
        ),
        Command(
            *("predict", _predict, add_predict_flags),
            "the likeliest classes of images, on one device",
            "Tell what a trained model takes images for.",
        ),
        Command(
            *("doctor", _doctor, add_doctor_flags),
            "check this machine, or every host of a hostfile",
            "Check what training on these hosts needs, each check ok, warn or fail, with "
            "the fix. Without hosts: this machine. Exit code 3: a check failed.",
        ),
        Command(
            *("report", _report, add_report_flags),
            "plots of runs, and one page that compares them",
            "Read what runs have left, also those that were killed or still go on, and "
            "write plots (PNG) and index.html: one page that holds them all, with what each run "
            "came to and the options in which they differ.",
        ),
    )


def _add_train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE.yaml", help="options by name; flags win")
    parser.add_argument(
        "--print-config", action="store_true", help="print the configuration and end"
    )
    add_train_flags(parser)


def _add_verify_resume_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-np", type=int, default=1, metavar="N", help="workers (default: 1)")
    parser.add_argument("--controller", choices=("gloo", "mpi"), default="gloo")
    parser.add_argument("--cuts", type=int, default=6, help="interruptions (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="of their moments (default: 0)")
    parser.add_argument("train", nargs="*", metavar="-- train ...", help="what is to be verified")


def _add_export_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="run, checkpoint, or weights file")
    parser.add_argument("out", metavar="OUT.safetensors")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")
    parser.add_argument("--keep-names", action="store_true", help="leave wrappers' prefixes")


def _launch(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    if topology.launched:
        raise UsageError(
            "launch starts the workers itself: run it once, and not by horovodrun, mpirun or srun"
        )
    from hvdtrain.cli.launch import run

    return run(arguments, unknown)


def _verify(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    options = read_verify_options(arguments, unknown, topology)
    from hvdtrain.cli.verify import run

    return run(options, topology)


def _verify_resume(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    from hvdtrain.cli.verify_resume import Plan, verify_resume

    command = [part for part in arguments["train"] if part != "--"]
    if unknown or command[:1] != ["train"]:
        raise UsageError("usage: hvdtrain verify-resume [-np N] [--cuts K] -- train ...")
    if arguments["np"] < 1 or arguments["cuts"] < 1:
        raise UsageError(f"-np={arguments['np']}, --cuts={arguments['cuts']}: must be above 0")
    parser = Parser(prog="train", allow_abbrev=False)
    parser.add_argument("--config")
    add_train_flags(parser)
    flags, unplaced = parser.parse_known_args(command[1:])
    build_config(vars(flags), unplaced)  # bad flags end here, before anything starts
    plan = Plan(
        train_flags=command[1:],
        workers=arguments["np"],
        controller=arguments["controller"],
        cuts=arguments["cuts"],
        seed=arguments["seed"],
    )
    return verify_resume(plan)


def _export(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    if unknown:
        raise UsageError(f"not understood: {' '.join(unknown)} (see hvdtrain export --help)")
    from hvdtrain.cli.export import run

    return run(
        Path(arguments["source"]),
        Path(arguments["out"]),
        force=arguments["force"],
        keep_names=arguments["keep_names"],
    )


def _compare(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    systems = check_compare_flags(arguments, unknown)
    from hvdtrain.cli.compare import run

    return run(arguments, systems)


def _bench(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    checked = check_bench_flags(arguments, unknown, topology)
    from hvdtrain.cli.bench import run

    return run(checked, topology)


def _plan(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    check_plan_flags(arguments, unknown, topology)
    from hvdtrain.cli.plan import run

    return run(arguments)


def _evaluate(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    if unknown:
        raise UsageError(f"not understood: {' '.join(unknown)} (see hvdtrain evaluate --help)")
    from hvdtrain.cli.trained import evaluate

    return evaluate(arguments)


def _predict(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    if unknown or arguments["top"] < 1:
        wrong = " ".join(unknown) or f"--top={arguments['top']}"
        raise UsageError(f"not understood: {wrong} (see hvdtrain predict --help)")
    from hvdtrain.cli.trained import predict

    return predict(arguments)


def _doctor(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    from hvdtrain.cli.doctor import run

    return run(arguments, unknown)


def _report(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    from hvdtrain.cli.reporting import run

    return run(arguments, unknown)


def _train(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    config = build_config(arguments, unknown)
    if arguments["print_config"]:
        if topology.rank == 0:
            say(dump_yaml(config))
        return EXIT_OK
    from hvdtrain.cli.train import run  # torch starts here, once the configuration is good

    return run(config, topology)
