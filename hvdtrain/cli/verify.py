"""`hvdtrain verify` on N workers: the collectives of this installation against the ring."""

import re
from collections.abc import Sequence
from typing import Any

from hvdtrain.cli.flags import Command, Flag, train_flag, wrong_flags
from hvdtrain.config.fields import Check
from hvdtrain.errors import refuse
from hvdtrain.evidence.verify import DTYPES, FAULTS, OPERATIONS
from hvdtrain.topology import Topology

SIZES = "0,4,4100,64K,4M"
FULL_SIZES = "0,4,1K,4100,64K,65540,1M,4M,16M,64M"
MOST_BYTES = 1 << 30
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

FLAGS = (
    Flag("--full", f"verify sizes up to 64 MiB: --sizes {FULL_SIZES}", bool),
    Flag("--ops", f"verify some of {', '.join(OPERATIONS)}; allreduce: all four", metavar="A,B"),
    Flag("--dtypes", f"verify some of {', '.join(DTYPES)}", metavar="A,B"),
    Flag("--sizes", f"verify these sizes in bytes, K, M or G ({SIZES})", metavar="A,B"),
    Flag(
        "--inject",
        f"inject a fault, to check detection: {', '.join(FAULTS)}",
        metavar="FAULT",
        check=Check(FAULTS.__contains__, f"={{}}: unknown; choose from {', '.join(FAULTS)}"),
    ),
    Flag("--json", "write the outcome of every case to FILE", metavar="FILE"),
    train_flag("seed", "seed values and faults"),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Collective: verify and return the exit code. Raises UsageError, also for one worker."""
    if topology.size < 2:
        problems.append(
            "verify compares workers: start two or more with `hvdtrain launch -np 2 -- verify`, or "
            "`horovodrun -np 2 --gloo hvdtrain verify`"
        )
    if arguments["full"] and arguments["sizes"]:
        problems.append("--full and --sizes: give one of them")
    problems += wrong_flags(FLAGS, arguments)
    sizes = arguments["sizes"] or (FULL_SIZES if arguments["full"] else SIZES)
    chosen = (
        _choose("--ops", arguments["ops"], OPERATIONS, problems),
        _choose("--dtypes", arguments["dtypes"], DTYPES, problems),
        _sizes(sizes, problems),
    )
    refuse(problems)
    from hvdtrain.evidence.verify.cases import plan_cases
    from hvdtrain.evidence.verify.verification import verify

    return verify(plan_cases(*chosen, topology.size), arguments, topology)


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


COMMAND = Command(
    "verify the collectives of this installation, under hvdtrain launch -np N",
    """\
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
""",
    FLAGS,
    run,
)
