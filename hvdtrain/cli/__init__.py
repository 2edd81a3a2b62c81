"""The command line, `hvdtrain COMMAND ...`: one module per command.

A command's module ends with COMMAND: what the help says, the flags, and the function that runs it.
It imports nothing slow outside of that function, as `--help` imports every module, and nothing that
only Linux has: `--help` and `--version` answer on any system.
"""

import os
import signal
import sys
from argparse import SUPPRESS
from importlib import import_module

from hvdtrain import __version__
from hvdtrain.cli.flags import Parser, add_command
from hvdtrain.errors import PreflightError, UsageError
from hvdtrain.log import open_missing_streams, report_left_out
from hvdtrain.run.process import report_failure
from hvdtrain.topology import Topology

GROUPS = {  # as in `hvdtrain --help` and the README
    "train": (
        *("train", "launch", "jobs", "attach", "logs", "stop", "doctor", "stage"),
        *("evaluate", "predict", "export", "install-horovod"),
    ),
    "trust": ("verify", "verify-n", "verify-resume", "replay", "diff"),
    "measure": ("report", "bench", "compare", "plan"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
# Those that need nothing of Linux: they read what was trained, on one device.
ANYWHERE = ("export", "evaluate", "predict", "diff", "report")
SYSTEMS = {"win32": "Windows", "cygwin": "Windows", "darwin": "macOS"}  # by sys.platform


def main() -> int:
    """Run the command in `sys.argv` and return the exit code."""
    open_missing_streams()
    topology = Topology()
    try:
        topology = Topology.from_environment()
        arguments, unknown = make_parser().parse_known_args()
        refuse_elsewhere(arguments.subcommand, sys.platform)
        require_folder()
        return int(arguments.run(vars(arguments), arguments.explain(unknown), topology))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        return report_failure(error, topology)
    finally:
        report_left_out()


def require_folder() -> None:
    """Raise UsageError if the working folder has been deleted."""
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        shown = os.environ.get("PWD", "the working folder")
        raise UsageError(f"{shown}: has been deleted; change to another folder first") from None


def refuse_elsewhere(command: str, platform: str) -> None:
    """Raise PreflightError for a command that needs Linux on another system, by `sys.platform`."""
    if platform == "linux" or command in ANYWHERE:
        return
    raise PreflightError(
        f"hvdtrain {command} needs Linux, and this is {SYSTEMS.get(platform, platform)}: run it on "
        f"a Linux machine, in WSL2 or in a Linux container. Here only {', '.join(ANYWHERE)} run"
    )


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="hvdtrain",
        description="Data-parallel PyTorch training on Horovod: N changes how fast, never what is "
        "learned.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hvdtrain {__version__}")
    parsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=SUPPRESS, prog="hvdtrain"
    )
    for title, names in GROUPS.items():
        for name in names:
            module = import_module(f"hvdtrain.cli.{name.replace('-', '_')}")
            subparser = add_command(parsers, name, module.COMMAND)
            subparser.set_defaults(subcommand=name)
            if name == "bench":
                module.add_benches(subparser)
        # argparse lists the commands of a parser in one group only.
        lines = [line for line in parsers._choices_actions if line.dest in names]
        parser.add_argument_group(title)._group_actions += lines
    return parser
