"""The command line: `hvdtrain COMMAND ...`. Each command's work is in a module of its name."""

from __future__ import annotations

from typing import Any

from hvdtrain import __version__
from hvdtrain.cli.failure import tell
from hvdtrain.cli.options import Parser, add_train_flags, build_config, dump_yaml
from hvdtrain.errors import EXIT_OK
from hvdtrain.log import say
from hvdtrain.topology import Topology


def main() -> int:
    """Run `sys.argv`; returns the exit code."""
    topology = Topology()
    try:
        topology = Topology.from_environment()
        arguments, unknown = _parser().parse_known_args()
        return int(arguments.run(vars(arguments), unknown, topology))
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
    return parser


def _train(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    config = build_config(arguments, unknown)
    if arguments["print_config"]:
        if topology.rank == 0:
            say(dump_yaml(config))
        return EXIT_OK
    from hvdtrain.cli.train import run  # torch starts here, once the configuration is good

    return run(config, topology)
