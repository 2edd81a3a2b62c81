"""The worst errors of an audit over all ranks, and the diagnosis of a mismatch.

A mismatch is a wrong reduction or a wrong copy on one rank; the diagnosis names which, and where.
"""

import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.audit.capture import Block
from hvdtrain.errors import name_ranks
from hvdtrain.exchange.gradients import as_real
from hvdtrain.ring import Transport, broadcast, gather
from hvdtrain.tensors import bytes_of

Named = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass(frozen=True)
class WorstError:
    """The element of one rank's gradients with the largest error in units of its bound."""

    ratio: float  # error / bound
    block: int
    parameter: int
    index: int  # in the flattened parameter
    reduced: float
    reference: float
    bound: float


NO_ERROR = WorstError(0.0, 0, 0, 0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Difference:
    """The first element of a block that differs from the trusted ranks' in any bit."""

    parameter: int
    index: int  # in the flattened parameter
    value: float
    trusted_value: float


def digest(values: torch.Tensor) -> int:
    """Return the CRC-32 of the bytes: equal bits give equal digests on every rank."""
    return zlib.crc32(bytes_of(values).data)


def gather_errors(
    local_worst: WorstError, further: Sequence[float], transport: Transport
) -> tuple[list[WorstError], NDArray[np.float64]]:
    """Collective: return the worst error of every rank, and a table (ranks, numbers) of `further`.

    They travel over the ring as float64, in which a CRC-32 is exact.
    """
    table = gather(np.array([*astuple(local_worst), *further], np.float64), transport)
    width = len(astuple(local_worst))
    errors = [
        WorstError(ratio, int(block), int(parameter), int(index), *values)
        for ratio, block, parameter, index, *values in table[:, :width].tolist()
    ]
    return errors, table[:, width:]


def trusted_ranks(digests: Sequence[float], errors: Sequence[WorstError]) -> list[int]:
    """Return the largest set of ranks with equal bits; of equally large ones the more accurate.

    `digests`, `errors`: those of one block, in rank order.
    """
    holders: dict[float, list[int]] = {}
    for rank, value in enumerate(digests):
        holders.setdefault(value, []).append(rank)
    return max(
        holders.values(),
        key=lambda ranks: (len(ranks), -min(errors[r].ratio for r in ranks), -ranks[0]),
    )


def first_differences(
    block: Block, reduced: torch.Tensor, trusted: int, transport: Transport
) -> list[Difference | None]:
    """Collective: return by rank how its `reduced` first differs from that of rank `trusted`."""
    local_bytes = bytes_of(reduced).reshape(-1, reduced.element_size())
    theirs = local_bytes.copy()
    broadcast(theirs, transport, trusted)
    row = np.zeros(5)
    wrong = np.flatnonzero((local_bytes != theirs).any(axis=1))
    if wrong.size:
        position = int(wrong[0])
        trusted_values = torch.from_numpy(theirs.reshape(-1)).view(reduced.dtype)
        values = [float(v[position].double()) for v in (reduced, trusted_values)]
        row[:] = [1, *block.locate(position), *values]
    return [
        Difference(int(parameter), int(index), *values) if differs else None
        for differs, parameter, index, *values in gather(row, transport).tolist()
    ]


def describe_mismatch(
    step: int,
    errors: Sequence[WorstError],
    differences: Sequence[Difference | None],
    changed: Sequence[int],
    trusted: list[int],
    named: Named,
) -> list[str]:
    """Return the lines of the message on a mismatch.

    By rank: `errors`, `differences`, and `changed`, the number of the first parameter whose
    gradient was changed by code, or -1.
    """
    wrong = any(error.ratio > 1 for error in errors)
    what = "reduced gradients are wrong" if wrong else "ranks hold different reduced gradients"
    lines = [f"audit: {what} at step {step}"]
    touched = [rank for rank, number in enumerate(changed) if number >= 0]
    if touched:
        lines.append(
            f"{name_ranks(touched).capitalize()}: code changed parameter "
            f"{named[changed[touched[0]]][0]}'s .grad between the backward pass and "
            "optimizer.step(), while it was being reduced. Wait for the reduction before clipping "
            "or unscaling: `workers.reduce_gradients(optimizer)` after hvdtrain.distribute; with "
            "Horovod's own optimizer `optimizer.synchronize()`, and the step in `with "
            "optimizer.skip_synchronize():`"
        )
    for rank, (error, difference) in enumerate(zip(errors, differences, strict=True)):
        if error.ratio > 1:
            lines.append(f"  rank {rank}: {_describe_error(error, named)}")
        elif difference:
            lines.append(
                f"  rank {rank}: {_place(difference.parameter, difference.index, named)}: reduced "
                f"{difference.value:.9g}, but {difference.trusted_value:.9g} on "
                f"{name_ranks(trusted)} (both within the rounding bound)"
            )
    if not touched:
        lines.append(_conclusion(trusted, errors))
    return lines


def _describe_error(worst: WorstError, named: Named) -> str:
    error = abs(worst.reduced - worst.reference)
    limit = f"bound {worst.bound:.3g}" if worst.bound else "and not a bit may differ"
    return (
        f"{_place(worst.parameter, worst.index, named)}: reduced {worst.reduced:.9g}, "
        f"reference {worst.reference:.9g}, error {error:.3g}, {limit}"
    )


def _conclusion(trusted: list[int], errors: Sequence[WorstError]) -> str:
    """Return the probable cause: the reduction, a copy, or both."""
    others = [rank for rank in range(len(errors)) if rank not in trusted]
    if not others:
        return (
            "All ranks hold the same wrong values: the reduction is at fault (a rank's term lost "
            "or counted twice, wrong scaling, data damaged before it was added), or code that "
            "changes gradients before they are checked"
        )
    if errors[trusted[0]].ratio > 1:
        return (
            f"{name_ranks(others).capitalize()} and {name_ranks(trusted)} hold different values, "
            "and neither are right: both the reduction and what followed it are at fault"
        )
    return (
        f"{name_ranks(others).capitalize()}: the copy there differs from that of "
        f"{name_ranks(trusted)}, which is right: delivery, memory, or code that changes gradients "
        "is at fault there, or the rank is out of step with the others"
    )


def _place(parameter: int, index: int, named: Named) -> str:
    name, tensor = named[parameter]
    coordinates = np.unravel_index(index, as_real(tensor.detach()).shape)
    return f"parameter {name}, index {[int(coordinate) for coordinate in coordinates]}"
