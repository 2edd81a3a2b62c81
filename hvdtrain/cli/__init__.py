"""The command line: `hvdtrain COMMAND ...`. Each command's work is in a module of its name."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from types import FrameType

from hvdtrain import __version__
from hvdtrain.cli.options import Parser, add_train_flags
from hvdtrain.errors import EXIT_FAILED, HvdtrainError, Stopped, UsageError
from hvdtrain.log import complain
from hvdtrain.topology import Topology

# horovodrun ends all workers when the first one ends: the others give rank 0 time to speak.
GRACE_S = 2.0


def main() -> int:
    """Run `sys.argv`; returns the exit code."""
    topology = Topology()
    try:
        topology = Topology.from_environment()
        arguments = _parser().parse_args()
        return int(arguments.run(arguments, topology))
    except HvdtrainError as error:
        return _fail(error, topology)
    except Exception as error:
        place = f" on {topology.place}" if topology.size > 1 else ""
        summary = f"hvdtrain: failed{place}: {type(error).__name__}: {error}"
        complain(f"{summary}\n{traceback.format_exc().rstrip()}")
        _leave_at_once(EXIT_FAILED, topology)
        return EXIT_FAILED


def _parser() -> Parser:
    parser = Parser(
        prog="hvdtrain",
        description="Data-parallel PyTorch training on Horovod: N changes how fast, never what is "
        "learned.",
    )
    parser.add_argument("--version", action="version", version=f"hvdtrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a model: alone, or on N workers under horovodrun -np N",
        description="Train one model. Alone it is one process; start N workers with "
        "`horovodrun -np N hvdtrain train ...`.",
    )
    train.add_argument("--config", metavar="FILE.yaml", help="options by name; flags win")
    train.add_argument(
        "--print-config", action="store_true", help="print the configuration and end"
    )
    add_train_flags(train)
    train.set_defaults(run=_train)
    return parser


def _train(arguments: object, topology: Topology) -> int:
    from hvdtrain.cli.train import run  # torch starts here, once the command is known

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    return run(vars(arguments), topology)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    raise Stopped(number, signal.Signals(number).name)


def _fail(error: HvdtrainError, topology: Topology) -> int:
    """Tell the user, once where all ranks met the same; returns the exit code."""
    same_everywhere = error.on_all_ranks or isinstance(error, UsageError)
    if not same_everywhere:
        place = f" on {topology.place}" if topology.size > 1 else ""
        complain(f"hvdtrain: error{place}: {error}")
        _leave_at_once(error.exit_code, topology)
    elif topology.rank == 0:
        complain(f"hvdtrain: error: {error}")
    else:
        time.sleep(GRACE_S)
    return error.exit_code


def _leave_at_once(exit_code: int, topology: Topology) -> None:
    """End without waiting for ranks that know nothing of this failure.

    An orderly end would ask them to agree on Horovod's shutdown, or on MPI's.
    """
    if topology.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


if __name__ == "__main__":
    sys.exit(main())
