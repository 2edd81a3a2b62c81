"""The command line, `hvdtrain COMMAND ...`: one module per command.

A command's module has HELP, DESCRIPTION, `add_flags(parser)` and `run(arguments, problems,
topology)`, which returns the exit code. `run` raises `problems`, those of unrecognised arguments,
together with its own. It imports nothing slow before `run`, as `--help` imports every module.
"""

from __future__ import annotations

import signal
from argparse import HelpFormatter, RawDescriptionHelpFormatter
from importlib import import_module

from hvdtrain import __version__
from hvdtrain.cli.flags import Parser
from hvdtrain.run.process import report_failure
from hvdtrain.topology import Topology

COMMANDS = (  # in the order of `hvdtrain --help`
    *("train", "launch", "verify", "verify-resume", "verify-n", "export", "compare", "bench"),
    *("plan", "evaluate", "predict", "replay", "diff", "doctor", "report"),
    "install-horovod",
)


def main() -> int:
    """Run the command in `sys.argv` and return the exit code."""
    topology = Topology()
    try:
        topology = Topology.from_environment()
        arguments, unknown = make_parser().parse_known_args()
        return int(arguments.run(vars(arguments), arguments.explain(unknown), topology))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        return report_failure(error, topology)


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="hvdtrain",
        description="Data-parallel PyTorch training on Horovod: N changes how fast, never what is "
        "learned.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hvdtrain {__version__}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        command = import_module(f"hvdtrain.cli.{name.replace('-', '_')}")
        keeps_lines = "\n" in command.DESCRIPTION.rstrip()
        formatter = RawDescriptionHelpFormatter if keeps_lines else HelpFormatter
        own = parsers.add_parser(
            name,
            help=command.HELP,
            description=command.DESCRIPTION,
            formatter_class=formatter,
            allow_abbrev=False,
        )
        command.add_flags(own)
        own.set_defaults(run=command.run, explain=own.explain)
    return parser
