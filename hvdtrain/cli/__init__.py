"""The command line: `hvdtrain COMMAND ...`. Each command's work is in a module of its name."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.cli.bench_options import add_bench_flags, check_bench_flags
from hvdtrain.cli.compare_options import DESCRIPTION as COMPARE
from hvdtrain.cli.compare_options import add_compare_flags, check_compare_flags
from hvdtrain.cli.doctor import add_doctor_flags
from hvdtrain.cli.failure import tell
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
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a model: alone, or on N workers under horovodrun -np N",
        description="Train one model. Alone it is one process; start N workers with "
        "`horovodrun -np N hvdtrain train ...`.",
        allow_abbrev=False,
    )
    train.add_argument("--config", metavar="FILE.yaml", help="options by name; flags win")
    train.add_argument(
        "--print-config", action="store_true", help="print the configuration and end"
    )
    add_train_flags(train)
    train.set_defaults(run=_train)
    launch = commands.add_parser(
        "launch",
        help="the same on several workers and hosts, checked, watched and restarted",
        description=LAUNCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_launch_flags(launch)
    launch.set_defaults(run=_launch)
    installation = commands.add_parser(
        "verify",
        help="prove this installation's collectives, under horovodrun -np N",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_verify_flags(installation)
    installation.set_defaults(run=_verify)
    verify = commands.add_parser(
        "verify-resume",
        help="prove that a configuration resumes exactly: -- train ...",
        description="Train once without and once with interruptions, and compare the parameters.",
        allow_abbrev=False,
    )
    verify.add_argument("-np", type=int, default=1, metavar="N", help="workers (default: 1)")
    verify.add_argument("--controller", choices=("gloo", "mpi"), default="gloo")
    verify.add_argument("--cuts", type=int, default=6, help="interruptions (default: 6)")
    verify.add_argument("--seed", type=int, default=0, help="of their moments (default: 0)")
    verify.add_argument("train", nargs="*", metavar="-- train ...", help="what is to be verified")
    verify.set_defaults(run=_verify_resume)
    export = commands.add_parser(
        "export",
        help="write plain weights that any PyTorch script loads",
        description="Write the weights of a run (its best checkpoint), of a checkpoint, or of a "
        "file saved from DataParallel, DistributedDataParallel or torch.compile, as plain "
        "safetensors, under the names of the model itself.",
        allow_abbrev=False,
    )
    export.add_argument("source", metavar="SOURCE", help="run, checkpoint, or weights file")
    export.add_argument("out", metavar="OUT.safetensors")
    export.add_argument("--force", action="store_true", help="replace OUT if it is there")
    export.add_argument("--keep-names", action="store_true", help="leave wrappers' prefixes")
    export.set_defaults(run=_export)
    comparison = commands.add_parser(
        "compare",
        help="every way to train on N devices, on the same work, one after the other",
        description=COMPARE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_compare_flags(comparison)
    comparison.set_defaults(run=_compare)
    bench = commands.add_parser(
        "bench",
        help="measure on this machine: scaling, start, classic, step, ring, audit, checkpoint",
        description="Measure on this machine, beside the peers, in rounds in turns.",
        allow_abbrev=False,
    )
    add_bench_flags(bench)
    bench.set_defaults(run=_bench)
    plan = commands.add_parser(
        "plan",
        help="predict step time and efficiency on N workers, from latency, bandwidth and compute",
        description=PLAN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_plan_flags(plan)
    plan.set_defaults(run=_plan)
    evaluate = commands.add_parser(
        "evaluate",
        help="exact metrics of a checkpoint, on one device",
        description="Evaluate a run (its best checkpoint) or a checkpoint on its validation data.",
        allow_abbrev=False,
    )
    add_evaluate_flags(evaluate)
    evaluate.set_defaults(run=_evaluate)
    predict = commands.add_parser(
        "predict",
        help="the likeliest classes of images, on one device",
        description="Tell what a trained model takes images for.",
        allow_abbrev=False,
    )
    add_predict_flags(predict)
    predict.set_defaults(run=_predict)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, or every host of a hostfile",
        description="Check what training on these hosts needs, each check ok, warn or fail, with "
        "the fix. Without hosts: this machine. Exit code 3: a check failed.",
        allow_abbrev=False,
    )
    add_doctor_flags(doctor)
    doctor.set_defaults(run=_doctor)
    report = commands.add_parser(
        "report",
        help="plots of runs, and one page that compares them",
        description="Read what runs have left, also those that were killed or still go on, and "
        "write plots (PNG) and index.html: one page that holds them all, with what each run came "
        "to and the options in which they differ.",
        allow_abbrev=False,
    )
    add_report_flags(report)
    report.set_defaults(run=_report)
    return parser


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
