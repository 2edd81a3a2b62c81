"""`hvdtrain verify` on N workers: the collectives of this installation against the ring."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.evidence.verify import DTYPES, FAULTS, OPERATIONS, VerifyOptions
from hvdtrain.topology import Topology

SIZES = "0,4,4100,64K,4M"
FULL_SIZES = "0,4,1K,4100,64K,65540,1M,4M,16M,64M"
MOST_BYTES = 1 << 30
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

HELP = "verify the collectives of this installation, under hvdtrain launch -np N"
DESCRIPTION = """\
Verify the collectives of this installation: operations by dtypes, sizes and ways of submission,
against a ring in plain Python that shares no code with Horovod. Where Horovod takes GPU tensors and
each rank has a GPU, all cases are run on these too, by NCCL if Horovod is built with it.

A result must lie within the proven rounding bound (averages of integers: within one, as fractions
are truncated; other integers, min, max, allgather and broadcast: equal), have the same bits on
every rank and, where the order of summation is fixed, the same bits in every run. Values differ by
rank and position; special values are subnormal, infinite, NaN, cancelling or overflowing.

busbw is defined as in nccl-tests, for the largest size: the bytes of the buffer divided by the time
of the slowest rank (median of 3), times 2(N-1)/N for allreduce, (N-1)/N for allgather and
reducescatter, 1 for broadcast.

Exit code 17: a result is wrong. With --inject, 17: the fault was found, as expected; 1: it was not.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--full", action="store_true", help=f"verify sizes up to 64 MiB: --sizes {FULL_SIZES}"
    )
    parser.add_argument(
        "--ops", metavar="A,B", help=f"verify some of {', '.join(OPERATIONS)}; allreduce: all four"
    )
    parser.add_argument("--dtypes", metavar="A,B", help=f"verify some of {', '.join(DTYPES)}")
    parser.add_argument(
        "--sizes", metavar="A,B", help=f"verify these sizes in bytes, K, M or G ({SIZES})"
    )
    parser.add_argument(
        "--inject", metavar="FAULT", help=f"inject a fault, to check detection: {', '.join(FAULTS)}"
    )
    parser.add_argument("--json", metavar="FILE", help="write the outcome of every case to FILE")
    parser.add_argument("--seed", type=int, default=0, help="seed values and faults (default: 0)")


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Collective: verify and return the exit code. Raises UsageError, also for one worker."""
    if topology.size < 2:
        problems.append(
            "verify compares workers: start two or more with `hvdtrain launch -np 2 -- verify`, or "
            "`horovodrun -np 2 --gloo hvdtrain verify`"
        )
    if arguments["full"] and arguments["sizes"]:
        problems.append("--full and --sizes: give one of them")
    if arguments["seed"] < 0:
        problems.append(f"--seed={arguments['seed']}: must be at least 0")
    fault = arguments["inject"]
    if fault is not None and fault not in FAULTS:
        problems.append(f"--inject={fault}: unknown; choose from {', '.join(FAULTS)}")
    operations = _choose("--ops", arguments["ops"], OPERATIONS, problems)
    dtypes = _choose("--dtypes", arguments["dtypes"], DTYPES, problems)
    sizes = _sizes(arguments["sizes"] or (FULL_SIZES if arguments["full"] else SIZES), problems)
    if problems:
        raise UsageError(*problems)
    from hvdtrain.evidence.verify.verification import verify

    json, seed = arguments["json"], arguments["seed"]
    return verify(VerifyOptions(operations, dtypes, sizes, fault, json, seed), topology)


def _choose(
    flag: str, text: str | None, choices: Sequence[str], problems: list[str]
) -> tuple[str, ...]:
    """Return the names of `choices` listed in `text`, in order of `choices`. A prefix before a dash
    selects all names that have it.
    """
    if text is None:
        return tuple(choices)
    chosen = set()
    for part in text.split(","):
        matches = {name for name in choices if name == part or name.startswith(f"{part}-")}
        if not matches:
            problems.append(f"{flag}={part}: unknown; choose from {', '.join(choices)}")
        chosen |= matches
    return tuple(name for name in choices if name in chosen)


def _sizes(text: str, problems: list[str]) -> tuple[int, ...]:
    sizes = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,12})([KMG]?)", part.upper())
        size = int(match[1]) * UNITS[match[2]] if match else -1
        if not 0 <= size <= MOST_BYTES:
            problems.append(f"--sizes={part}: expected bytes from 0 to 1G, such as 4100 or 4M")
        sizes.add(size)
    return tuple(sorted(sizes))
