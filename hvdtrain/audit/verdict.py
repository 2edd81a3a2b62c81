"""The diagnosis of a mismatch: a wrong reduction, or a wrong copy on one rank; and its location."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hvdtrain.audit.findings import Finding, bits
from hvdtrain.errors import name_ranks
from hvdtrain.ring import Transport, broadcast, gather

Named = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass(frozen=True)
class Groups:
    """The ranks, divided by the bits that they hold of a block."""

    trusted: list[int]  # the largest set with equal bits; of equally large ones the more accurate
    others: list[int]


def group(digests: Sequence[float], findings: Sequence[Finding]) -> Groups:
    """Divide the ranks by their digests and findings of one block, given in rank order."""
    holders: dict[float, list[int]] = {}
    for rank, value in enumerate(digests):
        holders.setdefault(value, []).append(rank)
    trusted = max(
        holders.values(),
        key=lambda ranks: (len(ranks), -min(findings[r].ratio for r in ranks), -ranks[0]),
    )
    return Groups(trusted, [rank for rank in range(len(digests)) if rank not in trusted])


def first_differences(
    reduced: torch.Tensor, groups: Groups, transport: Transport
) -> list[tuple[int, float, float] | None]:
    """Collective: return by rank how it first differs from the trusted ranks, or None.

    A difference is the place in the block, the rank's value there, and the trusted value.
    """
    own = bits(reduced)
    theirs = own.copy()
    broadcast(theirs.reshape(-1), transport, groups.trusted[0])
    found = np.zeros(4)
    wrong = np.flatnonzero((own != theirs).any(axis=1))
    if wrong.size:
        place = int(wrong[0])
        trusted_values = torch.from_numpy(theirs.reshape(-1)).view(reduced.dtype)
        values = [float(v[place].double()) for v in (reduced, trusted_values)]
        found[:] = [1, place, *values]
    rows = gather(found, transport).tolist()
    return [(int(row[1]), row[2], row[3]) if row[0] else None for row in rows]


def headline(step: int, findings: Sequence[Finding]) -> str:
    """Return the first line: errors beyond the bound, or different values within it."""
    if any(finding.ratio > 1 for finding in findings):
        return f"audit: reduced gradients are wrong at step {step}"
    return f"audit: ranks hold different reduced gradients at step {step}"


def describe_changed(changed: Sequence[int], named: Named) -> list[str]:
    """Return the first suspicion if code has changed gradients, as at most one line.

    `changed`: by rank, the number of the first such parameter, or -1.
    """
    ranks = [rank for rank, number in enumerate(changed) if number >= 0]
    if not ranks:
        return []
    return [
        f"{_capital(name_ranks(ranks))}: code changed parameter {named[changed[ranks[0]]][0]}'s "
        ".grad between the backward pass and optimizer.step(), while it was being reduced. Wait "
        "for the reduction before clipping or unscaling: optimizer.synchronize(), then "
        "`with optimizer.skip_synchronize(): optimizer.step()`"
    ]


def describe_finding(rank: int, finding: Finding, named: Named) -> str:
    """Return one line: rank, parameter, index, values, error and bound."""
    error = abs(finding.reduced - finding.reference)
    limit = f"bound {finding.bound:.3g}" if finding.bound else "and not a bit may differ"
    return (
        f"  rank {rank}: {_place(finding.parameter, finding.index, named)}: reduced "
        f"{finding.reduced:.9g}, reference {finding.reference:.9g}, error {error:.3g}, {limit}"
    )


def describe_difference(
    rank: int, place: tuple[int, int], own: float, theirs: float, groups: Groups, named: Named
) -> str:
    """Return one line for a rank whose value is within its bound, but differs from the others."""
    return (
        f"  rank {rank}: {_place(*place, named)}: reduced {own:.9g}, "
        f"but {theirs:.9g} on {name_ranks(groups.trusted)} (both within the rounding bound)"
    )


def conclusion(groups: Groups, trusted_is_wrong: bool) -> str:
    """Return the probable cause: the reduction, a copy, or both."""
    if not groups.others:
        return (
            "All ranks hold the same wrong values: the reduction is at fault (a rank's term lost "
            "or counted twice, wrong scaling, data damaged before it was added), or code that "
            "changes gradients before they are checked"
        )
    if trusted_is_wrong:
        return (
            f"{_capital(name_ranks(groups.others))} and {name_ranks(groups.trusted)} hold "
            "different values, and neither are right: both the reduction and what followed it "
            "are at fault"
        )
    return (
        f"{_capital(name_ranks(groups.others))}: the copy there differs from that of "
        f"{name_ranks(groups.trusted)}, which is right: delivery, memory, or code that changes "
        "gradients is at fault there, or the rank is out of step with the others"
    )


def _place(parameter: int, index: int, named: Named) -> str:
    name, tensor = named[parameter]
    return f"parameter {name}, index {[int(i) for i in np.unravel_index(index, tensor.shape)]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
