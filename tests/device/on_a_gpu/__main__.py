"""Checks of hvdtrain on one NVIDIA GPU, on a machine that needs no network.

    python -m tests.device.on_a_gpu assemble .gpu    # with a network
    python -m tests.device.on_a_gpu run .gpu OUT     # on the machine with the GPU, in the checkout

`assemble` downloads what the other machine lacks. `run` builds Horovod with NCCL and trains, the
most telling checks first, until all are done or `--limit-s` is over: with 16 cores some 11 minutes,
or 8 if the two archives of built wheels that a first run leaves in OUT are put into the folder. It
prints a line for each check and keeps the logs in OUT. Its Python must have torch with CUDA 13;
whatever else it has is used. `--device cpu` tries the script itself where there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.device.on_a_gpu.checks import CHECKS, Kit
from tests.device.on_a_gpu.parts import assemble

LIMIT_S = 540  # nine minutes


def main(argv: list[str]) -> int:
    """Run the command line; return 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.device.on_a_gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    own = commands.add_parser("assemble", help="download what the machine with the GPU lacks")
    own.add_argument("folder", type=Path)
    own.add_argument("--python", default="3.12", help="of the machine with the GPU (default: 3.12)")
    own = commands.add_parser("run", help="build and check, on the machine with the GPU")
    own.add_argument("folder", type=Path)
    own.add_argument("out", type=Path)
    own.add_argument("--limit-s", type=float, default=LIMIT_S)
    own.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    own.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    arguments = parser.parse_args(argv)
    if arguments.command == "assemble":
        return assemble(arguments.folder, arguments.python)
    kit = Kit(arguments.folder, arguments.out, arguments.device, arguments.limit_s)
    for name in arguments.only:
        kit.group(name, CHECKS[name])
    return kit.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
