"""What each rank sends and holds for one step on N workers: gradients, canonical sums, an audit.

Messages follow one another, so each costs a latency. A reduction of B bytes in a ring of N ranks is
2 (N - 1) messages and 2 (N - 1) / N B bytes of each rank; a reduce-scatter or an all-gather is half
of that (`hvdtrain.ring.algorithm`). Gradients are of float32.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from hvdtrain.audit.capture import block_elements
from hvdtrain.audit.mismatch import NO_ERROR
from hvdtrain.exchange.buckets import grouped, suitable_bucket_bytes
from hvdtrain.exchange.canonical import BUCKET_BYTES
from hvdtrain.exchange.canonical_rows import GATHERED_BYTES
from hvdtrain.exchange.rounding import BLOCK

MB = 1e6
VALUE, DOUBLE = 4, 8  # bytes
KINDS = ("gradients", "canonical sums", "an audit")
WIDTH = 31  # of the columns of a kind


@dataclass(frozen=True)
class RankTraffic:
    """What one rank sends and holds for a step."""

    sent_bytes: float
    messages: int  # one after another
    held_bytes: float  # beside model, gradients and buckets


def of_gradients(lengths: Sequence[int], workers: int) -> RankTraffic:
    """Return the traffic of the gradients themselves. `lengths`: elements of each parameter, in the
    order in which the gradients are made.
    """
    sizes = [VALUE * length for length in lengths]
    groups = grouped(sizes, suitable_bucket_bytes(workers))
    return _reduced((sum(sizes[index] for index in group) for group in groups), workers, 0)


def of_canonical_sums(lengths: Sequence[int], workers: int) -> RankTraffic:
    """Return the traffic of the same gradients with a virtual worker on each of the workers."""
    operations, held = list[int](), 0
    sizes = [VALUE * length for length in lengths]
    for group in grouped(sizes, suitable_bucket_bytes(workers, BUCKET_BYTES)):
        rows = sum(-(-lengths[index] // BLOCK) for index in group)
        integers = VALUE * BLOCK * rows
        held += integers
        if workers > 1 and workers * integers <= GATHERED_BYTES:
            operations.append(workers * integers)
        else:
            operations += [VALUE * (rows + 1), integers]
    return _reduced(operations, workers, held)


def of_audit(lengths: Sequence[int], workers: int) -> RankTraffic:
    """Return the further traffic of an audit of all gradients against the rounding bound."""
    most = block_elements(workers)
    blocks = blocks_of(lengths, most)
    row = DOUBLE * (len(astuple(NO_ERROR)) + blocks + 1)
    # Of each element its value and its magnitude.
    return RankTraffic(
        sent_bytes=(workers - 1) * (2 * DOUBLE * sum(lengths) / workers + row),
        messages=(workers - 1) * (blocks + 1),
        held_bytes=VALUE * sum(lengths) + 2 * DOUBLE * min(most, sum(lengths)) + workers * row,
    )


def blocks_of(lengths: Iterable[int], most: int) -> int:
    """Return the number of blocks of an audit (`hvdtrain.audit.capture`): parameters are cut into
    pieces of at most `most` elements, and neighbours share a block while they fit.
    """
    blocks = room = 0
    for length in lengths:
        whole, rest = divmod(length, most)
        blocks, room = blocks + whole, 0 if whole else room
        if rest > room:
            blocks, room = blocks + 1, most
        room -= rest
    return blocks


def _reduced(sizes: Iterable[int], workers: int, held_bytes: float) -> RankTraffic:
    operations = list(sizes)
    return RankTraffic(
        sent_bytes=2 * (workers - 1) / workers * sum(operations),
        messages=2 * (workers - 1) * len(operations),
        held_bytes=held_bytes,
    )


def by_workers(lengths: Sequence[int], counts: Iterable[int]) -> list[dict[str, Any]]:
    """Return plain values for each number of workers."""
    makers = (of_gradients, of_canonical_sums, of_audit)
    return [
        {"workers": n}
        | {kind: asdict(of(lengths, n)) for kind, of in zip(KINDS, makers, strict=True)}
        for n in counts
    ]


def table(traffic: Sequence[dict[str, Any]]) -> list[str]:
    """Return a heading, and a line for each number of workers."""
    return [
        "each rank, for a step (float32, one virtual worker on each; an audit of all gradients):",
        " " * 7 + "".join(f"{kind:>{WIDTH}}" for kind in KINDS),
        f"{'N':>7}" + f"{'MB sent':>10}{'messages':>10}{'MB held':>11}" * len(KINDS),
        *(
            f"{row['workers']:>7,}"
            + "".join(
                f"{row[kind]['sent_bytes'] / MB:10,.2f}{row[kind]['messages']:10,}"
                f"{row[kind]['held_bytes'] / MB:11,.2f}"
                for kind in KINDS
            )
            for row in traffic
        ),
    ]
